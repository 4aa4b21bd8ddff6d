"""What earlier runs left behind: orphaned processes and temporary directories."""

from __future__ import annotations

import contextlib
import os
import tempfile
import time
from pathlib import Path

#: Set for every warm process, and inherited by the ranks forked from it.
_MARK = b"FSDP_CONFORMANCE_PRELOAD="

_PREFIX = "fsdp-conformance-"

#: Directories that live longer than any case.
_KEPT = ("fsdp-conformance-leases-",)

#: A directory untouched for this long does not belong to a running case.
STALE_S = 3600.0


def processes(proc: Path = Path("/proc")) -> list[int]:
    """
    Ids of this user's warm processes and ranks whose controller has ended, in order; empty without /proc.

    A process that has lost its parent is a child of the first process.
    """
    found = []
    for entry in proc.iterdir() if proc.is_dir() else ():
        if not entry.name.isdecimal() or int(entry.name) == 1:
            continue
        # Processes come and go while they are listed, and other users' cannot be read.
        with contextlib.suppress(OSError):
            if _parent(entry) == 1 and _MARK in (entry / "environ").read_bytes() and entry.stat().st_uid == os.getuid():
                found.append(int(entry.name))
    return sorted(found)


def directories(parent: Path | None = None, *, now: float | None = None) -> list[Path]:
    """Temporary directories and files of ended runs, untouched for STALE_S."""
    parent = parent or Path(tempfile.gettempdir())
    now = time.time() if now is None else now
    found = []
    for entry in parent.glob(f"{_PREFIX}*"):
        with contextlib.suppress(OSError):
            state = entry.lstat()
            if state.st_uid == os.getuid() and now - state.st_mtime > STALE_S and not entry.name.startswith(_KEPT):
                found.append(entry)
    return sorted(found)


def _parent(entry: Path) -> int:
    # The command's name may hold spaces and parentheses; the state and the parent come after the last one.
    return int((entry / "stat").read_text().rpartition(")")[2].split()[1])
