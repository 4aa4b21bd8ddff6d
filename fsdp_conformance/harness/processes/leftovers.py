"""
Removes shared memory that killed ranks leave behind.

NCCL, torch and Python create blocks under /dev/shm and unlink them, unless they are killed in between. A block is
removed only if it appeared during the case, belongs to this user, has one of these libraries' names, and no process
maps it or has it open: cases of other workers have theirs mapped.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

_DIRECTORY = Path("/dev/shm")  # noqa: S108 - not a temporary file of ours

#: NCCL's, torch's, and multiprocessing.shared_memory's.
_PREFIXES = ("nccl-", "torch_", "psm_")


def shared_memory() -> frozenset[str]:
    """The names of existing blocks that these libraries may have made."""
    try:
        return frozenset(name for name in os.listdir(_DIRECTORY) if name.startswith(_PREFIXES))
    except OSError:  # not Linux, or not mounted
        return frozenset()


def remove_orphans(before: frozenset[str]) -> list[str]:
    """Remove new blocks that no process holds. Returns their names."""
    removed = []
    for name in sorted(shared_memory() - before):
        path = _DIRECTORY / name
        try:
            if path.stat().st_uid != os.getuid() or _is_held(str(path)):
                continue
            path.unlink()
        except FileNotFoundError:  # its owner was quicker
            continue
        removed.append(name)
    return removed


def _is_held(path: str) -> bool:
    return any(path in held for held in _held_by_processes())


def _held_by_processes() -> Iterator[str]:
    """The mappings and open files of each process of this user."""
    for process in Path("/proc").iterdir():
        if not process.name.isdigit():
            continue
        try:
            if process.stat().st_uid != os.getuid():
                continue
            yield (process / "maps").read_text(errors="replace")
            for descriptor in (process / "fd").iterdir():
                yield os.readlink(descriptor)
        except OSError:  # it has ended, or is not ours to look at
            continue
