"""
The last collectives of a rank in a small file, to be read from outside when the rank is stuck or dead.

A line is appended when a collective is issued, before anything can block, and its state is changed in place when the
caller releases the Work:

    #14 issued all_gather 29184B float32 [0,1] at unit.py:212 in unshard (forward, step 0)

"issued" means that the call, or a wait for it, has not returned. "closed" means that the caller is done with the Work:
it waited, or (DDP's reducer) it kept only the Work's future.

The file stays small: when it has twice KEPT_LINES lines, the newer half is written over the older one. Its end is
valid at every moment, so it can be read while the rank runs and after it was killed.

Standard library only: the controller reads these files.
"""

from __future__ import annotations

import os
import weakref
from collections import deque
from pathlib import Path
from typing import Any

from fsdp_conformance.errors import ConfigError
from fsdp_conformance.history.collective import CollectiveRecord

#: How many lines are kept at least, and the longest line: 32 KiB at most, a few pages of the page cache.
KEPT_LINES = 64
LINE_BYTES = 256

#: Words of equal length, so that one can overwrite the other.
_ISSUED, _CLOSED = "issued", "closed"


class CollectiveTrace:
    """The writing side. Nothing is buffered, so a SIGKILL loses nothing."""

    def __init__(self, path: str | os.PathLike[str]) -> None:
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

    def issued(self, record: CollectiveRecord) -> None:
        """Record that a collective is about to be issued."""
        if self._file < 0:
            return
        if len(self._lines) == 2 * KEPT_LINES:
            self._compact()
        self._append(record.seq, trace_line(record).encode()[: LINE_BYTES - 1] + b"\n")

    def follow(self, record: CollectiveRecord, work: object | None) -> None:
        """Record when `work` is released. The trace keeps no Work alive, and so no tensor."""
        if work is None:
            self._close(record.seq)
            return

        def released(_: weakref.ref[Any]) -> None:
            self._followed.pop(record.seq, None)
            self._close(record.seq)

        self._followed[record.seq] = weakref.ref(work, released)

    def close(self) -> None:
        """Close the file; later events are dropped."""
        if self._file >= 0:
            os.close(self._file)
        self._file = -1
        self._followed.clear()

    def _append(self, seq: int, line: bytes) -> None:
        os.pwrite(self._file, line, self._end)
        self._lines.append((seq, line))
        self._offsets[seq] = self._end
        self._end += len(line)

    def _close(self, seq: int) -> None:
        if self._file >= 0 and seq in self._offsets:
            os.pwrite(self._file, _CLOSED.encode(), self._offsets[seq] + len(f"#{seq} "))

    def _compact(self) -> None:
        """Keep the newer half. If interrupted at any point, the file still ends with the newest line."""
        for _ in range(KEPT_LINES):
            seq, _line = self._lines.popleft()
            del self._offsets[seq]
        start = self._offsets[self._lines[0][0]]
        kept = os.pread(self._file, self._end - start, start)
        os.pwrite(self._file, kept, 0)
        os.ftruncate(self._file, len(kept))
        self._offsets = {seq: offset - start for seq, offset in self._offsets.items()}
        self._end = len(kept)


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
