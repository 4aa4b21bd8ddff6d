"""From the output of torchrun: the rank that a signal has ended, and the line where each other rank waited for it."""

from __future__ import annotations

import re
import signal
from pathlib import PurePath

#: torchrun's line about the rank that has failed first.
_FIRST = re.compile(r"failed \(exitcode: -(\d+)\) local_rank: (\d+) ")

#: A frame in the traceback of a rank. The outermost one is the script's.
_FRAME = re.compile(r'^\[rank(\d+)\]:\s+File "(.+)", line (\d+), in ')


class KilledRank:
    """Reads the lines of an output as they come."""

    def __init__(self) -> None:
        self._first: tuple[int, int] | None = None
        self._lines: dict[int, str] = {}

    def read(self, line: str) -> None:
        """Take note of one line."""
        if match := _FRAME.match(line):
            self._lines.setdefault(int(match[1]), f"{PurePath(match[2]).name}:{match[3]}")
        elif self._first is None and (match := _FIRST.search(line)):
            self._first = int(match[2]), int(match[1])

    @property
    def words(self) -> str:
        """`rank 1 was killed by SIGKILL, and rank 0 waited at train.py:12`; empty if no signal has ended a rank."""
        if self._first is None:
            return ""
        rank, number = self._first
        name = signal.Signals(number).name if number in set(signal.Signals) else f"signal {number}"
        waiting = [f"rank {other} waited at {line}" for other, line in self._lines.items() if other != rank]
        return f"rank {rank} was killed by {name}" + "".join(f", and {words}" for words in waiting)
