"""
The file in which a child process saves what it has observed, for the parent to judge.

It is saved when the process ends, in whatever way Python gets to know of (return, sys.exit, os._exit), and twice a
second before, for a process that is killed.
"""

from __future__ import annotations

import json
import os
import sys
import threading
import uuid
from collections.abc import Callable
from pathlib import Path
from typing import Any, Protocol

__all__ = ["Outbox", "Source"]

#: Seconds between two looks for new hazards.
_LOOK_S = 0.5


class Source(Protocol):
    """What is saved: a simulation."""

    def progress(self) -> tuple[int, int]:
        """Numbers that change when there is something new: the hazards and the accesses so far."""

    def observed(self) -> dict[str, Any]:
        """What was observed; JSON-ready."""

    def at_exit(self, action: Callable[[], object]) -> None:
        """Do something when the process ends."""


class Outbox:
    """The file with what this process has observed."""

    def __init__(self, directory: Path) -> None:
        self._path = directory / f"{uuid.uuid4().hex}.json"
        self._source: Source | None = None
        self._saved: tuple[int, int] | None = None
        self._lock = threading.Lock()

    def open(self, source: Source) -> None:
        """From now on save what it observes, at the latest when the process ends."""
        self._source = source
        source.at_exit(self.save)

    def keep_looking(self) -> None:
        """Save new hazards as they come, in a thread."""
        threading.Thread(target=self._look, name="simulated CUDA", daemon=True).start()

    def save(self) -> None:
        """Save the file, completely or not at all."""
        source = self._source
        if source is None:
            return
        with self._lock:
            state = source.progress()
            if state == self._saved:
                return
            part = self._path.with_suffix(".part")
            try:
                part.write_text(json.dumps({"process": process_name(), **source.observed()}), encoding="utf-8")
                os.replace(part, self._path)
            except OSError:  # the parent has ended and removed the directory
                return
            self._saved = state

    def _look(self) -> None:
        over = threading.Event()
        hazards = 0
        while not over.wait(_LOOK_S):
            source = self._source
            found = source.progress()[0] if source is not None else 0
            if found != hazards:
                hazards = found
                self.save()


def process_name() -> str:
    """What a user calls this process: its rank, its name, or the program that it runs."""
    rank = os.environ.get("RANK", "")
    if rank.isdecimal():
        return f"rank {rank}"
    multiprocessing: Any = sys.modules.get("multiprocessing.process")
    name = multiprocessing.current_process().name if multiprocessing is not None else "MainProcess"
    if name != "MainProcess":
        return str(name)
    program = os.path.basename(sys.argv[0]) if sys.argv else ""
    return {"": "a child process", "-c": "python -c"}.get(program, program)
