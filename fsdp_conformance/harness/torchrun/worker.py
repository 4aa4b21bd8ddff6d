"""
Ranks of several hosts: torchrun starts a worker for each rank, and every worker runs the same cases in the same order.

A worker starts, for each case, one fresh rank of its own, with the files and the deadlines that a case on one host has.
The workers meet at the store that torchrun's agent holds: when a case begins, when every rank has spoken, and when the
first worker collects what the ranks said and how they ended. It judges and reports; the others say nothing. A worker
that is not heard of before the case's deadline is taken for lost: the case has its verdict, and the run ends.
"""

from __future__ import annotations

import functools
import json
import time
from collections.abc import Sequence
from dataclasses import asdict
from datetime import timedelta

import torch.distributed as dist
from torch._C._distributed_c10d import PrefixStore, Store, TCPStore

from fsdp_conformance.config import TorchrunWorker
from fsdp_conformance.errors import EnvironmentUnavailable
from fsdp_conformance.harness.rendezvous import meet_at
from fsdp_conformance.outcome import RankExit, RankReport, rank_report_from_json

#: Between two looks at the store.
_LOOK_S = 0.02

#: How long the connection to the store may take.
_CONNECT_S = 60.0

#: Ranks whose workers did not come to a case.
_lost: set[int] = set()

_SILENCE = (
    "nothing was heard of the worker of this rank before the case's deadline: its host, or the agent on it, may be gone"
)


class CaseMeeting:
    """The workers of one case of `world_size` ranks, seen from one of them. `name` is the case's alone in this run."""

    def __init__(self, worker: TorchrunWorker, name: str, world_size: int) -> None:
        self.worker = worker
        self.name = name
        self.world_size = world_size
        self._store = PrefixStore(f"{name}/workers", _store(worker))

    @property
    def takes_part(self) -> bool:
        """Whether this worker has a rank in the case."""
        return self.worker.rank < self.world_size

    def begin(self, timeout_s: float) -> None:
        """
        Every worker of the case is there.

        Raises EnvironmentUnavailable if one does not come in time, and at once if one did not come to an earlier case.
        """
        missing = sorted(_lost.intersection(range(self.world_size)))
        missing = missing or self.meet("begin", time.monotonic() + timeout_s)
        if missing:
            _lost.update(missing)
            raise EnvironmentUnavailable(
                f"the workers of ranks {missing} did not come to case {self.name} within {timeout_s:.0f} s, but should "
                "have: their hosts, or the agents on them, may be gone"
            )

    def meet(self, point: str, until: float) -> list[int]:
        """Say that this worker has come to `point`, and wait for the others; the ranks that have not come in time."""
        self._store.set(f"{point}/{self.worker.rank}", "here")
        return self._absent(point, until)

    def publish(self, report: RankReport | None, end: RankExit) -> None:
        """Tell the first worker what this worker's rank said, and how it ended."""
        said = {"report": report.to_json() if report is not None else None, "end": asdict(end)}
        self._store.set(f"end/{self.worker.rank}", json.dumps(said, default=repr))

    def collect(self, until: float) -> tuple[list[RankReport | None], list[RankExit]]:
        """What every rank said and how it ended, in the order of ranks."""
        absent = self._absent("end", until)
        reports: list[RankReport | None] = []
        exits: list[RankExit] = []
        for rank in range(self.world_size):
            if rank in absent:
                reports.append(None)
                exits.append(_never_heard_of(rank))
                continue
            said = json.loads(self._store.get(f"end/{rank}"))
            reports.append(rank_report_from_json(said["report"]) if said["report"] is not None else None)
            exits.append(RankExit(**said["end"]))
        return reports, exits

    def _absent(self, point: str, until: float) -> list[int]:
        ranks: Sequence[int] = range(self.world_size)
        try:
            while not self._store.check([f"{point}/{rank}" for rank in ranks]):
                if time.monotonic() >= until:
                    return [rank for rank in ranks if not self._store.check([f"{point}/{rank}"])]
                time.sleep(_LOOK_S)
        except (dist.DistNetworkError, dist.DistStoreError) as error:
            raise EnvironmentUnavailable(
                f"the store of torchrun at {self.worker.host}:{self.worker.port} is gone: {error}. The host of the "
                "first worker, or the agent on it, may be gone."
            ) from error
        return []


def meet_peers(worker: TorchrunWorker, name: str, rank: int, world_size: int) -> None:
    """In a rank's process: process groups of this case meet at torchrun's store."""
    meet_at(lambda: (PrefixStore(f"{name}/ranks", _store(worker)), rank, world_size))


@functools.cache
def _store(worker: TorchrunWorker) -> Store:
    """The store of all workers. Where the agent holds none, the first worker does."""
    try:
        return TCPStore(
            worker.host,
            worker.port,
            is_master=worker.holds_store,
            wait_for_workers=False,
            timeout=timedelta(seconds=_CONNECT_S),
        )
    except (dist.DistNetworkError, RuntimeError) as error:
        raise EnvironmentUnavailable(
            f"the store of torchrun at {worker.host}:{worker.port} cannot be reached: {error}"
        ) from error


def _never_heard_of(rank: int) -> RankExit:
    return RankExit(
        rank=rank,
        pid=None,
        exitcode=None,
        time=time.monotonic(),
        reported=False,
        ended_by_controller=True,
        stack=_SILENCE,
    )
