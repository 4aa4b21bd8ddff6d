"""
The kill matrix: every case kills each known-wrong implementation that it names, for the right reason.

A case that fails no implementation proves nothing, and neither does one that fails because something raised before it
compared. One pair of each method runs with the other tests, at its smallest world size and with one value of each other
axis, on ranks that go from case to case. All pairs are marked nightly, on fresh ranks as in a run that certifies, so
every case id is shown to kill something.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from fnmatch import fnmatchcase
from typing import Any

import pytest

from fsdp_conformance.capability import CAPABILITIES
from fsdp_conformance.cases.places import places
from fsdp_conformance.contract.gate import device_for, gate
from fsdp_conformance.mutants import MUTANTS, kill
from fsdp_conformance.run_settings import RunSettings
from fsdp_conformance.selftest import BoundCase, bound_cases, run_case

_SETTINGS = RunSettings()

#: Cases that train for long or on many ranks, and whose mutants others kill: left to the night.
_COSTLY = ("R001/fresh-*", "R039/no-growth-with-offload-*", "R154/pipeline-and-tensor-parallel-*")
#: Pairs in their place.
_INSTEAD = {"R034/freed-after-forward-reshard-ws2": "hoards-parameters"}
#: Cases on fresh ranks: ranks that are kept train long references again, and torch does not find the groups of stages
#: on ranks that have made pipelines before.
_FRESH_RANKS = ("R039/held-throughout-*", "R154/pipeline-*")


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
        if _why_not_here(bound) or _matches(bound, _COSTLY):
            continue
        key = f"{bound.owner.__qualname__}.{bound.case.title}"
        if key not in smallest or _size(bound) < _size(smallest[key]):
            smallest[key] = bound
    return {bound.case.id for bound in smallest.values()}


def _matches(bound: BoundCase, patterns: Sequence[str]) -> bool:
    return any(fnmatchcase(bound.case.id, pattern) for pattern in patterns)


def _size(bound: BoundCase) -> tuple[int, int]:
    return len(bound.case.needs), bound.case.world_size


def _usual_pairs(cases: Sequence[BoundCase]) -> dict[str, str]:
    """
    The mutant that each case kills whenever tests are run, for one case of each method.

    That is a mutant that no case before it has, if there is one, so that these kill as many as they can.
    """
    pairs: dict[str, str] = {}
    usual = _smallest_of_each_method(cases)
    for bound in cases:
        mutants = bound.case.kills
        if mutants and bound.case.id in usual:
            taken = set(pairs.values())
            pairs[bound.case.id] = next((mutant for mutant in mutants if mutant not in taken), mutants[0])
    return pairs


def usual_mutants() -> set[str]:
    """The mutants that are killed whenever tests are run."""
    return {*_usual_pairs(list(bound_cases())).values(), *_INSTEAD.values()}


def _parameters() -> Iterator[Any]:
    """The usual pairs on ranks that are kept, as few changes of them as possible; and all pairs on fresh ranks."""
    cases = list(bound_cases())
    usual = _usual_pairs(cases)
    for bound in sorted(cases, key=_ranks_of):
        for mutant in (pairs[bound.case.id] for pairs in (usual, _INSTEAD) if bound.case.id in pairs):
            is_kept = not _matches(bound, _FRESH_RANKS)
            yield pytest.param(bound, mutant, is_kept, id=f"{bound.case.id}-{mutant}-usual")
    for bound in cases:
        for mutant in bound.case.kills:
            yield pytest.param(bound, mutant, False, id=f"{bound.case.id}-{mutant}", marks=pytest.mark.nightly)


def _ranks_of(bound: BoundCase) -> tuple[str, int]:
    """Cases with the same one can have each other's ranks."""
    return device_for(bound.case, _SETTINGS), bound.case.world_size


@pytest.mark.parametrize(("bound", "mutant", "has_kept_ranks"), list(_parameters()))
def test_the_case_kills(bound: BoundCase, mutant: str, has_kept_ranks: bool) -> None:
    """A finding for a requirement that the case binds shows the mutant's defect."""
    if absent := _why_not_here(bound):
        pytest.skip(absent)
    # A part of a profile shares references with other runs, such as ci/certify.
    settings = replace(_SETTINGS, reuse_ranks=has_kept_ranks, cases=(bound.case.id,))
    record = run_case(bound, MUTANTS[mutant].spec, base=settings)

    assert kill.reason(record, MUTANTS[mutant]) is not None, kill.survival(record, MUTANTS[mutant])
