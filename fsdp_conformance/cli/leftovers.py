"""Orphaned processes and temporary directories that earlier runs left behind."""

from __future__ import annotations

import contextlib
import os
import tempfile
import time
from pathlib import Path

import psutil

#: Set for every warm process, and inherited by the ranks forked from it.
_MARK = "FSDP_CONFORMANCE_PRELOAD"

_PREFIX = "fsdp-conformance-"

#: Directories that live longer than any case.
_LONG_LIVED = ("fsdp-conformance-leases-",)

#: A directory untouched for this long does not belong to a running case.
STALE_S = 3600.0


def processes() -> list[int]:
    """
    Ids of this user's warm processes and ranks whose controller has ended, in order.

    A process that has lost its parent is a child of the first process.
    """
    orphans = []
    for process in psutil.process_iter(["ppid"]):
        # Processes come and go while they are listed, and other users' cannot be read.
        with contextlib.suppress(psutil.Error, OSError):
            if process.info["ppid"] == 1 and _MARK in process.environ() and process.uids().real == os.getuid():
                orphans.append(process.pid)
    return sorted(orphans)


def directories(parent: Path | None = None, *, now: float | None = None) -> list[Path]:
    """Temporary directories and files of ended runs, untouched for STALE_S."""
    parent = parent or Path(tempfile.gettempdir())
    now = time.time() if now is None else now
    stale = []
    for entry in parent.glob(f"{_PREFIX}*"):
        with contextlib.suppress(OSError):
            state = entry.lstat()
            if (
                state.st_uid == os.getuid()
                and now - state.st_mtime > STALE_S
                and not entry.name.startswith(_LONG_LIVED)
            ):
                stale.append(entry)
    return sorted(stale)
