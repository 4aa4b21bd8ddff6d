"""Guard: ci/test certifies a part of the profile that leaves no requirement and no known finding out."""

from __future__ import annotations

import importlib
from fnmatch import fnmatchcase
from types import ModuleType

import pytest

from fsdp_conformance.contract.profile import load_profile
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
def test_every_requirement_has_a_case(selection: ModuleType, name: str, profile: str) -> None:
    """One case of each, at the smallest world size that is one."""
    entries = load_profile(profile).entries
    chosen = set(selection.selected(name))
    requirements = {entry.primary for entry in entries if entry.id in chosen}

    assert requirements == {entry.primary for entry in entries}
    assert len(chosen) < len(entries) / 4


def test_components_are_selected_with_their_profile(selection: ModuleType, capsys: pytest.CaptureFixture[str]) -> None:
    """`ci/certify` takes the options as they are printed."""
    for name, options in (("reference-components", ["--profile", "components-2026.11"]), ("reference", [])):
        assert selection.main([name]) == 0
        words = capsys.readouterr().out.split()

        assert words[: len(options)] == options
        assert words[len(options) :] == [word for case in selection.selected(name) for word in ("--case", case)]


def test_the_quick_ones(selection: ModuleType) -> None:
    """Each case of the profile quick, and no others."""
    assert selection.selected("torch-fsdp1", quick=True) == sorted(
        entry.id for entry in load_profile(selection.QUICK).entries
    )


def test_every_known_finding_is_looked_for(selection: ModuleType) -> None:
    """In the engine that ci/test certifies by requirements; those of others are for the night."""
    ids = {entry.id for entry in ENTRIES}
    for name in ("reference", "torch-fsdp2"):
        listed = {
            entry.case
            for entry in selection.known_findings.known_findings()
            if fnmatchcase(name, entry.implementation) and entry.case in ids
        }

        assert listed - set(selection.selected(name)) == set()


def test_the_order_of_the_profile_plays_no_part(selection: ModuleType) -> None:
    """The selection is the same every time."""
    chosen = {entry.id for entry in selection.smallest(ENTRIES)}

    assert chosen == {entry.id for entry in selection.smallest(ENTRIES[::-1])}
