"""
The kill matrix: every case kills each known-wrong implementation that it names, for the right reason.

A case that fails no implementation proves nothing, and neither does one that fails because something raised before it
compared. One pair of each method runs with the other tests, at its smallest world size and with one value of each other
axis. All others are marked nightly, so every case id is shown to kill something.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import pytest

from fsdp_conformance.capability import CAPABILITIES
from fsdp_conformance.cases.places import places
from fsdp_conformance.contract.gate import gate
from fsdp_conformance.mutants import MUTANTS, kill
from fsdp_conformance.run_settings import RunSettings
from fsdp_conformance.selftest import BoundCase, bound_cases, run_case

_SETTINGS = RunSettings()


def _why_not_here(bound: BoundCase) -> str:
    """Why the case cannot run on this machine, or ""; with a compiler, most run on the simulated accelerator."""
    record = gate(
        bound.case, declared=lambda _: frozenset(CAPABILITIES), settings=_SETTINGS, places=places(_SETTINGS)
    ).record
    return "" if record is None else record.reason


def _smallest_of_each_method(cases: Sequence[BoundCase]) -> set[str]:
    """
    Ids of the cases that are run whenever tests are.

    The smallest asks for the fewest capabilities, so that the mutant declares them, and then for the fewest ranks.
    """
    smallest: dict[str, BoundCase] = {}
    for bound in cases:
        if _why_not_here(bound):
            continue
        key = f"{bound.owner.__qualname__}.{bound.case.title}"
        if key not in smallest or _size(bound) < _size(smallest[key]):
            smallest[key] = bound
    return {bound.case.id for bound in smallest.values()}


def _size(bound: BoundCase) -> tuple[int, int]:
    return len(bound.case.needs), bound.case.world_size


def _pairs() -> Iterator[Any]:
    """
    Every case with each of its mutants, marked nightly except for one of each method.

    That one is a mutant that no case before it has, if there is one, so that these kill as many as they can.
    """
    taken: set[str] = set()
    cases = list(bound_cases())
    usual = _smallest_of_each_method(cases)
    for bound in cases:
        chosen: list[str] = []
        if bound.case.id in usual:
            chosen += [mutant for mutant in bound.case.kills if mutant not in taken][:1] or bound.case.kills[:1]
            taken.update(chosen)
        for mutant in bound.case.kills:
            marks = () if mutant in chosen else (pytest.mark.nightly,)
            yield pytest.param(bound, mutant, id=f"{bound.case.id}-{mutant}", marks=marks)


@pytest.mark.parametrize(("bound", "mutant"), list(_pairs()))
def test_the_case_kills(bound: BoundCase, mutant: str) -> None:
    """A finding for a requirement that the case binds shows the mutant's defect."""
    if absent := _why_not_here(bound):
        pytest.skip(absent)
    record = run_case(bound, MUTANTS[mutant].spec, base=_SETTINGS)

    assert kill.reason(record, MUTANTS[mutant]) is not None, kill.survival(record, MUTANTS[mutant])
