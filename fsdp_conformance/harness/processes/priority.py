"""How the kernel schedules the processes of a run. Standard library only."""

from __future__ import annotations

import os
from contextlib import suppress
from pathlib import Path

#: The nice value of the calling process's session, as "/autogroup-123 nice 5".
AUTOGROUP = Path("/proc/self/autogroup")


def keep_priority() -> None:
    """
    Give this process's new session the nice value that the process has. To be called after setsid.

    Linux can share the CPU among sessions first (sched(7), "The autogroup feature"). A nice value then counts only
    inside a session, so `nice fsdp-conformance run` would not yield to anything else, as each rank has a session of its
    own. Does nothing where that does not exist, or may not be written.
    """
    nice = os.nice(0)
    if nice > 0:
        with suppress(OSError):
            AUTOGROUP.write_text(str(nice), encoding="ascii")


def wake_without_preempting() -> None:
    """
    From now on, threads of this process and of its children wait for a free core when they are woken.

    Gloo writes to a socket while it holds the connection's lock. The thread of the process that is woken by it then
    takes the writer's core, cannot have the lock, and polls until its time slice ends: with more ranks than cores most
    of the time goes there. On two cores, 500 small all-reduces of 8 ranks took 8.8 s, and 1.3 s under this policy
    (SCHED_BATCH, sched(7)). Does nothing where that does not exist, or if another policy than the usual one was chosen.
    """
    if hasattr(os, "SCHED_BATCH") and os.sched_getscheduler(0) == os.SCHED_OTHER:
        with suppress(OSError):
            os.sched_setscheduler(0, os.SCHED_BATCH, os.sched_param(0))
