"""Ending a child with everything that it has started, whatever groups and sessions that has made for itself."""

from __future__ import annotations

import contextlib
import os
import signal
from pathlib import Path


def end_family(leader: int, proc: Path = Path("/proc")) -> None:
    """
    Kill the process, its descendants, and whoever lives in the session that it leads.

    The leader must not have been reaped: as long as it has not, its number is nobody else's. Ranks have sessions of
    their own, and are known as descendants only as long as their parents live: so all are stopped before one is killed,
    and none can start another meanwhile. Where there is no /proc, the leader's group has to do.
    """
    stopped: set[int] = set()
    while fresh := family(leader, proc) - stopped:
        for pid in fresh:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGSTOP)
        stopped |= fresh
    for pid in stopped:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
    with contextlib.suppress(ProcessLookupError):
        os.killpg(leader, signal.SIGKILL)


def family(leader: int, proc: Path = Path("/proc")) -> set[int]:
    """The leader, its descendants and its session, as far as they are alive; empty where there is no /proc."""
    parents: dict[int, int] = {}
    found: set[int] = set()
    for entry in proc.glob("[0-9]*"):
        with contextlib.suppress(OSError):  # it has ended meanwhile
            # The command's name may hold spaces and parentheses; what follows the last one is regular.
            state, parent, _, session, *_ = (entry / "stat").read_text().rpartition(")")[2].split()
            if state not in "ZX":
                parents[int(entry.name)] = int(parent)
                if int(session) == leader or int(entry.name) == leader:
                    found.add(int(entry.name))
    while children := {pid for pid, parent in parents.items() if parent in found} - found:
        found |= children
    return found
