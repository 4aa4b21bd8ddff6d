"""
How the workers of a torchrun job meet: torchrun starts one worker per rank, and all run the same cases in the same
order.

For each case a worker starts one fresh rank, with the same files and deadlines as on one host. The workers meet at the
store of torchrun's agent: when a case begins, when every rank has spoken, and when the first worker collects the
reports and exits. Only the first worker judges and reports. A worker that is not heard from before the case's deadline
counts as lost: the case gets its verdict, and the run ends.
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

#: How often the store is polled.
_LOOK_S = 0.02

#: How long the connection to the store may take.
_CONNECT_S = 60.0

#: Ranks whose workers missed a case.
_lost: set[int] = set()

_SILENCE = "the worker of this rank was not heard from before the case's deadline: its host or its agent may be gone"


class CaseMeeting:
    """The workers of one case of `world_size` ranks, seen from one of them. `name` is unique in the run."""

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
        Wait for every worker of the case.

        Raises EnvironmentUnavailable if one does not arrive in time, and at once if one missed an earlier case.
        """
        missing = sorted(_lost.intersection(range(self.world_size)))
        missing = missing or self.meet("begin", time.monotonic() + timeout_s)
        if missing:
            _lost.update(missing)
            raise EnvironmentUnavailable(
                f"the workers of ranks {missing} did not come to case {self.name} within {timeout_s:.0f} s: "
                "their hosts or their agents may be gone"
            )

    def meet(self, point: str, until: float) -> list[int]:
        """Announce that this worker has reached `point`, and wait for the others. Returns the missing ranks."""
        self._store.set(f"{point}/{self.worker.rank}", "here")
        return self._absent(point, until)

    def publish(self, report: RankReport | None, end: RankExit) -> None:
        """Send the first worker the report and the exit of this worker's rank."""
        said = {"report": report.to_json() if report is not None else None, "end": asdict(end)}
        self._store.set(f"end/{self.worker.rank}", json.dumps(said, default=repr))

    def collect(self, until: float) -> tuple[list[RankReport | None], list[RankExit]]:
        """The report and the exit of every rank, in rank order."""
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
                f"torchrun's store at {self.worker.host}:{self.worker.port} is gone: {error}. "
                "The first worker's host or its agent may be gone."
            ) from error
        return []


def meet_peers(worker: TorchrunWorker, name: str, rank: int, world_size: int) -> None:
    """In a rank's process: make the process groups of this case meet at torchrun's store."""
    meet_at(lambda: (PrefixStore(f"{name}/ranks", _store(worker)), rank, world_size))


@functools.cache
def _store(worker: TorchrunWorker) -> Store:
    """The store of all workers, held by the agent or else by the first worker."""
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
            f"cannot reach torchrun's store at {worker.host}:{worker.port}: {error}"
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
