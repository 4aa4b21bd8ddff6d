"""
Where the processes of a recorded command are when its time is over: in the main thread of each, the innermost frame and
those of the user's code.

A process that records announces itself by a file in the directory of the recording, into which faulthandler writes its
stacks on a signal: it may be stuck in C++, where no code of Python runs. Standard library only.
"""

from __future__ import annotations

import contextlib
import faulthandler
import os
import re
import signal
import time
from collections.abc import Collection
from pathlib import Path

from fsdp_conformance.stack import frames_of_stack

#: Of those that no program uses by accident; SIGUSR1 is what batch systems send before they end a job.
_SIGNAL = signal.SIGRTMAX - 5

_NAME = re.compile(r"stack\.(\d*)\.(\d{1,12})")

#: How long the processes may take to write, and how long a file that has grown is quiet once it is complete.
_WRITE_S, _QUIET_S = 3.0, 0.3


def announce(directory: Path, rank: str) -> None:
    """Let the controller ask this process for its stacks. `rank` may be empty."""
    with contextlib.suppress(OSError):  # recording says what is wrong with the directory
        directory.mkdir(parents=True, exist_ok=True)
        file = (directory / f"stack.{rank if rank.isdecimal() else ''}.{os.getpid()}").open("w", encoding="utf-8")
        # It keeps the file for the life of the process.
        faulthandler.register(_SIGNAL, file=file, all_threads=True)


def collect(directory: Path, pids: Collection[int]) -> list[str]:
    """
    The lines that say where each process is, of those with these numbers.

    If some of them are ranks, the others, such as a launcher, are left out.
    """
    announced = [(path, match[1], int(match[2])) for path in _files(directory) if (match := _NAME.fullmatch(path.name))]
    if any(rank for _, rank, _ in announced):
        announced = [one for one in announced if one[1]]
    asked = [(path, rank, pid) for path, rank, pid in announced if pid in pids and _ask(pid)]
    _wait([path for path, _, _ in asked])
    lines = []
    for path, rank, pid in sorted(asked, key=lambda one: (int(one[1] or 0), one[2])):
        # faulthandler writes the main thread last.
        *_, main = path.read_text(encoding="utf-8", errors="replace").strip().split("\n\n")
        frames = frames_of_stack(main)
        process = f"rank {rank} (process {pid})" if rank else f"process {pid}"
        lines.append(f"{process} is at, innermost first:" if frames else f"{process} did not say where it is")
        lines += [f"  {frame}" for frame in frames[:1]]
        lines += [f"  {frame}" for frame in frames[1:] if frame.is_of_engine]
    return lines


def remove(directory: Path) -> None:
    """Remove the files: a recording has none."""
    for path in _files(directory):
        path.unlink(missing_ok=True)


def _files(directory: Path) -> list[Path]:
    return [path for path in directory.glob("stack.*") if _NAME.fullmatch(path.name)]


def _ask(pid: int) -> bool:
    """Send the signal to a process; False if it has ended."""
    try:
        os.kill(pid, _SIGNAL)
    except OSError:
        return False
    return True


def _wait(paths: list[Path]) -> None:
    """Until each file has grown and has been quiet for a while, or the time is over."""
    deadline = time.monotonic() + _WRITE_S
    sizes, grew_at = dict.fromkeys(paths, 0), dict.fromkeys(paths, float("inf"))
    while time.monotonic() < deadline:
        now = time.monotonic()
        for path in paths:
            size = path.stat().st_size
            if size != sizes[path]:
                sizes[path], grew_at[path] = size, now
        if all(now - at >= _QUIET_S for at in grew_at.values()):
            return
        time.sleep(0.02)
