"""
Shared memory that a killed rank leaves behind, and its removal.

NCCL, torch and Python name their blocks under /dev/shm and remove the names themselves; a rank that is killed in
between does not. A block is removed only if it appeared during the case, belongs to this user, has a name of one of
these libraries, and no process maps it or has it open: a case of another worker has its own mapped.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

_DIRECTORY = Path("/dev/shm")  # noqa: S108 - not a temporary file of ours

#: NCCL's, torch's, and multiprocessing.shared_memory's.
_PREFIXES = ("nccl-", "torch_", "psm_")


def shared_memory() -> frozenset[str]:
    """The names of the blocks that exist now and that these libraries may have made."""
    try:
        return frozenset(name for name in os.listdir(_DIRECTORY) if name.startswith(_PREFIXES))
    except OSError:  # not Linux, or not mounted
        return frozenset()


def remove_orphans(before: frozenset[str]) -> list[str]:
    """Remove the blocks that were not there before and that nobody holds. Returns their names."""
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
    """What each process of this user maps, and what it has open."""
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
