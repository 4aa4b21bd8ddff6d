"""Keeps the priority of a run in the new sessions that it starts. Standard library only."""

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
