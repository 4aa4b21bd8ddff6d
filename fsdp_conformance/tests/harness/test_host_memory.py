"""The host memory of a process: whatever holds it counts, and what was freed does not."""

from __future__ import annotations

import ctypes
import mmap
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable
from multiprocessing.shared_memory import SharedMemory
from typing import Any

import numpy as np
import pytest
import torch

from fsdp_conformance.harness import host_memory

SIZE = 8 << 20
#: Of the interpreter and the allocator meanwhile.
SLACK = 1 << 20

_LIBC = ctypes.CDLL(None)
_LIBC.malloc.restype = ctypes.c_void_p
_LIBC.malloc.argtypes = [ctypes.c_size_t]
_LIBC.free.argtypes = [ctypes.c_void_p]
_LIBC.memset.argtypes = [ctypes.c_void_p, ctypes.c_int, ctypes.c_size_t]

Free = Callable[[], object]


def _mapping() -> Free:
    mapped = mmap.mmap(-1, SIZE)
    mapped.write(b"x" * SIZE)
    return mapped.close


def _of_libc() -> Free:
    address = _LIBC.malloc(SIZE)
    _LIBC.memset(address, 1, SIZE)
    return lambda: _LIBC.free(address)


def _memory_file() -> Free:
    descriptor = os.memfd_create("held")
    os.write(descriptor, b"x" * SIZE)
    return lambda: os.close(descriptor)


def _open_file() -> Free:
    file = tempfile.TemporaryFile(dir="/dev/shm")  # noqa: SIM115 - it is closed later
    file.write(b"x" * SIZE)
    file.flush()
    return file.close


def _shared() -> Free:
    shared = SharedMemory(create=True, size=SIZE)
    assert shared.buf is not None
    shared.buf[:] = b"x" * SIZE

    def close() -> None:
        shared.close()
        shared.unlink()

    return close


def _referred_to(make: Callable[[], Any]) -> Callable[[], Free]:
    """Memory that is held as long as something refers to it."""

    def allocate() -> Free:
        held = [make()]
        return held.clear

    return allocate


KINDS: dict[str, Callable[[], Free]] = {
    "tensor": _referred_to(lambda: torch.ones(SIZE // 4)),
    "storage": _referred_to(lambda: torch.ones(SIZE // 4).untyped_storage()),
    "shared tensor": _referred_to(lambda: torch.ones(SIZE // 4).share_memory_()),
    "array": _referred_to(lambda: np.ones(SIZE // 8)),
    "bytes": _referred_to(lambda: b"x" * SIZE),
    "bytearray": _referred_to(lambda: bytearray(b"x" * SIZE)),
    "many small bytes": _referred_to(lambda: [bytes(700) for _ in range(SIZE // 733)]),
    "mapping": _mapping,
    "memory of C": _of_libc,
    "memory file": _memory_file,
    "open file in memory": _open_file,
    "shared memory": _shared,
}


@pytest.mark.parametrize("kind", KINDS)
def test_every_kind_counts_until_it_is_freed(kind: str) -> None:
    """Python need not know of it."""
    host_memory.return_large_blocks()
    before = host_memory.held_bytes()

    free = KINDS[kind]()
    held = host_memory.held_bytes() - before
    free()

    assert SIZE <= held + SLACK <= SIZE + 2 * SLACK
    assert host_memory.held_bytes() - before <= SLACK


def test_pages_that_were_never_written_do_not_count() -> None:
    """A large buffer is held once it is used."""
    before = host_memory.held_bytes()
    reserved = mmap.mmap(-1, SIZE)

    assert host_memory.held_bytes() - before <= SLACK
    reserved.close()


def test_other_processes() -> None:
    """Processes that a rank has started count for it, while they run."""
    script = f"held = b'x' * {SIZE}; print(flush=True); input()"
    with subprocess.Popen(
        [sys.executable, "-c", script], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as child:
        assert child.stdout is not None
        child.stdout.readline()
        assert child.pid in host_memory.children()
        assert host_memory.bytes_of([child.pid]) >= SIZE
        child.communicate("\n")

    assert child.pid not in host_memory.children()
    assert host_memory.bytes_of([child.pid]) == 0
