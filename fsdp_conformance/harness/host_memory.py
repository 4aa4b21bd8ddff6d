"""
The host memory that a process holds, as the kernel counts it: whoever allocated it, and whatever Python can see of it.

Pages count if no file on a disk has their contents: pages of the heap, of anonymous mappings, of shared memory that is
mapped, and of memory files that are open. So arrays, bytes, storages that only C++ or a thread refers to, and mappings
count like tensors. Pages that were never written do not count, and neither do files that a process has closed again.
"""

from __future__ import annotations

import ctypes
import functools
import os
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

_PROC = Path("/proc")

#: Fields of /proc/PID/smaps_rollup that are counted. Pages of files on a disk are in neither.
_OWN_PAGES = ("Anonymous:", "Swap:")

#: The beginnings of the targets of descriptors that are files in memory.
_FILES_IN_MEMORY = ("/dev/shm/", "/memfd:")  # noqa: S108 - nothing is written there

#: The option of `mallopt` for the size from which glibc maps each block separately, and that size in bytes. It is
#: glibc's default, which glibc raises by itself unless it is set.
_M_MMAP_THRESHOLD = -3
_LARGE = 128 * 1024

_KIB = 1024


def return_large_blocks() -> None:
    """
    Make glibc return each large block to the system as soon as it is freed.

    Otherwise it would keep tens of MB for later, which no trimming returns from the arenas of threads.
    """
    mallopt = _of_libc("mallopt")
    if mallopt is not None:
        mallopt(_M_MMAP_THRESHOLD, _LARGE)


def held_bytes() -> int:
    """Bytes of host memory that this process holds, once the allocator has given back what is free."""
    trim = _of_libc("malloc_trim")
    if trim is not None:
        trim(0)
    return _bytes_of(os.getpid())


def children() -> frozenset[int]:
    """The processes that descend from this one."""
    descendants: set[int] = set()
    waiting = [os.getpid()]
    while waiting:
        new = set(_children_of(waiting.pop())) - descendants
        descendants |= new
        waiting += new
    return frozenset(descendants)


def bytes_of(processes: Iterable[int]) -> int:
    """
    Bytes of host memory that other processes hold together; those that have ended hold nothing.

    A process that was forked holds the pages that it shares with its parent, too.
    """
    return sum(map(_bytes_of, processes))


def _bytes_of(process: int) -> int:
    directory = _PROC / str(process)
    try:
        rollup = (directory / "smaps_rollup").read_text().splitlines()
        status = (directory / "status").read_text().splitlines()
        lines = [line for line in rollup if line.startswith(_OWN_PAGES)]
        lines += [line for line in status if line.startswith("RssShmem:")]
        return sum(int(line.split()[1]) for line in lines) * _KIB + _unmapped_files(directory)
    except OSError:
        return 0


def _unmapped_files(directory: Path) -> int:
    """Bytes of the files in memory that a process holds open, and has not mapped."""
    files: dict[tuple[int, int], int] = {}
    for descriptor in (directory / "fd").iterdir():
        try:
            if str(descriptor.readlink()).startswith(_FILES_IN_MEMORY):
                status = descriptor.stat()
                files[status.st_dev, status.st_ino] = status.st_blocks * 512
        except OSError:
            # It was closed meanwhile.
            continue
    if not files:
        return 0
    mapped = {int(line.split(maxsplit=5)[4]) for line in (directory / "maps").read_text().splitlines()}
    return sum(size for (_, inode), size in files.items() if inode not in mapped)


def _children_of(process: int) -> Iterator[int]:
    try:
        for task in (_PROC / str(process) / "task").iterdir():
            yield from map(int, (task / "children").read_text().split())
    except OSError:
        return


@functools.cache
def _of_libc(name: str) -> Any:
    """A function of glibc; None in another library."""
    return getattr(ctypes.CDLL(None), name, None)
