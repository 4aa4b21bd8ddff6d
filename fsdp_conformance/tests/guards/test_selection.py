"""
Guard: ci/test runs a part of the tests, and certifies a part of the profile.

That part leaves out no chapter, and no known finding of what it is chosen from.
"""

from __future__ import annotations

import importlib
from collections.abc import Iterable
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from pathlib import Path
from types import ModuleType
from typing import Any, cast

import pytest

from fsdp_conformance.contract.profile import Entry, load_profile
from fsdp_conformance.contract.requirement import load
from fsdp_conformance.run_settings import RunSettings
from fsdp_conformance.tests import conftest
from fsdp_conformance.tests.guards import checkout

pytestmark = checkout.required

ENTRIES = load_profile(RunSettings().profile).entries


@pytest.fixture(name="selection")
def _selection() -> ModuleType:
    return importlib.import_module("certified_cases")


@pytest.mark.parametrize(
    ("name", "profile"), [("reference", RunSettings().profile), ("reference-components", "components-2026.11")]
)
def test_every_chapter_has_a_case(selection: ModuleType, name: str, profile: str) -> None:
    """One case of each, at the smallest world size that is one."""
    entries = load_profile(profile).entries
    chosen = set(selection.selected(name))

    assert chapters(entry for entry in entries if entry.id in chosen) == chapters(entries)
    assert len(chosen) < len(entries) / 8


def chapters(entries: Iterable[Entry]) -> set[str]:
    """The letters of those of the primary requirements."""
    return {load()[entry.primary].chapter for entry in entries}


def test_components_are_selected_with_their_profile(selection: ModuleType, capsys: pytest.CaptureFixture[str]) -> None:
    """`ci/certify` takes the options as they are printed."""
    for name, options in (("reference-components", ["--profile", "components-2026.11"]), ("reference", [])):
        assert selection.main([name]) == 0
        words = capsys.readouterr().out.split()

        assert words[: len(options)] == options
        assert words[len(options) :] == [word for case in selection.selected(name) for word in ("--case", case)]


def test_the_quick_ones(selection: ModuleType) -> None:
    """With --quick, one case of each chapter of that profile."""
    quick = load_profile(selection.QUICK).entries
    chosen = set(selection.selected("torch-fsdp1", quick=True))

    assert chapters(entry for entry in quick if entry.id in chosen) == chapters(quick)
    assert chosen < {entry.id for entry in quick}


def test_every_known_finding_is_looked_for(selection: ModuleType) -> None:
    """Among the cases that ci/test chooses from; others are for the night."""
    quick = load_profile(selection.QUICK).entries
    for name, entries in (("reference", ENTRIES), ("torch-fsdp2", quick)):
        ids = {entry.id for entry in entries}
        listed = {
            entry.case
            for entry in selection.known_findings.known_findings()
            if fnmatchcase(name, entry.implementation) and entry.case in ids
        }

        assert listed - set(selection.selected(name, quick=entries is quick)) == set()


def test_the_order_of_the_profile_plays_no_part(selection: ModuleType) -> None:
    """The selection is the same every time."""
    chosen = {entry.id for entry in selection.smallest(ENTRIES)}

    assert chosen == {entry.id for entry in selection.smallest(ENTRIES[::-1])}


@dataclass
class Item:
    """A collected test, as far as the package's conftest reads it."""

    nodeid: str
    marks: list[pytest.MarkDecorator] = field(default_factory=list)
    path: Path = Path("test_some.py")

    def get_closest_marker(self, name: str) -> pytest.Mark | None:
        return next((mark.mark for mark in self.marks if mark.name == name), None)

    def add_marker(self, mark: pytest.MarkDecorator) -> None:
        self.marks.append(mark)


def nightly_of(items: list[Item]) -> list[str]:
    """The tests that are marked nightly in the end."""
    conftest.pytest_collection_modifyitems(cast("list[Any]", items))
    return [item.nodeid for item in items if item.get_closest_marker("nightly")]


@pytest.mark.parametrize(("count", "left_out"), [(1, "bcdef"), (2, "bcef"), (4, "cf"), (6, ""), (9, "")])
def test_sets_of_parameters_by_day_are_spread(count: int, left_out: str) -> None:
    items = [Item(f"t.py::test_it[{letter}]", [pytest.mark.daily(count)]) for letter in "abcdef"]

    assert nightly_of(items) == [f"t.py::test_it[{letter}]" for letter in left_out]


def test_sets_that_are_nightly_anyway_do_not_count() -> None:
    """Neither do those of another test."""
    of_both = [pytest.mark.daily(1), pytest.mark.nightly]
    one = [Item("t.py::test_it[a]", of_both), *(Item(f"t.py::test_it[{x}]", [pytest.mark.daily(1)]) for x in "bc")]
    other = [Item(f"t.py::test_other[{x}]", [pytest.mark.daily(1)]) for x in "ab"]

    assert nightly_of([*one, *other]) == ["t.py::test_it[a]", "t.py::test_it[c]", "t.py::test_other[b]"]
