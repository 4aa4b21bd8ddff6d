"""
Guard: the wheel holds the package, all of it, and nothing else.

A package that is missing from pyproject's list drops out of the wheel without a word, a data file that no pattern names
too, and a top-level `suites` or `fixtures` in a wheel would clash with other projects' packages.
"""

from __future__ import annotations

import ast
import email.parser
import fnmatch
import re
import shutil
import subprocess
import sys
import tomllib
import zipfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path, PurePosixPath
from typing import Any

import pytest

from fsdp_conformance.tests.guards import checkout
from fsdp_conformance.tests.guards.checkout import PACKAGE_DIRS, ROOT

pytestmark = [checkout.required, pytest.mark.slow]


def pyproject() -> dict[str, Any]:
    """The project's own description."""
    return tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))


def package_files() -> dict[str, Path]:
    """Every file of the package, without its tests: path in the wheel to path in the checkout."""
    files = {}
    for file in checkout.files():
        top, *rest = file.parts
        if top in PACKAGE_DIRS and rest and rest[0] != "tests":
            files["/".join([*PACKAGE_DIRS[top].split("."), *rest])] = file
    return files


def _requirement_name(requirement: str) -> str:
    name = re.match(r"[A-Za-z0-9._-]+", requirement)
    return re.sub(r"[-_.]+", "-", name.group()).lower() if name else ""


def _pins(*files: str) -> dict[str, str]:
    lines = [line.partition("#")[0].strip() for file in files for line in (ROOT / file).read_text("utf-8").splitlines()]
    return {_requirement_name(line): line for line in lines if line}


def test_every_package_directory_is_listed() -> None:
    """`packages` names each directory that holds Python files, under its installed name, and no other."""
    present = {
        PurePosixPath(name).parent.as_posix().replace("/", ".") for name in package_files() if name.endswith(".py")
    }

    assert sorted(present) == pyproject()["tool"]["setuptools"]["packages"]


def test_every_package_directory_has_an_init_file() -> None:
    """No directory is a namespace package by accident."""
    names = package_files()
    without = {str(PurePosixPath(name).parent) for name in names if name.endswith(".py")} - {
        str(PurePosixPath(name).parent) for name in names if name.endswith("/__init__.py")
    }

    assert without == set()


def test_the_mapping_of_directories_is_the_one_the_guards_know() -> None:
    """suites/ and fixtures/ are installed inside the package."""
    mapping = {directory: package for package, directory in pyproject()["tool"]["setuptools"]["package-dir"].items()}

    assert mapping == PACKAGE_DIRS


def test_every_data_file_is_named_by_a_pattern() -> None:
    """Each file that is not Python is matched by a pattern under package-data."""
    patterns: dict[str, list[str]] = pyproject()["tool"]["setuptools"]["package-data"]
    unmatched = [
        str(file)
        for name, file in package_files().items()
        if not name.endswith(".py")
        and not any(
            name.startswith(prefix) and fnmatch.fnmatch(name.removeprefix(prefix), pattern)
            for package, package_patterns in patterns.items()
            for prefix in [package.replace(".", "/") + "/"]
            for pattern in package_patterns
        )
    ]

    assert unmatched == []


def test_every_entry_point_names_something_that_exists() -> None:
    """Scripts, the pytest plugin, adapters and mutants are defined in the modules that pyproject names."""
    project = pyproject()["project"]
    groups = {"scripts": project["scripts"], **project["entry-points"]}
    modules = {module.name: module for module in checkout.modules()}
    missing = []
    for group, entries in groups.items():
        for name, target in entries.items():
            module, _, attribute = target.partition(":")
            if module not in modules or (attribute and attribute not in _defined(modules[module].tree())):
                missing.append(f"{group}: {name} = {target}")

    assert missing == []


def _defined(tree: ast.Module) -> set[str]:
    """Names that a module defines, or imports, at its top level."""
    names = set()
    for node in tree.body:
        if isinstance(node, ast.ClassDef | ast.FunctionDef):
            names.add(node.name)
        elif isinstance(node, ast.ImportFrom):
            names.update(alias.asname or alias.name for alias in node.names)
        elif isinstance(node, ast.Assign | ast.AnnAssign):
            targets = node.targets if isinstance(node, ast.Assign) else [node.target]
            names.update(target.id for target in targets if isinstance(target, ast.Name))
    return names


def test_every_requirement_is_pinned_for_ci() -> None:
    """ci/setup installs no version by chance: each requirement and each extra has a line in ci's constraints."""
    project = pyproject()["project"]
    extras = project["optional-dependencies"]
    base = [*project["dependencies"], *extras["xdist"], *extras["completion"], *extras["sign"], *extras["dev"]]
    pins = _pins("ci/constraints.txt")
    unpinned = [requirement for requirement in base if _requirement_name(requirement) not in pins]
    for extra in extras.keys() - {"xdist", "completion", "sign", "dev"}:
        pins_of_extra = pins | _pins(f"ci/constraints-{extra}.txt")
        unpinned += [
            requirement for requirement in extras[extra] if _requirement_name(requirement) not in pins_of_extra
        ]

    assert unpinned == []
    assert [line for line in pins.values() if "==" not in line] == []


def copy_checkout(target: Path) -> None:
    """Copy what git tracks or would add: a build directory left in the checkout must not leak into a wheel."""
    for file in checkout.files():
        (target / file).parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(ROOT / file, target / file)


@contextmanager
def built(source: Path, output: Path) -> Iterator[zipfile.ZipFile]:
    """The wheel of the project in `source`, open."""
    command = [sys.executable, "-m", "pip", "wheel", "--no-build-isolation", "--no-deps", "--no-index", "--quiet"]
    subprocess.run([*command, "--wheel-dir", str(output), str(source)], check=True, timeout=300)
    (path,) = output.glob("*.whl")
    with zipfile.ZipFile(path) as archive:
        yield archive


def surplus_and_missing(archive: zipfile.ZipFile) -> tuple[list[str], list[str]]:
    """Files of the wheel that belong neither to the package nor its metadata, and files that it lacks."""
    contents = {name for name in archive.namelist() if ".dist-info/" not in name}
    return sorted(contents - package_files().keys()), sorted(package_files().keys() - contents)


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Iterator[zipfile.ZipFile]:
    """The wheel of this checkout."""
    source = tmp_path_factory.mktemp("source")
    copy_checkout(source)
    with built(source, tmp_path_factory.mktemp("wheel")) as archive:
        yield archive


def test_the_wheel_holds_exactly_the_files_of_the_package(wheel: zipfile.ZipFile) -> None:
    """Every file of the package is in the wheel, under its installed name, and nothing else except metadata."""
    assert surplus_and_missing(wheel) == ([], [])


@pytest.mark.nightly
def test_the_wheel_guard_sees_a_package_that_dropped_out(tmp_path: Path) -> None:
    """Without its line in pyproject a package is missing from the wheel, and the guard names its files."""
    source = tmp_path / "source"
    copy_checkout(source)
    listing = source / "pyproject.toml"
    listing.write_text(listing.read_text("utf-8").replace('    "fsdp_conformance.faults",\n', ""), encoding="utf-8")

    with built(source, tmp_path / "wheel") as archive:
        surplus, missing = surplus_and_missing(archive)

    assert surplus == []
    assert "fsdp_conformance/faults/__init__.py" in missing


def test_the_wheel_has_one_top_level_name(wheel: zipfile.ZipFile) -> None:
    """Nothing called `suites`, `fixtures` or `tests` lands at the top of site-packages."""
    tops = {name.partition("/")[0] for name in wheel.namelist() if ".dist-info/" not in name}

    assert tops == {checkout.PACKAGE}


def test_the_wheel_says_what_it_is(wheel: zipfile.ZipFile) -> None:
    """Name, version, licence and Python are in the metadata, and the entry points are those of pyproject."""
    (metadata,) = [name for name in wheel.namelist() if name.endswith(".dist-info/METADATA")]
    (entries,) = [name for name in wheel.namelist() if name.endswith(".dist-info/entry_points.txt")]
    fields = email.parser.Parser().parsestr(wheel.read(metadata).decode())
    text = wheel.read(entries).decode()
    project = pyproject()["project"]

    assert (fields["Name"], fields["Requires-Python"]) == (project["name"], project["requires-python"])
    assert re.fullmatch(r"20\d\d\.(1[0-2]|[1-9])\.\d+", fields["Version"])
    assert fields["License-Expression"] == project["license"]
    assert [name for group in project["entry-points"].values() for name in group if f"{name} = " not in text] == []


def test_the_changelog_speaks_of_the_version() -> None:
    """The version in the package has a heading in CHANGELOG.md."""
    version = re.search(r'__version__ = "([^"]+)"', (ROOT / "fsdp_conformance/__init__.py").read_text("utf-8"))

    assert version is not None
    assert f"\n## {version.group(1)}" in (ROOT / "CHANGELOG.md").read_text("utf-8")
