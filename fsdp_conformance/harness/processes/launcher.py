"""
Starting the ranks of one case: devices leased, files made, processes forked, a supervisor put over them.
"""

from __future__ import annotations

import multiprocessing
import pickle
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from fsdp_conformance.harness import leases, rank
from fsdp_conformance.harness.deadlines import Deadlines
from fsdp_conformance.harness.environment import Determinism, rank_variables
from fsdp_conformance.harness.processes.forkserver import WarmProcess, WarmServer, server_for, start_process
from fsdp_conformance.harness.processes.leftovers import remove_orphans, shared_memory
from fsdp_conformance.harness.processes.mailbox import Mailbox
from fsdp_conformance.harness.processes.rank_pool import RankSet, pool
from fsdp_conformance.harness.processes.supervisor import Seat, Supervisor
from fsdp_conformance.harness.rank import RankFiles, RankStart
from fsdp_conformance.harness.simulated_ranks import host as rank_host
from fsdp_conformance.harness.simulated_ranks.host import HostSeat
from fsdp_conformance.harness.torchrun.worker import CaseMeeting
from fsdp_conformance.outcome import RankExit, RankReport

#: How much longer than the case a rank waits for the controller's goodbye; it does not come only if the controller is
#: stuck.
_GOODBYE_SLACK_S = 60.0


@dataclass(frozen=True, kw_only=True, slots=True)
class LaunchOrder:
    """What to start."""

    module: str
    qualname: str
    """Of the test class."""
    test_name: str
    file_name: str
    directory: Path
    """Of the case: the files of the ranks go there."""
    world_size: int
    device_type: str
    deadlines: Deadlines
    determinism: Determinism
    variables: dict[str, str]
    """Set in every rank, over the controller's environment."""
    preload: tuple[str, ...]
    preload_environment: dict[str, str]
    payload: Any = None
    options: dict[str, Any] = field(default_factory=dict)
    """Keyword arguments of `_run`."""
    imports_main: bool = False
    """The test class, or what is called, is in the controller's `__main__`."""
    reuse: bool = False
    """Ranks that have run a case before will do."""
    simulated: bool = False
    """The ranks are threads of one process."""
    meeting: CaseMeeting | None = None
    """Of the workers that start the ranks, one each, if torchrun has started them."""

    def starts(self, device_variables: Mapping[str, str]) -> list[RankStart]:
        """What each rank is told."""
        payload = pickle.dumps(self.payload)
        starts = []
        for index in range(self.world_size):
            files = RankFiles.under(self.directory, index)
            variables = rank_variables(index, self.world_size, trace=files.collectives, determinism=self.determinism)
            if self.meeting is not None:
                variables["LOCAL_RANK"] = str(self.meeting.worker.local_rank)
            starts.append(
                RankStart(
                    rank=index,
                    world_size=self.world_size,
                    module=self.module,
                    qualname=self.qualname,
                    test_name=self.test_name,
                    case_name=self.meeting.name if self.meeting is not None else "",
                    file_name=self.file_name,
                    device_type=self.device_type,
                    files=files,
                    variables={**variables, **device_variables, **self.variables},
                    determinism=self.determinism,
                    payload=payload,
                    collective_timeout_s=self.deadlines.collective_s,
                    worker=self.meeting.worker if self.meeting is not None else None,
                    goodbye_timeout_s=self.deadlines.case_s + _GOODBYE_SLACK_S,
                    options=self.options,
                )
            )
        return starts


class Launch:
    """The ranks of one case, running."""

    def __init__(
        self,
        seats: list[Seat],
        deadlines: Deadlines,
        ranks: RankSet,
        *,
        keep: bool,
        shared_before: frozenset[str],
        meeting: CaseMeeting | None = None,
    ) -> None:
        self._supervisor = Supervisor(seats, deadlines, keep=keep, meeting=meeting)
        self._meeting = meeting
        self._ranks = ranks
        self._keep = keep
        self._closed = False
        self._shared_before = shared_before
        self.seats = seats

    @property
    def processes(self) -> list[WarmProcess]:
        """The process of each rank."""
        return [seat.process for seat in self.seats]

    @property
    def pipes(self) -> dict[int, Connection]:
        """The pipe of each rank, by pid."""
        return {seat.pid: seat.mailbox.connection for seat in self.seats}

    def wait(self) -> tuple[list[RankReport | None], list[RankExit]]:
        """
        What the ranks said and how they ended, once all have.

        A worker of torchrun knows that of its own rank alone, and the first one that of all.
        """
        self._supervisor.run()
        reports, exits = self._supervisor.reports(), self._supervisor.exits()
        if self._meeting is None:
            return reports, exits
        self._meeting.publish(reports[0], exits[0])
        return self._meeting.collect(self._supervisor.last_word) if self._meeting.worker.rank == 0 else (reports, exits)

    def close(self) -> None:
        """End what still runs and give back the devices, or keep the ranks that may be kept. Once is enough."""
        if self._closed:
            return
        self._closed = True
        if self._keep and all(seat.idle and seat.end is None and not seat.failed for seat in self.seats):
            pool.put(self._ranks)
            return
        self._supervisor.kill()
        self._ranks.end()
        if any(seat.end is None or seat.end.exitcode for seat in self.seats):
            remove_orphans(self._shared_before)


def launch(order: LaunchOrder) -> Launch:
    """
    Start the ranks of a case.

    Raises EnvironmentUnavailable if there are too few devices, or if the warm process cannot start.
    """
    shared_before = shared_memory()  # before the first rank can make any
    if order.simulated:
        return _launch_host(order, shared_before)
    if order.meeting is not None:
        return _launch_one(order, order.meeting, shared_before)
    if not order.reuse:
        return _launch_fresh(order, shared_before)
    key = (order.world_size, order.device_type, frozenset(order.preload_environment.items()))
    ranks = pool.take(key) or _start_ranks(order, key)
    seats = []
    for start, (process, connection) in zip(order.starts(ranks.lease.variables), ranks.members, strict=True):
        connection.send_bytes(pickle.dumps(start))
        seats.append(Seat.take(start.rank, process, connection, start.files))
    return Launch(seats, order.deadlines, ranks, keep=True, shared_before=shared_before)


def _launch_fresh(order: LaunchOrder, shared_before: frozenset[str]) -> Launch:
    """Ranks that end with the case."""
    with ExitStack() as resources:
        lease = resources.enter_context(leases.lease(order.device_type, order.world_size))
        starts = order.starts(lease.variables)
        members = fork_ranks([(rank.main, (start,)) for start in starts], _server(order), order.imports_main)
        ranks = RankSet(key=(), members=members, lease=lease, resources=resources.pop_all())
    seats = [
        Seat.take(start.rank, process, connection, start.files)
        for start, (process, connection) in zip(starts, members, strict=True)
    ]
    return Launch(seats, order.deadlines, ranks, keep=False, shared_before=shared_before)


def _launch_one(order: LaunchOrder, meeting: CaseMeeting, shared_before: frozenset[str]) -> Launch:
    """The one rank that this worker of torchrun starts."""
    own = leases.own_device(order.device_type, meeting.worker.local_rank)
    start = order.starts(own.variables)[meeting.worker.rank]
    members = fork_ranks([(rank.main, (start,))], _server(order), order.imports_main)
    ranks = RankSet(key=(), members=members, lease=own, resources=ExitStack())
    seat = Seat.take(start.rank, *members[0], start.files)
    return Launch([seat], order.deadlines, ranks, keep=False, shared_before=shared_before, meeting=meeting)


def _launch_host(order: LaunchOrder, shared_before: frozenset[str]) -> Launch:
    """One process for all ranks, which ends with the case."""
    with ExitStack() as resources:
        lease = resources.enter_context(leases.lease(order.device_type, order.world_size))
        starts = tuple(order.starts(lease.variables))
        members = fork_ranks([(rank_host.main, (starts,))], _server(order), order.imports_main)
        ranks = RankSet(key=(), members=members, lease=lease, resources=resources.pop_all())
    ((process, connection),) = members
    files = tuple(start.files for start in starts)
    seat = HostSeat(rank=0, process=process, mailbox=Mailbox(connection), files=files[0], rank_files=files)
    return Launch([seat], order.deadlines, ranks, keep=False, shared_before=shared_before)


def _start_ranks(order: LaunchOrder, key: tuple[Any, ...]) -> RankSet:
    """Ranks that wait for their first case."""
    with ExitStack() as resources:
        lease = resources.enter_context(leases.lease(order.device_type, order.world_size))
        members = fork_ranks([(rank.main_of_reused, ())] * order.world_size, _server(order), order.imports_main)
        return RankSet(key=key, members=members, lease=lease, resources=resources.pop_all())


def _server(order: LaunchOrder) -> WarmServer:
    return server_for(order.preload, order.preload_environment)


def fork_ranks(
    bodies: Sequence[tuple[Callable[..., None], tuple[Any, ...]]], server: WarmServer, imports_main: bool = False
) -> tuple[tuple[WarmProcess, Connection], ...]:
    """One process per body, each with a pipe as its last argument. If one cannot be started, none is left."""
    members: list[tuple[WarmProcess, Connection]] = []
    try:
        for index, (target, args) in enumerate(bodies):
            ours, theirs = multiprocessing.Pipe()
            try:
                process = start_process(
                    target, *args, theirs, server=server, name=f"rank {index}", imports_main=imports_main
                )
            except BaseException:
                ours.close()
                raise
            finally:
                theirs.close()
            members.append((process, ours))
    except BaseException:
        for process, connection in members:
            process.kill()
            process.join()
            connection.close()
        raise
    return tuple(members)
