"""
The kill matrix: every case fails each known-wrong implementation that it names, for a requirement that it binds.

A case that fails no implementation proves nothing, so each method of the suites is run, at its smallest world size and
with one value of each other axis, against every mutant that it names.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from fsdp_conformance.capability import CAPABILITIES
from fsdp_conformance.config import RunSettings
from fsdp_conformance.judge import gate
from fsdp_conformance.mutants import MUTANTS
from fsdp_conformance.selftest import BoundCase, bound_cases, run_case
from fsdp_conformance.simulator.place import places
from fsdp_conformance.verdict import Verdict

#: A known-wrong implementation is killed by any of these; the findings say by which requirement.
KILLED = frozenset({Verdict.FAIL, Verdict.HANG, Verdict.CRASH})


def _smallest_of_each_family() -> list[BoundCase]:
    """
    Of the cases that can run here: on the CPU, and with a compiler on the simulated accelerator.

    The smallest asks for the fewest capabilities, so that the mutant declares them, and then for the fewest ranks.
    """
    settings = RunSettings()
    here = places(settings)
    smallest: dict[tuple[str, tuple[str, ...]], BoundCase] = {}
    for bound in bound_cases():
        if gate(bound.case, declared=lambda _: frozenset(CAPABILITIES), settings=settings, places=here).record:
            continue
        key = (f"{bound.owner.__qualname__}.{bound.case.title}", bound.case.kills)
        if key not in smallest or _size(bound) < _size(smallest[key]):
            smallest[key] = bound
    return list(smallest.values())


def _size(bound: BoundCase) -> tuple[int, int]:
    return len(bound.case.needs), bound.case.world_size


def _pairs() -> Iterator[Any]:
    """
    Every case with each of its mutants. All but one for each case are marked nightly.

    That one is a mutant that no case before it has, if there is one, so that the others kill as many as they can.
    """
    taken: set[str] = set()
    for bound in _smallest_of_each_family():
        chosen = [mutant for mutant in bound.case.kills if mutant not in taken][:1] or bound.case.kills[:1]
        for mutant in bound.case.kills:
            marks = () if mutant in chosen else (pytest.mark.nightly,)
            yield pytest.param(bound, mutant, id=f"{bound.case.id}-{mutant}", marks=marks)
        taken.update(chosen)


@pytest.mark.parametrize(("bound", "mutant"), list(_pairs()))
def test_the_case_kills(bound: BoundCase, mutant: str) -> None:
    """The named mutant does not pass, and a finding names a requirement that the case binds."""
    record = run_case(bound, MUTANTS[mutant].spec)

    assert record.verdict in KILLED, f"{record.verdict}: {record.reason}"
    blamed = {finding.requirement for finding in record.findings}
    assert blamed & {*bound.case.requirements, "R000"}, record.findings
