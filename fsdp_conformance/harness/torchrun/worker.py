"""
How the workers of a torchrun job meet: torchrun starts one worker per rank, and all run the same cases in the same
order.

The ranks of a case are assigned to hosts in turn: rank 0 to the first worker of the first host, rank 1 to the first of
the second, and so on. So a case of two ranks already crosses hosts. The first worker is always rank 0. Ranks on several
hosts communicate over the interface by which their host reaches the store (`interface`), unless the user names another.

For each case a worker starts one fresh rank, with the same files and deadlines as on one host. The workers meet at the
store of torchrun's agent: when a case begins, when every rank has spoken, and when the first worker collects the
reports and exits. Only the first worker judges and reports. A worker that is not heard from before the case's deadline
counts as lost: the case gets its verdict, and the run ends.
"""

from __future__ import annotations

import functools
import json
import time
from collections import Counter
from collections.abc import Sequence
from datetime import timedelta
from typing import NamedTuple

import torch.distributed as dist
from torch._C._distributed_c10d import PrefixStore, Store, TCPStore

from fsdp_conformance import codec
from fsdp_conformance.errors import EnvironmentUnavailable
from fsdp_conformance.harness.rendezvous import meet_at
from fsdp_conformance.harness.torchrun.interface import interface_variables, network_of_this_process
from fsdp_conformance.outcome.records import RankExit, RankReport, rank_report_from_json
from fsdp_conformance.run_settings import TorchrunWorker

#: How often the store is polled.
_LOOK_S = 0.02

#: How long the connection to the store may take.
_CONNECT_S = 60.0

#: How long workers wait for the last of them at their first case: each has imported torch and the engine by then.
_ARRIVAL_S = 300.0

#: Ranks whose workers missed a case.
_lost: set[int] = set()

_SILENCE = "the worker of this rank was not heard from before the case's deadline: its host or its agent may be gone"


class _Member(NamedTuple):
    """A worker of the job. Sorted, hosts take turns."""

    local_rank: int
    rank: int
    host: int
    network: str
    """Equal for workers that can talk over the loopback."""


class CaseMeeting:
    """The workers of one case of `world_size` ranks, seen from one of them. `name` is unique in the run."""

    def __init__(self, worker: TorchrunWorker, name: str, world_size: int) -> None:
        self.worker = worker
        self.name = name
        self.world_size = world_size
        self._store = PrefixStore(f"{name}/workers", _store(worker))

    @functools.cached_property
    def _workers(self) -> tuple[_Member, ...]:
        """Every worker of the job, in the order in which cases take them."""
        workers, problem = _dealt(self.worker)
        if problem:
            raise EnvironmentUnavailable(problem)
        return workers

    @functools.cached_property
    def rank(self) -> int:
        """This worker's rank in a case that is large enough. It is the same in all of them."""
        return [member.rank for member in self._workers].index(self.worker.rank)

    @property
    def takes_part(self) -> bool:
        """True if this worker has a rank in the case."""
        return self.rank < self.world_size

    def hosts(self) -> list[dict[str, str]]:
        """
        The variables that place each rank of the case on its host, as torchrun sets them.

        That of this worker also names the network interface, if the job has several hosts.
        """
        members = self._workers[: self.world_size]
        count = Counter(member.host for member in members)
        places = [
            {
                "LOCAL_RANK": str(member.local_rank),
                "GROUP_RANK": str(member.host),
                "LOCAL_WORLD_SIZE": str(count[member.host]),
            }
            for member in members
        ]
        if self.takes_part and len({member.network for member in self._workers}) > 1:
            places[self.rank] |= interface_variables(self.worker.host)
        return places

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
        self._store.set(f"{point}/{self.rank}", "here")
        return self._absent(point, until)

    def publish(self, report: RankReport | None, end: RankExit) -> None:
        """Send the first worker the report and the exit of this worker's rank."""
        self._store.set(f"end/{self.rank}", json.dumps(codec.plain({"report": report, "end": end})))

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
            answer = json.loads(self._store.get(f"end/{rank}"))
            reports.append(rank_report_from_json(answer["report"]) if answer["report"] is not None else None)
            exits.append(codec.typed(RankExit, answer["end"]))
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


@functools.cache
def _dealt(worker: TorchrunWorker) -> tuple[tuple[_Member, ...], str]:
    """
    Every worker, sorted so that hosts take turns; or why that is unknown.

    Collective, once in a job: a worker that does not come is waited for once.
    """
    store = PrefixStore("workers", _store(worker))
    own_member = _Member(worker.local_rank, worker.rank, worker.host_rank, network_of_this_process())
    store.set(str(worker.rank), json.dumps(own_member))
    names = [str(rank) for rank in range(worker.world_size)]
    try:
        store.wait(names, timedelta(seconds=_ARRIVAL_S))
    except (dist.DistNetworkError, dist.DistStoreError, RuntimeError) as error:
        problem = f"not all {worker.world_size} workers came to torchrun's store at {worker.host}:{worker.port} within "
        return (), f"{problem}{_ARRIVAL_S:.0f} s: {error}"
    return tuple(sorted(_Member(*json.loads(store.get(name))) for name in names)), ""


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
