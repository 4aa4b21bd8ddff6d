"""Scripts with a mistake are found, at its line, and correct scripts are left alone: what ci/sanitize-power counts."""

from __future__ import annotations

from collections.abc import Iterable

import pytest

from fsdp_conformance.simulator.device import build
from fsdp_conformance.tests.guards import checkout
from fsdp_conformance.tests.simulator.sanitize.sanitize_runs import needs_simulator
from studies.script_controls import CONTROLS
from studies.script_defects import DEFECTS
from studies.script_programs import CORRECT, WRONG
from studies.script_runs import MARK, Script, run_scripts

pytestmark = [checkout.required, needs_simulator]

#: One of each kind of check, and correct scripts that come close to it.
SAMPLE = frozenset({
    "reduction-differs", "skipped-on-one-rank", "reduced-empty", "numpy-too-early", "event-too-early",
    "padding-gathered", "copies-waited",
})  # fmt: skip


def problems(scripts: Iterable[Script]) -> list[str]:
    """The problems of scripts that were not judged as they should be."""
    build.require()
    return [f"{outcome.line()}\n{outcome.text}" for outcome in run_scripts(scripts) if not outcome.is_right]


def test_there_are_enough_of_both() -> None:
    """Each has a name; each mistake has a marked line, and no correct script has one."""
    names = [script.name for script in (*DEFECTS, *WRONG, *CONTROLS, *CORRECT)]

    assert len([*DEFECTS, *WRONG]) >= 40 <= len([*CONTROLS, *CORRECT])
    assert len(set(names)) == len(names)
    assert set(names) >= SAMPLE
    assert all(script.kind and script.lines for script in (*DEFECTS, *WRONG))
    assert not any(script.kind or MARK in script.text for script in (*CONTROLS, *CORRECT))


@pytest.mark.nightly
def test_a_sample_is_judged_as_it_should_be() -> None:
    """The sample runs in one warm process."""
    assert problems(script for script in (*DEFECTS, *CONTROLS) if script.name in SAMPLE) == []


@pytest.mark.nightly
@pytest.mark.parametrize(
    "scripts", [DEFECTS, CONTROLS, WRONG, CORRECT], ids=["mistakes", "correct", "wrong programs", "correct programs"]
)
def test_every_script_is_judged_as_it_should_be(scripts: tuple[Script, ...]) -> None:
    """No mistake is missed, and there is no false alarm."""
    assert problems(scripts) == []
