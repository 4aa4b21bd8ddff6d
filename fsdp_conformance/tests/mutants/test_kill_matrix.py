"""
The kill matrix: every case kills each known-wrong implementation that it names, for the right reason.

A case that fails no implementation proves nothing, and neither does one that fails because something raised before it
compared. One pair of each requirement runs with the other tests: its smallest case, at the smallest world size. All
others are marked nightly, so every case id is shown to kill something.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from fnmatch import fnmatchcase
from typing import Any

import pytest

from fsdp_conformance.capability import CAPABILITIES
from fsdp_conformance.cases.places import places
from fsdp_conformance.contract.gate import gate
from fsdp_conformance.mutants import MUTANTS, kill
from fsdp_conformance.run_settings import RunSettings
from fsdp_conformance.selftest import BoundCase, bound_cases, run_case

_SETTINGS = RunSettings()
#: Where cases can run on this machine.
_PLACES = places(_SETTINGS)

#: Cases that train for long or on many ranks, and whose mutants others kill: left to the night.
_COSTLY = ("R001/fresh-*", "R039/no-growth-with-offload-*", "R154/pipeline-and-tensor-parallel-*")
#: Pairs in their place.
_INSTEAD = {"R034/freed-after-forward-reshard-ws2": "hoards-parameters"}


def _why_not_here(bound: BoundCase) -> str:
    """Why the case cannot run on this machine, or ""; with a compiler, most run on the simulated accelerator."""
    record = gate(bound.case, declared=lambda _: frozenset(CAPABILITIES), settings=_SETTINGS, places=_PLACES).record
    return "" if record is None else record.reason


def _smallest_of_each_requirement(cases: Sequence[BoundCase]) -> set[str]:
    """
    Ids of the cases that are run whenever tests are.

    The smallest asks for the fewest capabilities, so that the mutant declares them, and then for the fewest ranks.
    """
    smallest: dict[str, BoundCase] = {}
    for bound in cases:
        if not bound.case.kills or _why_not_here(bound) or _matches(bound, _COSTLY):
            continue
        primary = bound.case.requirements[0]
        if primary not in smallest or _size(bound) < _size(smallest[primary]):
            smallest[primary] = bound
    return {bound.case.id for bound in smallest.values()}


def _matches(bound: BoundCase, patterns: Sequence[str]) -> bool:
    return any(fnmatchcase(bound.case.id, pattern) for pattern in patterns)


def _size(bound: BoundCase) -> tuple[int, int]:
    return len(bound.case.needs), bound.case.world_size


def _usual_pairs(cases: Sequence[BoundCase]) -> dict[str, str]:
    """
    The mutant that each case kills whenever tests are run, for one case of each requirement.

    That is a mutant that no case before it has, if there is one, so that these kill as many as they can.
    """
    pairs: dict[str, str] = {}
    usual = _smallest_of_each_requirement(cases)
    for bound in cases:
        if bound.case.id in usual:
            mutants, taken = bound.case.kills, set(pairs.values())
            pairs[bound.case.id] = next((mutant for mutant in mutants if mutant not in taken), mutants[0])
    return pairs


def usual_mutants() -> set[str]:
    """The mutants that are killed whenever tests are run."""
    return {*_usual_pairs(list(bound_cases())).values(), *_INSTEAD.values()}


def _parameters() -> Iterator[Any]:
    """Every case with each of its mutants. All but the usual pairs are marked nightly."""
    cases = list(bound_cases())
    usual = _usual_pairs(cases)
    for bound in cases:
        for mutant in bound.case.kills:
            is_usual = mutant in (usual.get(bound.case.id), _INSTEAD.get(bound.case.id))
            marks = () if is_usual else (pytest.mark.nightly,)
            yield pytest.param(bound, mutant, id=f"{bound.case.id}-{mutant}", marks=marks)


@pytest.mark.parametrize(("bound", "mutant"), list(_parameters()))
def test_the_case_kills(bound: BoundCase, mutant: str) -> None:
    """A finding for a requirement that the case binds shows the mutant's defect."""
    if absent := _why_not_here(bound):
        pytest.skip(absent)
    # A part of a profile shares references with other runs, such as ci/certify.
    record = run_case(bound, MUTANTS[mutant].spec, base=replace(_SETTINGS, cases=(bound.case.id,)))

    assert kill.reason(record, MUTANTS[mutant]) is not None, kill.survival(record, MUTANTS[mutant])
