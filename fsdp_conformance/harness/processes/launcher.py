"""
Starting the ranks of one case: lease devices, fork processes, hand each its order, put a supervisor over them.

Ranks are fresh unless `--reuse-ranks` asks otherwise. A rank that has run a case carries what the case left in its
process, so its next verdict can depend on the cases before: quick, but no basis for a certificate, and the report says
"reused". Even then each case gets its own process group, from its own store file, and a case that failed, hung or left
a rank in an unknown state takes its ranks down with it.
"""

from __future__ import annotations

import atexit
import contextlib
import multiprocessing
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from fsdp_conformance.harness import leases
from fsdp_conformance.harness.leases import Lease
from fsdp_conformance.harness.order import CaseOrder, RankOrder, encode
from fsdp_conformance.harness.processes import rank_process
from fsdp_conformance.harness.processes.cuda_imports import server_without_cuda
from fsdp_conformance.harness.processes.foreground import send_terminal
from fsdp_conformance.harness.processes.forkserver import WarmProcess, WarmServer, server_for, start_process
from fsdp_conformance.harness.processes.leftovers import remove_orphans, shared_memory
from fsdp_conformance.harness.processes.mailbox import Mailbox
from fsdp_conformance.harness.processes.supervisor import Seat, Supervisor
from fsdp_conformance.harness.simulated_ranks import host as rank_host
from fsdp_conformance.harness.torchrun.worker import CaseMeeting
from fsdp_conformance.outcome import RankExit, RankReport

#: How long a reused rank may take to end after its pipe was closed, before it is killed.
_END_TIMEOUT_S = 2.0

Member = tuple[WarmProcess, Connection]
"""A process and the controller's end of its pipe."""


@dataclass(frozen=True, kw_only=True, slots=True)
class RankSet:
    """The processes of one case, or of several in turn."""

    key: tuple[Any, ...]
    """What a case must have in common with the one that the ranks were started for."""
    members: tuple[Member, ...]
    lease: Lease
    resources: ExitStack
    """Gives the devices back."""

    def end(self) -> None:
        """End the ranks and give back the devices."""
        for _, connection in self.members:
            connection.close()
        for process, _ in self.members:
            process.join(_END_TIMEOUT_S)
            if process.exitcode is None:
                process.kill()
                process.join(_END_TIMEOUT_S)
        self.resources.close()


class RankPool:
    """Holds at most one set of idle ranks, which keeps the lease on its devices."""

    def __init__(self) -> None:
        self._idle: RankSet | None = None

    def take(self, key: tuple[Any, ...]) -> RankSet | None:
        """The idle set if it fits. A set that does not fit, or has lost a rank, is ended."""
        found, self._idle = self._idle, None
        if found is None:
            return None
        if found.key == key and all(process.exitcode is None for process, _ in found.members):
            return found
        found.end()
        return None

    def put(self, ranks: RankSet) -> None:
        """Keep a set whose case ended well."""
        self.close()
        self._idle = ranks

    def close(self) -> None:
        """End the idle set, if there is one."""
        if self._idle is not None:
            self._idle.end()
            self._idle = None


#: The pool of this process.
pool = RankPool()

# Registered after the forkserver's own exit function, so it runs before it: the ranks end before their server.
atexit.register(pool.close)


class Launch:
    """The ranks of one case, running."""

    def __init__(
        self,
        case: CaseOrder,
        seats: list[Seat],
        ranks: RankSet,
        *,
        shared_before: frozenset[str],
        meeting: CaseMeeting | None,
    ) -> None:
        self._keep = case.reuse
        self._supervisor = Supervisor(seats, case.deadlines, keep=self._keep, meeting=meeting)
        self._meeting = meeting
        self._ranks = ranks
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
        Each rank's report and exit, once all have ended.

        A torchrun worker gets those of its own rank; the first worker gets those of all.
        """
        self._supervisor.run()
        reports, exits = self._supervisor.reports(), self._supervisor.exits()
        if self._meeting is None:
            return reports, exits
        self._meeting.publish(reports[0], exits[0])
        return self._meeting.collect(self._supervisor.last_word) if self._meeting.rank == 0 else (reports, exits)

    def close(self) -> None:
        """End what still runs and give back the devices, or keep reusable ranks. Calling it again does nothing."""
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


def launch(case: CaseOrder, meeting: CaseMeeting | None = None) -> Launch:
    """
    Start the ranks of a case; under torchrun, where `meeting` is with the other workers, only this worker's rank.

    Raises EnvironmentUnavailable if there are too few devices, or if the warm process cannot start.
    """
    shared_before = shared_memory()  # before the first rank can make any
    key = (case.world_size, case.device_type, frozenset(case.preload_environment.items()))
    ranks = (pool.take(key) if case.reuse else None) or _start(case, key, meeting)
    hosts = meeting.hosts() if meeting is not None else None
    orders = case.for_ranks(ranks.lease.variables, hosts)
    if case.simulated:
        ((process, connection),) = ranks.members
        send_orders(connection, orders)
        files = tuple(order.files for order in orders)
        seats: list[Seat] = [
            rank_host.HostSeat(0, process, Mailbox(connection), files[0], rank_files=files, part=case.first_part)
        ]
    else:
        seats = take_seats([orders[meeting.rank]] if meeting is not None else orders, ranks.members)
    return Launch(case, seats, ranks, shared_before=shared_before, meeting=meeting)


def _start(case: CaseOrder, key: tuple[Any, ...], meeting: CaseMeeting | None) -> RankSet:
    """Processes that wait for their orders."""
    find = server_without_cuda if case.device_type == "cuda" else server_for
    server = find(case.preload, case.preload_environment)
    with ExitStack() as resources:
        if meeting is not None:
            # Their launcher has given each worker a device, the one numbered by LOCAL_RANK, and engines rely on that.
            lease = Lease()
        else:
            num_devices = 0 if case.share_devices else case.world_size
            lease = resources.enter_context(leases.lease(case.device_type, num_devices))
        main = rank_host.main if case.simulated else rank_process.main
        count = 1 if case.simulated or meeting is not None else case.world_size
        members = fork_ranks(main, count, server, case.directory, case.imports_main)
        return RankSet(key=key, members=members, lease=lease, resources=resources.pop_all())


def fork_ranks(
    main: Callable[[Connection, Path], None],
    count: int,
    server: WarmServer,
    directory: Path,
    imports_main: bool = False,
) -> tuple[Member, ...]:
    """`count` processes that call `main(pipe, directory)`. If one cannot be started, none is left running."""
    members: list[Member] = []
    try:
        for index in range(count):
            ours, theirs = multiprocessing.Pipe()
            try:
                process = start_process(
                    main, theirs, directory, server=server, name=f"rank {index}", imports_main=imports_main
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


def take_seats(orders: Sequence[RankOrder], members: Sequence[Member]) -> list[Seat]:
    """Give each process the order of one rank, and each rank a seat."""
    seats = []
    for order, (process, connection) in zip(orders, members, strict=True):
        send_orders(connection, [order])
        if order.case.is_debugged(order.rank):
            send_terminal(connection)
        seats.append(Seat(order.rank, process, Mailbox(connection), order.files, part=order.case.first_part))
    return seats


def send_orders(connection: Connection, orders: Sequence[RankOrder]) -> None:
    """Send a process its orders. If it has already ended, the supervisor will notice."""
    with contextlib.suppress(OSError):
        connection.send_bytes(encode(orders))
