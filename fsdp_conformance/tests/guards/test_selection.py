"""Guard: ci/test certifies a part of the profile that leaves no method and no known finding out."""

from __future__ import annotations

import importlib
from fnmatch import fnmatchcase
from types import ModuleType

import pytest

from fsdp_conformance.config import RunSettings
from fsdp_conformance.contract.profile import load_profile
from fsdp_conformance.tests.guards import checkout

pytestmark = checkout.required

ENTRIES = load_profile(RunSettings().profile).entries


@pytest.fixture(name="selection")
def _selection() -> ModuleType:
    return importlib.import_module("selection")


def test_the_reference_engine_meets_every_value_of_every_axis(selection: ModuleType) -> None:
    """Though not every combination: each word of an id is in the id of a case of the same method that runs."""
    chosen = set(selection.selected(["reference"], ENTRIES))
    met = {
        (selection.method(entry), word) for entry in ENTRIES if entry.id in chosen for word in selection.words(entry)
    }

    assert met == {(selection.method(entry), word) for entry in ENTRIES for word in selection.words(entry)}
    assert len(chosen) < len(ENTRIES)


def test_every_method_runs_on_torchs_engines(selection: ModuleType) -> None:
    """One case of each, at the smallest world size that is one."""
    chosen = set(selection.selected(["torch-fsdp2", "torch-fsdp1"], ENTRIES))
    entries = [entry for entry in ENTRIES if entry.id in chosen]

    assert {(entry.primary, entry.title) for entry in entries} == {(entry.primary, entry.title) for entry in ENTRIES}
    assert len(chosen) < len(ENTRIES) / 2


def test_every_known_finding_is_looked_for(selection: ModuleType) -> None:
    """Otherwise one that is gone would not be noticed."""
    ids = {entry.id for entry in ENTRIES}
    for name in ("reference", "torch-fsdp2", "torch-fsdp1"):
        known = {
            entry.case
            for entry in selection.known_findings.known_findings()
            if fnmatchcase(name, entry.implementation) and entry.case in ids
        }

        assert known - set(selection.selected([name], ENTRIES)) == set()


def test_the_selection_is_the_same_every_time(selection: ModuleType) -> None:
    """The order of the profile plays no part."""
    assert selection.selected(["x"], ENTRIES) == selection.selected(["x"], ENTRIES[::-1])
