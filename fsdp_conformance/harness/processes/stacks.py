"""
The state of a stuck rank: its Python stacks, its last collectives and its state, read from outside.

The rank cannot help: it may be stuck in C++ while it holds the interpreter's lock, or stopped by a signal. So
faulthandler writes the stacks from a signal handler, and the collective trace appends each line to a file when it is
issued.
"""

from __future__ import annotations

import multiprocessing.connection
import os
import signal
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Protocol

from fsdp_conformance.harness.deadlines import remaining
from fsdp_conformance.harness.recording.collective_trace import read_trace
from fsdp_conformance.outcome.endings import STOPPED

#: How often the stack files are checked: a growing file does not wake the controller.
_LOOK_S = 0.01

#: A dump without a recognizable end counts as complete when it has not grown for this long.
_QUIET_S = 0.5

#: How a dump ends: with the bottom frame of the main thread, which faulthandler writes last, or with an ellipsis.
_LAST_LINES = ("in <module>", "  ...")

#: The signal on which a rank writes the stacks of its threads.
STACK_SIGNAL = signal.SIGUSR1

#: Functions of the harness: the thread that watches the controller, and the frame that calls the test method.
WATCH_FUNCTION = "_end_with"
BODY_FUNCTION = "body"

#: How much of a rank's output, and how many of its last collectives, its exit record keeps.
OUTPUT_TAIL_BYTES = 8192
COLLECTIVES_TAIL = 12


class Stuck(Protocol):
    """A rank as `collect_stacks` sees it."""

    @property
    def pid(self) -> int: ...

    @property
    def sentinel(self) -> int: ...

    @property
    def stack_file(self) -> Path: ...


def collect_stacks(ranks: Mapping[int, Stuck], *, timeout_s: float) -> dict[int, str]:
    """
    Ask each rank for the stacks of all its threads, and wait for at most `timeout_s`.

    A rank that a signal has stopped is continued, so that it can answer, and its text begins with STOPPED.
    """
    before = {rank: _size(stuck.stack_file) for rank, stuck in ranks.items()}
    stopped = {rank for rank, stuck in ranks.items() if is_stopped(stuck.pid)}
    for rank, stuck in ranks.items():
        send_signal(stuck.pid, STACK_SIGNAL)
        if rank in stopped:
            send_signal(stuck.pid, signal.SIGCONT)
    deadline = time.monotonic() + timeout_s
    sizes, grew_at = dict(before), dict.fromkeys(ranks, time.monotonic())
    waiting = set(ranks)
    while waiting and time.monotonic() < deadline:
        sentinels = [ranks[rank].sentinel for rank in waiting]
        ended = multiprocessing.connection.wait(sentinels, min(_LOOK_S, remaining(deadline)))
        for rank in list(waiting):
            path = ranks[rank].stack_file
            if _size(path) != sizes[rank]:
                sizes[rank], grew_at[rank] = _size(path), time.monotonic()
            has_grown = sizes[rank] > before[rank]
            is_quiet = time.monotonic() - grew_at[rank] >= _QUIET_S
            if ranks[rank].sentinel in ended or (has_grown and (is_quiet or _is_complete(path))):
                waiting.discard(rank)
    texts = {}
    for rank, stuck in ranks.items():
        text = readable(_tail(stuck.stack_file, max(0, _size(stuck.stack_file) - before[rank])))
        text = text or "no stack: the rank did not respond to the signal"
        texts[rank] = f"{STOPPED}; continued, it wrote:\n{text}" if rank in stopped else text
    return texts


def readable(dump: str) -> str:
    """The text that faulthandler wrote, without the harness's own thread and the frames below the case."""
    blocks = []
    for block in dump.strip().split("\n\n"):
        if f"in {WATCH_FUNCTION}\n" in block:
            continue
        lines = block.splitlines()
        bottom = next((index for index, line in enumerate(lines) if line.endswith(f"in {BODY_FUNCTION}")), len(lines))
        blocks.append("\n".join(lines[:bottom]))
    return "\n\n".join(blocks)


def _is_complete(path: Path) -> bool:
    return _tail(path, 256).rstrip("\n").endswith(_LAST_LINES)


def is_stopped(pid: int) -> bool:
    """True if a signal (SIGSTOP, or a debugger's) has stopped the process. False if there is no /proc."""
    return _state(pid) in ("T", "t")


def is_alive(pid: int) -> bool:
    """True if the process has not ended; one that has may still wait for its parent. False if there is no /proc."""
    return _state(pid) not in ("", "Z", "X")


def _state(pid: int) -> str:
    """The letter in /proc/PID/stat; empty if there is none."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return ""
    return stat.rpartition(")")[2].split()[0]


def send_signal(pid: int, number: int) -> None:
    """Send a signal to one process, unless it has ended."""
    try:
        os.kill(pid, number)
    except ProcessLookupError:
        return


def output_tail(path: Path) -> str:
    """The end of a rank's output."""
    return _tail(path, OUTPUT_TAIL_BYTES)


def last_collectives(path: Path) -> list[str]:
    """The last lines of a rank's trace, oldest first."""
    return read_trace(path, COLLECTIVES_TAIL)


def _tail(path: Path, nbytes: int) -> str:
    try:
        with path.open("rb") as file:
            file.seek(max(0, _size(path) - nbytes))
            return file.read().decode(errors="replace")
    except FileNotFoundError:  # the case may have removed it
        return ""


def _size(path: Path) -> int:
    try:
        return path.stat().st_size
    except FileNotFoundError:
        return 0
