"""
Guard: what a release and its users rely on fits together.

The version has one value everywhere, requirements have lowest versions, nothing is to be installed from an index that
does not have it, and issue forms have the form that GitHub reads.
"""

from __future__ import annotations

import re
import runpy
import shutil
from pathlib import Path
from typing import Any

import pytest
import yaml

import fsdp_conformance
from fsdp_conformance.tests.guards import checkout
from fsdp_conformance.tests.guards.checkout import ROOT
from fsdp_conformance.tests.guards.test_packaging import pyproject

pytestmark = checkout.required

FORMS = sorted((ROOT / ".github/ISSUE_TEMPLATE").glob("*.yml"))
#: Kind of an element to the attributes that it must have.
KINDS = {"markdown": {"value"}, "input": {"label"}, "textarea": {"label"}, "dropdown": {"label", "options"}}
#: The package as pip would look for it in an index: by its name, and without an address after `@`.
_FROM_AN_INDEX = re.compile(
    r"pip install (?:-\S+ )*['\"]?fsdp-conformance(?![^\n]* @ )|fsdp-conformance(?:\[[\w,]+\])?(?:[=~>]=)"
)
_PAGES = frozenset({".md", ".yml", ".yaml", ".jinja", ".py", ".sbatch", ".sh"})


def published(text: str) -> list[str]:
    """The places in a text that install the package from an index."""
    return [match.group() for match in _FROM_AN_INDEX.finditer(text)]


def release_problems() -> Any:
    """The function of ci/release that says what stands between a checkout and a tag."""
    return runpy.run_path(str(ROOT / "ci/release"))["problems"]


@pytest.fixture
def releasable(tmp_path: Path) -> Path:
    """The files of this checkout that ci/release reads, as they are when a version is released."""
    for name in ("fsdp_conformance/__init__.py", "CHANGELOG.md", "CITATION.cff", "pyproject.toml"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        shutil.copyfile(ROOT / name, tmp_path / name)
    described = tmp_path / "pyproject.toml"
    if "urls" not in pyproject()["project"]:
        urls = '\n[project.urls]\nRepository = "https://example.org"\n'
        described.write_text(described.read_text(encoding="utf-8") + urls, encoding="utf-8")
    return tmp_path


def test_no_text_installs_the_package_from_an_index() -> None:
    """It is on none yet, where the name could be anyone's: installs are from a checkout or from its repository."""
    own = Path(__file__).relative_to(ROOT)
    problems = {
        str(file): places
        for file in checkout.files()
        if file.suffix in _PAGES and file != own
        if (places := published((ROOT / file).read_text(encoding="utf-8")))
    }

    assert problems == {}


@pytest.mark.parametrize(
    ("text", "count"),
    [
        ("pip install fsdp-conformance", 1),
        ('python -m pip install -U "fsdp-conformance[xdist]"', 1),
        ("'fsdp-conformance[xdist]==2026.11.0'", 1),
        ('pip install torch "fsdp-conformance[xdist] @ git+https://example.org/x"', 0),
        ('pip install ".[xdist]"', 0),
        ("pip install -e path/to/fsdp-conformance", 0),
    ],
)
def test_the_guard_of_installs_speaks(text: str, count: int) -> None:
    """A name alone comes from an index; an address or a path does not."""
    assert len(published(text)) == count


def test_every_requirement_has_a_lowest_version() -> None:
    """`ci/setup lowest` installs it, so it must be a version, not a wish."""
    project = pyproject()["project"]
    all_of_them = [
        *project["dependencies"],
        *(item for items in project["optional-dependencies"].values() for item in items),
    ]

    assert [item for item in all_of_them if not re.fullmatch(r"[\w.-]+>=\d+(\.\d+)*", item)] == []


def test_the_citation_is_of_this_version() -> None:
    """CITATION.cff has the keys that its schema requires, and agrees with the package."""
    citation = yaml.safe_load((ROOT / "CITATION.cff").read_text(encoding="utf-8"))
    project = pyproject()["project"]

    assert {"cff-version", "message", "title", "authors"} <= citation.keys()
    assert citation["version"] == fsdp_conformance.__version__
    assert (citation["title"], citation["abstract"]) == (project["name"], project["description"])
    assert (citation["license"], citation["keywords"]) == (project["license"], project["keywords"])


@pytest.mark.parametrize("path", FORMS, ids=lambda path: path.name)
def test_an_issue_form_is_one_that_github_reads(path: Path) -> None:
    """Known keys and kinds, labels, and ids that differ."""
    form = yaml.safe_load(path.read_text(encoding="utf-8"))
    if path.name == "config.yml":
        assert form == {"blank_issues_enabled": True}
        return
    ids = [element["id"] for element in form["body"] if element["type"] != "markdown"]

    assert form.keys() == {"name", "description", "labels", "body"}
    assert [element for element in form["body"] if not KINDS[element["type"]] <= element["attributes"].keys()] == []
    assert [element for element in form["body"] if element.keys() - {"type", "id", "attributes", "validations"}] == []
    assert len(set(ids)) == len(ids) > 0


def test_the_job_that_publishes_runs_no_code_of_the_project() -> None:
    """It may sign and upload, so it takes files from the job that builds, which may do neither."""
    workflow = yaml.safe_load((ROOT / ".github/workflows/release.yml").read_text(encoding="utf-8"))
    publish, build = workflow["jobs"]["publish"], workflow["jobs"]["build"]

    assert workflow["permissions"] == {"contents": "read"}
    assert "permissions" not in build
    assert publish["permissions"] == {"id-token": "write"}
    assert [step for step in publish["steps"] if "run" in step or "checkout" in step["uses"]] == []


def test_a_checkout_that_fits_its_tag_can_be_released(releasable: Path) -> None:
    """The version of the package is the tag."""
    assert release_problems()(fsdp_conformance.__version__, releasable) == []


@pytest.mark.parametrize(
    ("name", "old", "new", "problem"),
    [
        ("fsdp_conformance/__init__.py", '__version__ = "', '__version__ = "1', "the tag must be the version"),
        ("CHANGELOG.md", f"## {fsdp_conformance.__version__}", "## soon", "CHANGELOG.md must have the heading"),
        ("CITATION.cff", f"version: {fsdp_conformance.__version__}", "version: 1", "CITATION.cff must have the line"),
        ("pyproject.toml", "Repository = ", "Home = ", "[project.urls] with Repository"),
    ],
)
def test_a_checkout_that_does_not_fit_is_not_released(
    name: str, old: str, new: str, problem: str, releasable: Path
) -> None:
    """Each file that disagrees is named."""
    path = releasable / name
    text = path.read_text(encoding="utf-8")
    assert old in text
    path.write_text(text.replace(old, new), encoding="utf-8")

    assert any(problem in line for line in release_problems()(fsdp_conformance.__version__, releasable))
