"""Scripts are short enough to be read in a bug report, and define all that they name."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from fsdp_conformance.repro.refused import NoScript
from fsdp_conformance.repro.script import script
from fsdp_conformance.run_settings import RunSettings
from fsdp_conformance.selftest.cases import bound_cases

#: Lines of the longest script of each engine; it may only become smaller.
LONGEST = {"torch-fsdp2": 146, "torch-fsdp1": 147, "torch-zero1": 299}

#: The failures of FSDP2 that have a script, and cases with clipping, deferral, events, and a model without parameters.
SAMPLE = (
    "R001/exact-probe-ws2",
    "R008/world-size-ws2",
    "R010/eval-between-backward-and-step-ws2",
    "R053/forward-before-the-update-ws2",
    "R103/empty-shards-inf-ws4",
    "R119/branches-of-one-unit-ws2",
    "R121/units-chosen-by-rank-ws2",
    "R135/called-twice-reentrant-ws2",
)


def _undefined(directory: Path) -> str:
    """The complaints of ruff about names in the scripts of a directory."""
    ruff = [sys.executable, "-m", "ruff", "check", "--isolated", "--select", "F821,F811,F401,E9", "-q", str(directory)]
    return subprocess.run(ruff, capture_output=True, text=True, timeout=120, check=False).stdout


@pytest.mark.nightly
def test_scripts_are_short_and_whole(tmp_path: Path) -> None:
    """Of FSDP2, for cases of each kind."""
    lengths = {}
    for bound in bound_cases():
        if bound.case.id in SAMPLE:
            text = script(bound, RunSettings(implementation="torch-fsdp2"), name="shown.py")
            (tmp_path / f"{bound.case.id.replace('/', '_')}.py").write_text(text, encoding="utf-8")
            lengths[bound.case.id] = len(text.splitlines())
            assert max(map(len, text.splitlines())) <= 120, bound.case.id

    assert lengths.keys() == set(SAMPLE)
    assert [case for case, lines in lengths.items() if lines > LONGEST["torch-fsdp2"]] == []
    assert _undefined(tmp_path) == ""


@pytest.mark.nightly
@pytest.mark.filterwarnings("ignore:The `NO_SHARD` sharding strategy is deprecated:FutureWarning")
@pytest.mark.parametrize("implementation", LONGEST)
def test_every_script_is_short_and_whole(implementation: str, tmp_path: Path) -> None:
    """Of all cases that have one."""
    lengths = []
    for bound in bound_cases():
        if bound.case.is_own:
            continue
        try:
            text = script(bound, RunSettings(implementation=implementation), name="shown.py")
        except NoScript:
            continue
        (tmp_path / f"{bound.case.id.replace('/', '_')}.py").write_text(text, encoding="utf-8")
        lengths.append(len(text.splitlines()))

    assert len(lengths) > 40
    assert max(lengths) <= LONGEST[implementation]
    assert _undefined(tmp_path) == ""
