"""How long a run will take, roughly: from what the last run took, or from what cases usually take."""

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


def estimate(
    cases: Sequence[tuple[Case, str]],
    *,
    workers: int = 1,
    last: RunFile | None = None,
    slots: Slots | None = None,
) -> tuple[float, str]:
    """
    Seconds that a run of these cases, each with its device, will take, and where the figure comes from.

    `last` is a run of the same implementation; `slots` are those of devices that ranks own.
    """
    measured = {record.case: record.seconds for record in last.records if record.seconds} if last is not None else {}
    seconds = [
        measured.get(case.id) or case.world_size * SECONDS_PER_RANK.get(device, SECONDS_PER_RANK["sim"])
        for case, device in cases
    ]
    timed = [case.id for case, _ in cases if case.id in measured]
    others = [case.id for case, _ in cases if case.id not in measured]
    if not others:
        source = "measured in the last run"
    elif not timed:
        source = "estimated from typical durations on 2 cores"
    else:
        source = f"{len(timed)} measured in the last run, {len(others)} estimated from typical durations"
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
