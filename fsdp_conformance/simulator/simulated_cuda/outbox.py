"""
The file in which a child process saves its observations, for the parent to judge.

It is saved when the process ends, in whatever way Python gets to know of (return, sys.exit, os._exit), and twice a
second before, for a process that is killed. The last of these saves says that the process has ended.
"""

from __future__ import annotations

import functools
import json
import os
import sys
import threading
import uuid
from collections.abc import Callable, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any, Final, Protocol

__all__ = ["Outbox", "Source", "process_name"]

#: No variables.
NOTHING: Final[Mapping[str, str]] = MappingProxyType({})

#: Seconds between two looks for new hazards.
_LOOK_S = 0.5


class Source(Protocol):
    """A process whose observations are saved."""

    def progress(self) -> tuple[int, int]:
        """Numbers that change when there is something new: the hazards and the accesses so far."""

    def observed(self) -> dict[str, Any]:
        """The observations; JSON-ready."""

    def at_exit(self, action: Callable[[], object]) -> None:
        """Do something when the process ends."""


class Outbox:
    """The file with what this process has observed."""

    def __init__(self, directory: Path, inherited: Mapping[str, str] = NOTHING) -> None:
        """`inherited` are variables of the parent's that say nothing about this process: see `process_name`."""
        self._path = directory / f"{uuid.uuid4().hex}.json"
        self._inherited = inherited
        self._source: Source | None = None
        self._saved: tuple[tuple[int, int], bool] | None = None
        self._lock = threading.Lock()

    def open(self, source: Source) -> None:
        """Save observations from now on, at the latest when the process ends."""
        self._source = source
        source.at_exit(functools.partial(self.save, ended=True))

    def keep_looking(self) -> None:
        """Save new hazards as they come, in a thread."""
        threading.Thread(target=self._look, name="simulated CUDA", daemon=True).start()

    def save(self, *, ended: bool = False) -> None:
        """Save the file, completely or not at all."""
        source = self._source
        if source is None:
            return
        with self._lock:
            state = source.progress(), ended
            # The thread that looks may be late: nothing comes after the end.
            if state == self._saved or (self._has_ended and not ended):
                return
            part = self._path.with_suffix(".part")
            try:
                content = {"process": process_name(self._inherited), "ended": ended, **source.observed()}
                part.write_text(json.dumps(content), encoding="utf-8")
                os.replace(part, self._path)
            except OSError:  # the parent has ended and removed the directory
                return
            self._saved = state

    @property
    def _has_ended(self) -> bool:
        return self._saved is not None and self._saved[1]

    def _look(self) -> None:
        over = threading.Event()
        previous = 0, False
        while not over.wait(_LOOK_S):
            hazards, accesses = self._source.progress() if self._source is not None else (0, 0)
            # With the first access the parent knows of this process, even if it is killed.
            if (hazards, accesses > 0) != previous:
                previous = hazards, accesses > 0
                self.save()


def process_name(inherited: Mapping[str, str] = NOTHING) -> str:
    """
    The name of this process for a user: its rank, its name, or the program that it runs.

    RANK is not this process's if everything in `inherited` is as in the parent.
    """
    rank = os.environ.get("RANK", "")
    if rank.isdecimal() and not (inherited and all(os.environ.get(name) == inherited[name] for name in inherited)):
        return f"rank {rank}"
    multiprocessing: Any = sys.modules.get("multiprocessing.process")
    name = multiprocessing.current_process().name if multiprocessing is not None else "MainProcess"
    if name != "MainProcess":
        return str(name)
    program = os.path.basename(sys.argv[0]) if sys.argv else ""
    return {"": "a child process", "-c": "python -c"}.get(program, program)
