"""The file of a rank. It is opened at the first event, so a process that never trains leaves none."""

from __future__ import annotations

import contextlib
import os
import threading
from collections.abc import Callable
from pathlib import Path
from typing import IO

from fsdp_conformance.recordings.events import Begin, Event
from fsdp_conformance.recordings.files import file_name, line_of


class Writer:
    """
    Writes events, each as a whole line, and flushes them: a process that is killed has kept what it wrote.

    A process that was forked from this one writes nothing.
    """

    def __init__(self, directory: Path, begin: Callable[[], Begin]) -> None:
        """`begin` makes the first event, when there is another one to write."""
        self._directory = directory
        self._begin = begin
        self._pid = os.getpid()
        self._file: IO[str] | None = None
        self._lock = threading.Lock()
        self._is_closed = False
        self.error: OSError | None = None
        """Why nothing more is written: the disk is full."""

    @property
    def has_begun(self) -> bool:
        """True if the rank has a file."""
        return self._file is not None

    def write(self, event: Event) -> None:
        """Write an event. Training goes on if that fails."""
        if os.getpid() != self._pid or self.error is not None or self._is_closed:
            return
        with self._lock:
            try:
                if self._file is None:
                    begin = self._begin()
                    self._directory.mkdir(parents=True, exist_ok=True)
                    self._file = (self._directory / file_name(begin.rank, begin.pid)).open("x", encoding="utf-8")
                    self._file.write(line_of(begin))
                self._file.write(line_of(event))
                self._file.flush()
            except OSError as error:
                self.error = error

    def close(self) -> None:
        """Close the file. What comes later is not written."""
        self._is_closed = True
        with self._lock, contextlib.suppress(OSError):
            if self._file is not None and os.getpid() == self._pid:
                self._file.close()
