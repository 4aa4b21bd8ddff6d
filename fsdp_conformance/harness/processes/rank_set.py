"""
Sets of ranks: the processes that run one case, or several in turn, with the lease on their devices.

At most one idle set is kept for reuse (`RankPool`). While it is idle it holds no devices, so other cases can use them;
if they are taken when the next case starts, the set is ended. What a fresh set prepares before it has a case is in
`prepared`.
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
from fsdp_conformance.harness.order import RankOrder, encode
from fsdp_conformance.harness.processes.forkserver import WarmProcess, WarmServer, start_process

#: How long a reused rank may take to end after its pipe was closed, before it is killed.
_END_TIMEOUT_S = 2.0

Member = tuple[WarmProcess, Connection]
"""A process and the controller's end of its pipe."""


@dataclass(frozen=True, kw_only=True, slots=True)
class RankSet:
    """The processes of one case, or of several in turn."""

    key: tuple[Any, ...]
    """The settings that a case must share with the one that the ranks were started for."""
    members: tuple[Member, ...]
    lease: Lease
    shared_before: frozenset[str]
    """The blocks of shared memory from before the first of the processes."""
    resources: ExitStack
    """Releases what the set holds: its devices, and its directory if it was prepared in one."""

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
    """Holds at most one set of idle ranks, which hold no devices."""

    def __init__(self) -> None:
        self._idle: RankSet | None = None

    def take(self, key: tuple[Any, ...], device_type: str, *, slots: int = 1) -> RankSet | None:
        """
        The idle set if it fits, with a slot on each of its devices again.

        A set that does not fit, has lost a rank, or whose devices are taken, is ended.
        """
        idle, self._idle = self._idle, None
        if idle is None:
            return None
        if idle.key == key and all(process.exitcode is None for process, _ in idle.members):
            renewed_lease = leases.again(device_type, idle.lease, slots=slots)
            if renewed_lease is not None:
                idle.resources.push(renewed_lease)
                return idle
        idle.end()
        return None

    def put(self, ranks: RankSet) -> None:
        """Keep a set whose case ended well, and give its devices back."""
        self.close()
        ranks.resources.close()
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


def send_orders(connection: Connection, orders: Sequence[RankOrder]) -> None:
    """Send a process its orders. If it has already ended, the supervisor will notice."""
    with contextlib.suppress(OSError):
        connection.send_bytes(encode(orders))
