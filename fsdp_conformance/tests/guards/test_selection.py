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
    return importlib.import_module("certified_cases")


def test_every_method_runs(selection: ModuleType) -> None:
    """One case of each, at the smallest world size that is one."""
    chosen = set(selection.selected("reference"))
    entries = [entry for entry in ENTRIES if entry.id in chosen]

    assert {(entry.primary, entry.title) for entry in entries} == {(entry.primary, entry.title) for entry in ENTRIES}
    assert len(chosen) < len(ENTRIES) / 2


def test_the_quick_ones(selection: ModuleType) -> None:
    """Each case of the profile quick, with known findings, and few others."""
    quick = {entry.id for entry in load_profile(selection.QUICK).entries}
    chosen = set(selection.selected("torch-fsdp1", quick=True))

    assert quick < chosen
    assert len(chosen) < 2 * len(quick)


def test_every_known_finding_is_looked_for(selection: ModuleType) -> None:
    """Otherwise one that is gone would not be noticed."""
    ids = {entry.id for entry in ENTRIES}
    for name in ("reference", "torch-fsdp2", "torch-fsdp1"):
        known = {
            entry.case
            for entry in selection.known_findings.known_findings()
            if fnmatchcase(name, entry.implementation) and entry.case in ids
        }

        for quick in (False, True):
            assert known - set(selection.selected(name, quick=quick)) == set()


def test_the_order_of_the_profile_plays_no_part(selection: ModuleType) -> None:
    """The selection is the same every time."""
    chosen = {entry.id for entry in selection.smallest(ENTRIES)}

    assert chosen == {entry.id for entry in selection.smallest(ENTRIES[::-1])}
