"""
Races between streams, as findings: what the simulated accelerator's checker saw while a subject was trained.

Nothing here calls the checker. The training loop records in the history which hazards it saw and how many accesses it
checked, so that a clean run differs from a run in which nothing was checked.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from itertools import zip_longest
from typing import Any

import torch
from torch import Tensor

from fsdp_conformance.checks.result import CheckResult, Tally
from fsdp_conformance.errors import NothingCompared, SuiteError
from fsdp_conformance.history.hazard import HazardKind, HazardRecord
from fsdp_conformance.history.training import TrainingHistory

#: The requirement that a kind of race violates, unless the case names another.
REQUIREMENTS: Mapping[str, str] = {
    HazardKind.READ_AFTER_WRITE: "R075",
    HazardKind.WRITE_AFTER_READ: "R075",
    HazardKind.WRITE_AFTER_WRITE: "R075",
    HazardKind.REUSE_IN_FLIGHT: "R075",
    HazardKind.HOST_WRITE_IN_FLIGHT: "R138",
    HazardKind.HOST_READ_IN_FLIGHT: "R138",
    # Not a separate kind: one of the first three between the optimizer's writes and later accesses.
    "parameters": "R074",
}


def every_race(requirement: str, **others: str) -> dict[str, str]:
    """A mapping from every race to one requirement, except for `others` (kinds, and "parameters")."""
    return {**dict.fromkeys(REQUIREMENTS, requirement), **others}


#: The phase in which the optimizer writes the parameters.
_STEP = "step"

_LIKELY = {
    HazardKind.READ_AFTER_WRITE: "a wait is missing between the stream that writes and the one that reads",
    HazardKind.WRITE_AFTER_READ: "memory is overwritten while another stream may still read it",
    HazardKind.WRITE_AFTER_WRITE: "two streams write the same memory in no defined order",
    HazardKind.REUSE_IN_FLIGHT: "freed too early or without record_stream: another stream still uses the memory",
    HazardKind.HOST_WRITE_IN_FLIGHT: "the host writes pinned memory that a copy has not read yet",
    HazardKind.HOST_READ_IN_FLIGHT: "the host reads pinned memory before the copy into it has finished",
}


def stream_safety(history: TrainingHistory, requirements: Mapping[str, str] | None = None) -> CheckResult:
    """
    Every access is ordered after those that it depends on. One finding per race.

    `requirements` overrides REQUIREMENTS. Raises NothingCompared if no access was checked.
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
    The same configuration with every wait dropped has races, so the checker is able to see one.

    An engine that computes and communicates on one stream has none, whatever it waits for: that passes, too, and is
    counted as one stream. Raises SuiteError if there are several streams, and no races.
    """
    if not history.hazards and history.checked_streams != 1:
        raise SuiteError(
            f"hazards with every wait dropped: expected at least 1, got 0 [{history.source}, rank {history.rank}]. The "
            "checker cannot see a race in this configuration, so a clean run proves nothing."
        )
    tally = Tally("positive control", "R075", rank=history.rank)
    tally.expect(True, "", elements=_accesses(history))
    return tally.result(
        measurements={"hazards without waits": len(history.hazards), "streams": history.checked_streams}
    )


def same_undisturbed(observed: TrainingHistory, undisturbed: TrainingHistory, requirement: str) -> CheckResult:
    """
    A run in which the loop never waited for the device has the losses and the final parameters of the observed one.

    Bit for bit: the same ranks compute the same on the same device, so only the order of its streams can differ. One
    finding, for the first value that differs.
    """
    tally = Tally("undisturbed run", requirement, rank=observed.rank)
    difference = None
    for label, where, usual, other in _ends_of(observed, undisturbed):
        equal = other is not None and torch.equal(usual, other)
        tally.expect(True, "", elements=usual.numel())
        if not equal and difference is None:
            difference = label, where, usual, other
    if difference is not None:
        label, where, usual, other = difference
        tally.expect(
            False,
            f"{label} of a run that never waits for the device: expected that of the observed run, "
            + (
                "got none"
                if other is None
                else f"got others in {int((usual != other).sum())} of {usual.numel()} elements"
            ),
            likely="a wait is missing: the loop's own waits, to read results, had hidden it",
            **where,
        )
    return tally.result()


def _ends_of(
    observed: TrainingHistory, undisturbed: TrainingHistory
) -> Iterator[tuple[str, dict[str, Any], Tensor, Tensor | None]]:
    """The values to compare: a label, the place, the observed value, and the other one."""
    for before, after in zip(observed.steps, undisturbed.steps, strict=True):
        for usual, other in zip_longest(before.losses, after.losses):
            yield "loss", {"step": before.step, "phase": "forward"}, usual, other
    last = observed.steps[-1]
    for name, value in last.params.items():
        yield (
            "parameter",
            {"step": last.step, "phase": "step", "fqn": name},
            value,
            undisturbed.steps[-1].params.get(name),
        )


def requirement_of(hazard: HazardRecord, names: Mapping[str, str] = REQUIREMENTS) -> str:
    """The requirement that a race violates."""
    ordinary = (HazardKind.READ_AFTER_WRITE, HazardKind.WRITE_AFTER_READ, HazardKind.WRITE_AFTER_WRITE)
    if hazard.kind in ordinary and hazard.then_label == _STEP and hazard.now_label != _STEP:
        return names["parameters"]
    return names[hazard.kind]


def _accesses(history: TrainingHistory) -> int:
    if not history.checked_accesses:
        raise NothingCompared(
            f"accesses checked: expected at least 1, got {history.checked_accesses} "
            f"[stream safety, rank {history.rank}]. Nothing in this run used the simulated accelerator."
        )
    return history.checked_accesses
