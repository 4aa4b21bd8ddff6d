"""
The last collectives of a rank in a small file, to be read from outside when the rank is stuck or dead.

A line is appended when a collective is issued, before anything can block, and its state is changed in place when the
caller releases the Work:

    #14 issued all_gather 29184B float32 [0,1] at unit.py:212 in unshard (forward, step 0)

"issued" means that the call, or a wait for it, has not returned. "closed" means that the caller is done with the Work:
it waited, or (DDP's reducer) it kept only the Work's future. On a GPU a wait returns at once, so there a line is closed
when the device has passed the point at which the caller was done.

The file stays small: when it has twice KEPT_LINES lines, the newer half is written over the older one. Its end is
valid at every moment, so it can be read while the rank runs and after it was killed.

Standard library only: the controller reads these files.
"""

from __future__ import annotations

import os
import threading
import weakref
from collections import deque
from collections.abc import Callable
from pathlib import Path
from typing import Any, Protocol

from fsdp_conformance.errors import ConfigError
from fsdp_conformance.history.collective import CollectiveRecord

#: How many lines are kept at least, and the longest line: 32 KiB at most, a few pages of the page cache.
KEPT_LINES = 64
LINE_BYTES = 256

#: Words of equal length, so that one can overwrite the other.
_ISSUED, _CLOSED = "issued", "closed"


#: Between two looks at which marks the device has passed.
_LOOK_S = 0.05


class Mark(Protocol):
    """A point in the work of a device, such as an event that has been recorded."""

    def query(self) -> bool:
        """True if the device has passed it."""
        ...


class CollectiveTrace:
    """
    The writing side. Nothing is buffered, so a SIGKILL loses nothing.

    `mark` makes a mark in what the calling thread has issued to a device; None where a wait makes the host wait.
    """

    def __init__(self, path: str | os.PathLike[str], mark: Callable[[], Mark] | None = None) -> None:
        try:
            self._file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o600)
        except OSError as error:
            raise ConfigError(
                [f"path must be a writable file, got {os.fspath(path)!r}: {error.strerror}"],
                where="collective trace",
            ) from error
        self._lines: deque[tuple[int, bytes]] = deque()  # seq, line
        self._offsets: dict[int, int] = {}  # seq to the line's place in the file
        self._end = 0
        self._followed: dict[int, weakref.ref[Any]] = {}
        self._mark = mark
        self._pending: dict[int, Mark] = {}
        # Reentrant, because a Work may be released while this thread writes.
        self._lock = threading.RLock()
        self._closed = threading.Event()
        self._watcher: threading.Thread | None = None

    def issued(self, record: CollectiveRecord) -> None:
        """Record that a collective is about to be issued."""
        if self._file < 0:
            return
        with self._lock:
            if len(self._lines) == 2 * KEPT_LINES:
                self._compact()
            self._append(record.seq, trace_line(record).encode()[: LINE_BYTES - 1] + b"\n")

    def follow(self, record: CollectiveRecord, work: object | None) -> None:
        """Record when `work` is released. The trace keeps no Work alive, and so no tensor."""
        if work is None:
            self._release(record.seq)
            return

        def released(_: weakref.ref[Any]) -> None:
            self._followed.pop(record.seq, None)
            self._release(record.seq)

        self._followed[record.seq] = weakref.ref(work, released)

    def close(self) -> None:
        """Close the file; later events are dropped."""
        self._closed.set()
        with self._lock:
            if self._file >= 0:
                os.close(self._file)
            self._file = -1
            self._followed.clear()
            self._pending.clear()

    def _release(self, seq: int) -> None:
        """Close the line of a Work that its caller has released, now or when the device has passed this point."""
        if self._mark is None or self._file < 0:
            self._close(seq)
            return
        try:
            mark = self._mark()
        except RuntimeError:  # the device has failed; its next call raises
            return
        with self._lock:
            self._pending[seq] = mark
            if self._watcher is None:
                self._watcher = threading.Thread(target=self._watch, name="collective trace", daemon=True)
                self._watcher.start()

    def _watch(self) -> None:
        """Close the lines whose marks the device passes. The rank's own threads may be blocked meanwhile."""
        while not self._closed.wait(_LOOK_S):
            with self._lock:
                try:
                    passed = [seq for seq, mark in self._pending.items() if mark.query()]
                except RuntimeError:  # the device has failed
                    return
                for seq in passed:
                    del self._pending[seq]
                    self._close(seq)

    def _append(self, seq: int, line: bytes) -> None:
        os.pwrite(self._file, line, self._end)
        self._lines.append((seq, line))
        self._offsets[seq] = self._end
        self._end += len(line)

    def _close(self, seq: int) -> None:
        with self._lock:
            if self._file >= 0 and seq in self._offsets:
                os.pwrite(self._file, _CLOSED.encode(), self._offsets[seq] + len(f"#{seq} "))

    def _compact(self) -> None:
        """Keep the newer half. If interrupted at any point, the file still ends with the newest line."""
        for _ in range(KEPT_LINES):
            seq, _line = self._lines.popleft()
            del self._offsets[seq]
        start = self._offsets[self._lines[0][0]]
        tail = os.pread(self._file, self._end - start, start)
        os.pwrite(self._file, tail, 0)
        os.ftruncate(self._file, len(tail))
        self._offsets = {seq: offset - start for seq, offset in self._offsets.items()}
        self._end = len(tail)


def trace_line(record: CollectiveRecord, state: str = _ISSUED) -> str:
    """The record in one line, with the call site."""
    parts = [f"#{record.seq}", state, record.op.value]
    if record.dtype:
        parts += [f"{record.nbytes}B", record.dtype]
    parts += [record.reduce_op, _group(record.group), f"at {record.site}" if record.site else ""]
    label = ", ".join([record.phase] * bool(record.phase) + [f"step {record.step}"] * (record.step is not None))
    return " ".join(part for part in [*parts, f"({label})" if label else ""] if part)


def read_trace(path: str | os.PathLike[str], last: int = KEPT_LINES) -> list[str]:
    """The `last` newest lines, oldest first; empty if the rank has issued nothing, or if there is no file."""
    try:
        content = Path(path).read_bytes()
    except FileNotFoundError:
        return []
    return content.decode(errors="replace").splitlines()[-last:]


def _group(ranks: tuple[int, ...]) -> str:
    """`[0,1]`; a large group is abbreviated, so that the call site fits on the line."""
    if len(ranks) <= 8:
        return f"[{','.join(map(str, ranks))}]"
    return f"[{ranks[0]},{ranks[1]},..,{ranks[-1]}: {len(ranks)} ranks]"
