"""
Runs trainings under the checker, one after another on the same ranks, each without some of its waits.

The descriptions of findings are the same in every run of a program: streams are numbered in the order in which findings
mention them, and code is identified by function and line.
"""

from __future__ import annotations

import gc
import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from typing import Any

import torch

from fsdp_conformance.simulator import checker
from fsdp_conformance.simulator.checker import Wait
from fsdp_conformance.simulator.checker.hazard import Access, Hazard
from fsdp_conformance.simulator.checker.sync_sites import SiteWatch
from fsdp_conformance.simulator.device import build
from fsdp_conformance.simulator.frames import Frame, below_torch
from studies.stream_ranks import synchronized
from studies.stream_runs import Outcome, run
from studies.stream_trainings import RACING, TRAININGS

#: In `Job.dropped`: every wait.
ALL = "*"

#: Files of torch that only carry out calls: a finding is named after the caller.
_CARRIERS = re.compile(r"(_ops|_tensor|utils/_contextlib|distributed/(distributed_c10d|c10d_logger))\.py$")


@dataclass(frozen=True, slots=True)
class Job:
    """One run."""

    training: str
    dropped: tuple[str, ...] = ()
    """Ids of the sites whose waits are dropped."""
    reuse: str = "exact"


@dataclass(slots=True)
class Shown:
    """The results of one run on one rank."""

    hazards: list[str] = field(default_factory=list)
    """One line for each finding: its kind, and the origin of the two accesses."""
    sites: dict[str, int] = field(default_factory=dict)
    """How often each site was executed."""
    outcome: dict[str, Any] = field(default_factory=dict)
    """The fields of `stream_runs.Outcome`."""
    accesses: int = 0
    pending: int = 0
    """The largest number of blocks that record_stream kept from reuse at one time, as far as the host could know. A
    device that is slower than its host holds all of them."""
    digest: int = 0
    """A checksum of what each access knew about all streams: if two runs agree, nothing was ordered differently."""
    error: str = ""

    @property
    def kinds(self) -> list[str]:
        """The kinds of the findings, each once."""
        return sorted({line.partition(":")[0] for line in self.hazards})


def study(rank: int, device: torch.device, jobs: Sequence[Job]) -> list[dict[str, Any]]:
    """The results of each job on this rank; JSON-ready."""
    results = []
    for job in jobs:
        with _separated(device):
            results.append(asdict(_shown(rank, device, job)))
    return results


def reference(rank: int, device: torch.device, names: Sequence[str]) -> list[dict[str, Any]]:
    """The outcome of each training on this rank, on the CPU; JSON-ready."""
    return [asdict(run(TRAININGS[name], device, rank)) for name in names]


def _shown(rank: int, device: torch.device, job: Job) -> Shown:
    watch, pending = SiteWatch(job.dropped), Pending()
    before = checker.accesses()
    shown = Shown()
    with checker.reuse(job.reuse), checker.uninitialized():
        try:
            checker.begin_order_digest()
            keep = _all_dropped if ALL in job.dropped else watch.keep
            with checker.wait_filter(keep), checker.wait_filter(pending.keep):
                outcome = run((TRAININGS | RACING)[job.training], device, rank, look=checker.suspended)
            shown.outcome = asdict(outcome)
        except Exception as error:  # noqa: BLE001 - an exception is a result too
            shown.error = f"{type(error).__name__}: {error}"
        shown.digest = checker.order_digest(device.index)
        shown.hazards = described(checker.hazards())
    shown.sites = dict(watch.counts)
    shown.pending = pending.most
    shown.accesses = checker.accesses() - before
    return shown


def seeded(rank: int, device: torch.device, names: Sequence[str], reuse: str) -> list[tuple[list[str], list[str]]]:
    """The findings of each seeded race on this rank, without its defect and with it."""
    from studies.seeded_races import RACES

    programs = {race.name: race.program for race in RACES}

    def findings(name: str, defective: bool) -> list[str]:
        with _separated(device), checker.reuse(reuse):
            programs[name](device, rank, defective)
            return described(checker.hazards())

    return [(findings(name, False), findings(name, True)) for name in names]


class Pending:
    """Counts the blocks that record_stream keeps from reuse until the host knows that the stream has finished."""

    def __init__(self) -> None:
        self.most = 0
        self._extension = build.load()
        self._checker = self._extension.Checker.get()
        self._clocks: list[Any] = []

    def keep(self, kind: Wait, stream: int, device: int) -> bool:
        """A wait filter that drops nothing."""
        if kind is Wait.RECORD_STREAM and not self._checker.suspended():
            self._clocks = [clock for clock in self._clocks if not self._checker.host_knows(clock)]
            self._clocks.append(self._checker.snapshot(self._extension.lane_of(stream, device)))
            self.most = max(self.most, len(self._clocks))
        return True


def _all_dropped(kind: Any, stream: int, device: int) -> bool:
    return bool(build.load().Checker.suspended())


@contextmanager
def _separated(device: torch.device) -> Iterator[None]:
    """A context that keeps runs apart: nothing is in flight at its start and its end, and garbage is collected."""
    synchronized(device)
    checker.clear()
    rewind_pools(device)
    gc.disable()
    try:
        yield
    finally:
        gc.enable()
        gc.collect()
        synchronized(device)
        checker.clear()


def rewind_pools(device: torch.device) -> None:
    """
    Make the next stream the first of its pool, so that equal runs have equal streams.

    Streams are taken in turn from pools of 32. A run that takes more gets some of them twice, and which ones depends on
    where it starts.
    """
    module: Any = torch.get_device_module(device.type)
    for priority in (0, -1):
        first = module.Stream(device, priority=priority).stream_id
        ids = [first]
        while (taken := module.Stream(device, priority=priority).stream_id) != first:
            ids.append(taken)
        for _ in range(ids.index(max(ids))):
            module.Stream(device, priority=priority)


def described(hazards: Sequence[Hazard]) -> list[str]:
    """One line for each hazard, in program order, without duplicates."""
    names: dict[Any, str] = {}
    lines = [
        f"{hazard.kind}: {_access(hazard.now, names)} after {_access(hazard.then, names)}"
        + (" (worst case)" if hazard.is_worst_case else "")
        for hazard in hazards
    ]
    return list(dict.fromkeys(lines))


def _access(access: Access, names: dict[Any, str]) -> str:
    """The operation, its stream, and where in torch it was issued."""
    if access.stream.is_host:
        stream = "host"
    elif access.stream.number == 0:
        stream = "default"
    else:
        stream = names.setdefault(access.stream.number, f"s{len(names) + 1}")
    at = next((frame for frame in access.site.stack if _tells(frame)), None)
    where = "" if at is None else f" [{at.function}:{at.line}]"
    return f"{access.site.op}@{stream} {access.kind}{where}"


def _tells(frame: Frame) -> bool:
    below = below_torch(frame.file)
    return below is not None and not _CARRIERS.match(below) and not below.startswith("autograd/")


def outcome_of(data: dict[str, Any]) -> Outcome:
    """The Outcome in the JSON of `reference`, or in `Shown.outcome`."""
    return Outcome(**data)
