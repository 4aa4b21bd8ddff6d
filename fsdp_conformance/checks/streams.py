"""
Races between streams, as findings: what the checker of the simulated accelerator saw while a subject was trained.

The checker is not asked here. The loop notes what it saw in the history, together with how many accesses it looked at,
so that a run in which it saw nothing because it looked at nothing is told apart from a clean one.
"""

from __future__ import annotations

from collections.abc import Mapping

from fsdp_conformance.checks.result import CheckResult, Tally
from fsdp_conformance.errors import NothingCompared, SuiteError
from fsdp_conformance.history.hazard import HazardKind, HazardRecord
from fsdp_conformance.history.training import TrainingHistory

#: The requirement that a kind of race speaks for, unless the case says otherwise.
REQUIREMENTS: Mapping[str, str] = {
    HazardKind.READ_AFTER_WRITE: "R075",
    HazardKind.WRITE_AFTER_READ: "R075",
    HazardKind.WRITE_AFTER_WRITE: "R075",
    HazardKind.REUSE_IN_FLIGHT: "R075",
    HazardKind.HOST_WRITE_IN_FLIGHT: "R138",
    HazardKind.HOST_READ_IN_FLIGHT: "R138",
    # Not a kind of its own: one of the first three between the optimizer's writes and what comes after them.
    "parameters": "R074",
}


def every_race(requirement: str, **others: str) -> dict[str, str]:
    """A mapping in which every race speaks for one requirement, but for `others` (kinds, and "parameters")."""
    return {**dict.fromkeys(REQUIREMENTS, requirement), **others}


#: The phase in which the optimizer writes the parameters.
_STEP = "step"

_LIKELY = {
    HazardKind.READ_AFTER_WRITE: "a wait is missing between the stream that writes and the one that reads",
    HazardKind.WRITE_AFTER_READ: "memory is overwritten while another stream may still read it",
    HazardKind.WRITE_AFTER_WRITE: "two streams write the same memory and nothing says which comes last",
    HazardKind.REUSE_IN_FLIGHT: "freed too early, or without record_stream: another stream still uses the memory",
    HazardKind.HOST_WRITE_IN_FLIGHT: "the host writes pinned memory that a copy has not read yet",
    HazardKind.HOST_READ_IN_FLIGHT: "the host reads pinned memory before the copy into it is done",
}


def stream_safety(history: TrainingHistory, requirements: Mapping[str, str] | None = None) -> CheckResult:
    """
    No access was unordered with one that it depends on. One finding for each race.

    `requirements` replaces those of REQUIREMENTS. Raises NothingCompared if no access was checked.
    """
    names = {**REQUIREMENTS, **(requirements or {})}
    accesses = _accesses(history)
    tally = Tally("stream safety", names[HazardKind.REUSE_IN_FLIGHT], rank=history.rank)
    tally.expect(True, "", elements=accesses)
    for hazard in history.hazards:
        tally.expect(
            False,
            hazard.sentence + (f" ({hazard.count} times)" if hazard.count > 1 else ""),
            requirement=requirement_of(hazard, names),
            phase=hazard.now_label or None,
            call=hazard.now_op,
            likely=_LIKELY[hazard.kind],
            detail=hazard.text,
        )
    return tally.result(measurements={"accesses": accesses})


def stream_control(history: TrainingHistory) -> CheckResult:
    """
    The same configuration with every wait dropped has races: the checker could have seen one.

    Raises SuiteError if it has none.
    """
    if not history.hazards:
        raise SuiteError(
            f"hazards=0 with every wait dropped, but should be more [{history.source}, rank {history.rank}]: the "
            "checker could not have seen a race in this configuration, so that it saw none proves nothing"
        )
    tally = Tally("positive control", "R075", rank=history.rank)
    tally.expect(True, "", elements=_accesses(history))
    return tally.result(measurements={"hazards without waits": len(history.hazards)})


def requirement_of(hazard: HazardRecord, names: Mapping[str, str] = REQUIREMENTS) -> str:
    """The requirement that a race speaks for."""
    ordinary = (HazardKind.READ_AFTER_WRITE, HazardKind.WRITE_AFTER_READ, HazardKind.WRITE_AFTER_WRITE)
    if hazard.kind in ordinary and hazard.then_label == _STEP and hazard.now_label != _STEP:
        return names["parameters"]
    return names[hazard.kind]


def _accesses(history: TrainingHistory) -> int:
    if not history.checked_accesses:
        raise NothingCompared(
            f"accesses={history.checked_accesses}, but should be at least 1 [stream safety, rank {history.rank}]: "
            "nothing of this run went through the simulated accelerator"
        )
    return history.checked_accesses
