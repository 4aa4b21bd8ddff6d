"""
Starting the ranks of one case: lease devices, fork processes, hand each its order, put a supervisor over them.

Ranks are fresh unless `--reuse-ranks` asks otherwise. A rank that has run a case carries what the case left in its
process, so its next verdict can depend on the cases before: quick, but no basis for a certificate, and the report says
"reused". Even then each case gets its own process group, from its own store file, and a case that failed, hung or left
a rank in an unknown state takes its ranks down with it.

On devices where that takes long, the ranks of the next case get ready while this one runs (`prepared`).
"""

from __future__ import annotations

import os
import signal
from collections.abc import Sequence
from contextlib import ExitStack, suppress
from multiprocessing.connection import Connection
from typing import Any

from fsdp_conformance.harness import leases
from fsdp_conformance.harness.leases import Lease
from fsdp_conformance.harness.order import CaseOrder, RankOrder
from fsdp_conformance.harness.processes import rank_process
from fsdp_conformance.harness.processes.cuda_imports import server_without_cuda
from fsdp_conformance.harness.processes.foreground import send_terminal
from fsdp_conformance.harness.processes.forkserver import WarmProcess, WarmServer, server_for
from fsdp_conformance.harness.processes.leftovers import remove_orphans, shared_memory
from fsdp_conformance.harness.processes.mailbox import Mailbox
from fsdp_conformance.harness.processes.prepared import prepared
from fsdp_conformance.harness.processes.rank_set import Member, RankSet, fork_ranks, pool, send_orders
from fsdp_conformance.harness.processes.supervisor import Seat, Supervisor
from fsdp_conformance.harness.simulated_ranks import host as rank_host
from fsdp_conformance.harness.torchrun.worker import CaseMeeting
from fsdp_conformance.outcome.records import RankExit, RankReport


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
    find = server_without_cuda if case.device_type == "cuda" else server_for
    server = find(case.preload, case.preload_environment, engine=case.engine)
    if case.reuse:
        ready = pool.take(key, case.device_type, slots=case.slots_per_device)
    else:
        ready = prepared.take(case, server)
    ranks = ready or _start(case, key, server, meeting)
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
    started = Launch(case, seats, ranks, shared_before=shared_before & ranks.shared_before, meeting=meeting)
    if meeting is None:
        prepared.begin(case, server, ranks.lease)
    return started


class RefereeLaunch:
    """
    The process that judges a case: simulated ranks that see what the real ones observe (`cases.referee`).

    It starts with the ranks, but its time counts from when they have ended.
    """

    def __init__(self, case: CaseOrder) -> None:
        self._case = case
        shared_before = shared_memory()
        server = server_for(case.preload, case.preload_environment)
        members = fork_ranks(rank_host.main, 1, server, case.directory, case.imports_main)
        self._orders = case.for_ranks({})
        send_orders(members[0][1], self._orders)
        self._ranks = RankSet(
            key=(), members=members, lease=Lease(), shared_before=shared_before, resources=ExitStack()
        )
        self._launch: Launch | None = None

    def wait(self) -> tuple[list[RankReport | None], list[RankExit]]:
        """The report of the referee on each rank, and how the referee ended."""
        ((process, connection),) = self._ranks.members
        if process.pid is not None:
            with suppress(OSError):
                # A rank may have stopped it: it runs under the same user.
                os.kill(process.pid, signal.SIGCONT)
        files = tuple(order.files for order in self._orders)
        seat = rank_host.HostSeat(
            0, process, Mailbox(connection), files[0], rank_files=files, part=self._case.first_part
        )
        self._launch = Launch(self._case, [seat], self._ranks, shared_before=self._ranks.shared_before, meeting=None)
        return self._launch.wait()

    def close(self) -> None:
        """End it if it still runs."""
        if self._launch is not None:
            self._launch.close()
            return
        ((process, _),) = self._ranks.members
        process.kill()
        self._ranks.end()


def _start(case: CaseOrder, key: tuple[Any, ...], server: WarmServer, meeting: CaseMeeting | None) -> RankSet:
    """Processes that wait for their orders."""
    shared_before = shared_memory()
    with ExitStack() as resources:
        if meeting is not None:
            # Their launcher has given each worker a device, the one numbered by LOCAL_RANK, and engines rely on that.
            lease = Lease()
        else:
            num_devices = 0 if case.share_devices else case.world_size
            lease = resources.enter_context(leases.lease(case.device_type, num_devices, slots=case.slots_per_device))
        main = rank_host.main if case.simulated else rank_process.main
        count = 1 if case.simulated or meeting is not None else case.world_size
        members = fork_ranks(main, count, server, case.directory, case.imports_main)
        return RankSet(
            key=key, members=members, lease=lease, shared_before=shared_before, resources=resources.pop_all()
        )


def take_seats(orders: Sequence[RankOrder], members: Sequence[Member]) -> list[Seat]:
    """Give each process the order of one rank, and each rank a seat."""
    seats = []
    for order, (process, connection) in zip(orders, members, strict=True):
        send_orders(connection, [order])
        if order.case.is_debugged(order.rank):
            send_terminal(connection)
        seats.append(Seat(order.rank, process, Mailbox(connection), order.files, part=order.case.first_part))
    return seats
