"""
Ranks that get ready for the next case while this one runs: fresh ones, and each is used once.

On a GPU most of a short case is its beginning: driver and context, libraries, communicators. None of it depends on the
case, so a second set of ranks does it meanwhile, on the same devices, and waits (`harness.rank_startup`). The next
case takes the set if all that the ranks have done holds for it: world size, server, environment, first group, and
devices that it can have at once. Otherwise the set is ended, and the case starts ranks as usual. The same goes for a
set in which a rank fails while it gets ready: a rank that belongs to a case then fails again, and says why.

A waiting set holds no lease, so no case waits for devices that are not in use. It takes memory, and is made only
where there is plenty.
"""

from __future__ import annotations

import atexit
import tempfile
import time
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from multiprocessing.connection import Connection, wait
from pathlib import Path

from fsdp_conformance.errors import EnvironmentUnavailable
from fsdp_conformance.harness import devices, leases
from fsdp_conformance.harness.deadlines import remaining
from fsdp_conformance.harness.device_memory import RANK_MIB
from fsdp_conformance.harness.leases import Lease
from fsdp_conformance.harness.order import CaseOrder
from fsdp_conformance.harness.processes import rank_process
from fsdp_conformance.harness.processes.forkserver import WarmServer
from fsdp_conformance.harness.processes.leftovers import shared_memory
from fsdp_conformance.harness.processes.rank_set import Member, RankSet, fork_ranks, send_orders

#: How long a case waits for a set that is not ready. Starting afresh would take as long.
READY_S = 60.0

#: The fields that must be equal in a case and in the one that the ranks got ready for.
_BEGINNING = ("world_size", "device_type", "group", "collective_timeout_s", "determinism", "imports_main")

#: Variables that pytest changes with every test, and that mean nothing to a rank.
_CHANGING = frozenset({"PYTEST_CURRENT_TEST"})


@dataclass(frozen=True, kw_only=True, slots=True)
class _Waiting:
    """A set of ranks without a case."""

    case: CaseOrder
    """The case that they prepare for."""
    server: WarmServer
    environments: list[dict[str, str]]
    """The environment variables of each rank that matter to it."""
    ranks: RankSet
    """Its lease names the devices that they use, which they do not hold."""


class PreparedRanks:
    """Holds at most one set of ranks that get ready, or are, for the next case."""

    def __init__(self) -> None:
        self._waiting: _Waiting | None = None
        self._next_world_size = 0

    def expect(self, world_size: int) -> None:
        """After the case that starts next, this process runs one of that world size; 0 if none is known."""
        self._next_world_size = world_size

    def begin(self, case: CaseOrder, server: WarmServer, lease: Lease) -> None:
        """Let ranks get ready for a case like this one, which has just started with that lease."""
        if not can_prepare(case):
            return
        self.close()
        if self._next_world_size != case.world_size or not _has_room(case, lease):
            return
        with ExitStack() as resources:
            prefix = "fsdp-conformance-ahead-"
            directory = Path(
                resources.enter_context(tempfile.TemporaryDirectory(prefix=prefix, ignore_cleanup_errors=True))
            )
            waiting_case = replace(
                case,
                ahead=True,
                directory=directory,
                file_name=str(directory / "store"),
                payload=b"",
                options={},
            )
            orders = waiting_case.for_ranks(lease.variables)
            before = shared_memory()
            try:
                members = fork_ranks(rank_process.main, case.world_size, server, directory, case.imports_main)
            except EnvironmentUnavailable:  # the next case will say why
                return
            for order, (_, connection) in zip(orders, members, strict=True):
                send_orders(connection, [order])
            ranks = RankSet(key=(), members=members, lease=lease, shared_before=before, resources=resources.pop_all())
        self._waiting = _Waiting(
            case=waiting_case, server=server, environments=_environments(waiting_case, lease), ranks=ranks
        )

    def take(self, case: CaseOrder, server: WarmServer) -> RankSet | None:
        """The set, with the lease on its devices, if it fits this case and is ready. One that does not is ended."""
        if not can_prepare(case):
            return None  # of another kind: a probe, say, before the next case
        waiting, self._waiting = self._waiting, None
        if waiting is None:
            return None
        with ExitStack() as resources:
            resources.callback(waiting.ranks.end)
            # Modules are not compared: a rank can import by itself what only the server of this case has imported.
            if waiting.server.environment != server.environment or not _same_beginning(waiting, case):
                return None
            lease = leases.again(case.device_type, waiting.ranks.lease, slots=case.slots_per_device)
            if lease is None:
                return None
            # The set ends before its devices are given back.
            waiting.ranks.resources.push(lease)
            if not _are_ready(waiting.ranks.members, time.monotonic() + READY_S):
                return None
            resources.pop_all()
        return waiting.ranks

    def close(self) -> None:
        """End the set, if there is one."""
        if self._waiting is not None:
            self._waiting.ranks.end()
            self._waiting = None


def can_prepare(case: CaseOrder) -> bool:
    """True if ranks can get ready for such a case before it starts, and it is worth it."""
    is_usual = not (case.reuse or case.simulated or case.share_devices or case.worker or case.debugged)
    return is_usual and case.group is not None and devices.begins_slowly(case.device_type)


def _has_room(case: CaseOrder, lease: Lease) -> bool:
    """True if each device has memory for a rank that waits, and then still for one that runs."""
    memories = [leases.memory_of(case.device_type, name) for name in lease.devices]
    return all(memory is None or memory.free_mib >= 2 * RANK_MIB for memory in memories)


def _same_beginning(waiting: _Waiting, case: CaseOrder) -> bool:
    """True if the ranks have done what those of the case would do first."""
    order = waiting.case
    if any(getattr(order, name) != getattr(case, name) for name in _BEGINNING):
        return False
    if case.group is not None and case.group.only and order.deadlines.collective_s != case.deadlines.collective_s:
        return False  # the group for tensors on the CPU has this timeout
    return waiting.environments == _environments(case, waiting.ranks.lease)


def _environments(case: CaseOrder, lease: Lease) -> list[dict[str, str]]:
    """The variables of each rank, without those that mean nothing to it."""
    return [
        {name: value for name, value in variables.items() if name not in _CHANGING}
        for variables in case.rank_environments(lease.variables)
    ]


def _are_ready(members: Sequence[Member], deadline: float) -> bool:
    """True if all ranks report ready before the deadline, and again when asked. False if one of them ends."""
    ends = [process.sentinel for process, _ in members]
    try:
        if not all(_says_ready(connection, ends, deadline) for _, connection in members):
            return False
        for _, connection in members:
            connection.send_bytes(rank_process.ASKED)
        return all(_says_ready(connection, ends, deadline) for _, connection in members)
    except (EOFError, OSError):
        return False


def _says_ready(connection: Connection, ends: Sequence[int], deadline: float) -> bool:
    # Once a rank has ended, the others wait for it until their own deadlines.
    spoke = connection in wait([connection, *ends], remaining(deadline))
    return spoke and connection.recv_bytes() == rank_process.READY


#: The set of this process.
prepared = PreparedRanks()

# Registered after the forkserver's own exit function, so it runs before it: the ranks end before their server.
atexit.register(prepared.close)
