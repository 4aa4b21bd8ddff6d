"""Guard: ci/test certifies a part of the profile that leaves no chapter and no known finding of that part out."""

from __future__ import annotations

import importlib
from collections.abc import Iterable
from fnmatch import fnmatchcase
from types import ModuleType

import pytest

from fsdp_conformance.contract.profile import Entry, load_profile
from fsdp_conformance.contract.requirement import load
from fsdp_conformance.run_settings import RunSettings
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
    """The reference runs each case of the profile quick; an engine with --quick one of each of its chapters."""
    quick = load_profile(selection.QUICK).entries
    chosen = set(selection.selected("torch-fsdp1", quick=True))

    assert {entry.id for entry in quick} <= set(selection.selected("reference"))
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
