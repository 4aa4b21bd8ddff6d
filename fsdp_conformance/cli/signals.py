"""Signals that ask a command to end, noted for when it looks."""

from __future__ import annotations

import contextlib
import signal
from collections.abc import Iterator
from types import FrameType


@contextlib.contextmanager
def caught() -> Iterator[list[int]]:
    """A list that grows with the signals that come, instead of an exception in the middle of whatever is done."""
    signals: list[int] = []

    def note(signum: int, frame: FrameType | None) -> None:
        signals.append(signum)

    before = {number: signal.signal(number, note) for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)}
    try:
        yield signals
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
