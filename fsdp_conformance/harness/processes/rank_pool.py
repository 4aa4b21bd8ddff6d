"""
A set of ranks that is used again: quick, and no basis for a certificate.

A rank that has run a case carries what the case left in its process, so a verdict can depend on the cases before it.
Whoever asks for `--reuse-ranks` accepts that, and the report says "reused". Each case gets a process group of its
own, from a store file of its own; a case that failed, hung or left a rank in an unknown state takes the set down with
it.

There is one set at a time: it holds the lease on its devices for as long as it lives.
"""

from __future__ import annotations

import atexit
from contextlib import ExitStack
from dataclasses import dataclass
from multiprocessing.connection import Connection
from typing import Any

from fsdp_conformance.harness.leases import Lease
from fsdp_conformance.harness.processes.forkserver import WarmProcess

#: How long a rank may take to end after its pipe was closed, before it is killed.
_END_TIMEOUT_S = 2.0


@dataclass(frozen=True, kw_only=True, slots=True)
class RankSet:
    """Ranks that wait for a case."""

    key: tuple[Any, ...]
    """What a case must have in common with the one that the ranks were started for."""
    members: tuple[tuple[WarmProcess, Connection], ...]
    """Process and pipe of each rank."""
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
    """Holds at most one set of idle ranks."""

    def __init__(self) -> None:
        self._idle: RankSet | None = None

    def take(self, key: tuple[Any, ...]) -> RankSet | None:
        """The idle set that fits, now the caller's; one that does not fit, or has lost a rank, is ended."""
        found, self._idle = self._idle, None
        if found is None:
            return None
        if found.key == key and all(process.exitcode is None for process, _ in found.members):
            return found
        found.end()
        return None

    def put(self, ranks: RankSet) -> None:
        """Keep a set whose case ended well."""
        if self._idle is not None:
            self._idle.end()
        self._idle = ranks

    def close(self) -> None:
        """End the idle set, if there is one."""
        if self._idle is not None:
            self._idle.end()
            self._idle = None


#: The pool of this process.
pool = RankPool()

# Registered after the forkserver's own, so it runs before it: the ranks end before their server.
atexit.register(pool.close)
