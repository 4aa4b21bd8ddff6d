"""
How long a run will take, roughly: from what the last run took, or from what cases usually take.

The latter is scaled by how fast this machine was in earlier runs (`pace`).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from fsdp_conformance.contract.case import Case
from fsdp_conformance.pytest_plugin.dispatch import Slots, wall_time
from fsdp_conformance.report.run_content import RunFile
from fsdp_conformance.report.terminal import duration

#: Seconds of a case per rank, by device: means over torch-fsdp1, torch-fsdp2 and the reference engine in the core
#: profile (torch 2.13, 2 cores, 2 pytest workers). Other accelerators are taken to be like the simulated one.
SECONDS_PER_RANK: Mapping[str, float] = {"cpu": 0.3, "sim": 0.45}

#: Until the first case begins: pytest, torch and the warm process that ranks are forked from.
START_S = 4.0


def typical_s(case: Case, device: str) -> float:
    """Seconds that a case takes where the typical durations were measured."""
    return case.world_size * SECONDS_PER_RANK.get(device, SECONDS_PER_RANK["sim"])


def seconds_of(
    cases: Sequence[tuple[Case, str]], *, last: RunFile | None = None, pace: Mapping[str, float] | None = None
) -> dict[str, float]:
    """
    The seconds that each case, with its device, will take, by id.

    Measured in `last`, a run of the same implementation; else typical ones, times this machine's `pace` by device.
    """
    pace = pace or {}
    measured = {record.case: record.seconds for record in last.records if record.seconds} if last is not None else {}
    return {case.id: measured.get(case.id) or typical_s(case, device) * pace.get(device, 1.0) for case, device in cases}


def estimate(
    cases: Sequence[tuple[Case, str]],
    *,
    workers: int = 1,
    last: RunFile | None = None,
    pace: Mapping[str, float] | None = None,
    slots: Slots | None = None,
) -> tuple[float, str]:
    """
    Seconds that a run of these cases, each with its device, will take, and where the figure comes from.

    `last` and `pace` are those of `seconds_of`; `slots` are those of devices that ranks own.
    """
    seconds = list(seconds_of(cases, last=last, pace=pace).values())
    measured = {record.case for record in last.records if record.seconds} if last is not None else set()
    num_timed = sum(case.id in measured for case, _ in cases)
    if num_timed == len(cases):
        source = "measured in the last run"
    elif not num_timed:
        source = "estimated from typical durations"
    else:
        source = f"{num_timed} measured in the last run, {len(cases) - num_timed} estimated from typical durations"
    workers = max(1, min(workers, len(cases)))
    if slots is None:
        return START_S + sum(seconds) / workers, source
    ordered = sorted(zip((case.world_size for case, _ in cases), seconds, strict=True), key=lambda item: -item[0])
    return START_S + wall_time(ordered, slots, num_workers=workers), source


def in_words(seconds: float) -> str:
    """ "about 5 s", "about 25 s", "about 3 min": as exact as an estimate can be."""
    if seconds > 90:
        return f"about {round(seconds / 60)} min"
    rounded = max(5, 5 * round(seconds / 5))
    return "about 5 s" if rounded == 5 else f"about {duration(rounded)}"
