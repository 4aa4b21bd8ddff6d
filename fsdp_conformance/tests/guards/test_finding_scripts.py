"""Guard: findings about engines have scripts that keep to the convention of ci/findings/README.md."""

from __future__ import annotations

import importlib
import re
from pathlib import Path
from typing import Any

import pytest

from fsdp_conformance.tests.guards import checkout
from fsdp_conformance.tests.guards.checkout import ROOT

pytestmark = checkout.required

_NAMED = re.compile(r"\((ci/findings/\S+\.py)\)\.$")


def _tools(name: str) -> Any:
    return importlib.import_module(name)


def _entries() -> list[Any]:
    """Those of both lists."""
    tool = _tools("known_findings")
    return [*tool.known_findings(), *tool.known_findings(tool.VERSIONS)]


def _readme() -> tuple[set[str], set[str]]:
    """The scripts without an entry, and the requirements and engines without a script."""
    text = (ROOT / "ci/findings/README.md").read_text(encoding="utf-8")
    alone = {f"ci/findings/{path}" for path in re.findall(r"^- `(\S+\.py)`", text, re.MULTILINE)}
    return alone, {f"{r} {engine}" for r, engine in re.findall(r"^- (R\d+) on ([\w*-]+):", text, re.MULTILINE)}


def test_every_entry_names_its_script() -> None:
    """The path stands at the end of the reason, unless the README says that there is none."""
    _, without = _readme()
    wrong = []
    for entry in _entries():
        script = _NAMED.search(entry.reason)
        exempt = f"{entry.case.partition('/')[0]} {entry.implementation}" in without
        if exempt == bool(script) or (script and not (ROOT / script[1]).is_file()):
            wrong.append((entry.implementation, entry.case))

    assert wrong == []


def test_every_script_is_named_by_an_entry_or_the_readme() -> None:
    """A script is named by only one of them: the README lists those that no case of the suite finds."""
    scripts = {match[1] for e in _entries() if (match := _NAMED.search(e.reason))}
    present = {str(path.relative_to(ROOT)) for path in _tools("finding_scripts").scripts()}
    alone, _ = _readme()

    assert present - scripts == alone


@pytest.mark.parametrize("path", sorted((ROOT / "ci/findings").glob("*/*.py")), ids=lambda path: path.stem)
def test_a_script_keeps_to_the_convention(path: Path) -> None:
    """It says how to run it and what is known upstream, and does without this package."""
    script = _tools("finding_scripts").read_script(path)

    assert script.target == str(path.relative_to(ROOT))
    assert script.upstream
    assert not [name for name in checkout.imports_of(path.read_text("utf-8"), "s") if name.startswith(checkout.PACKAGE)]
