"""Signals that ask a command to end."""

from __future__ import annotations

import contextlib
import signal
from collections.abc import Iterator
from types import FrameType


class Stopped(KeyboardInterrupt):
    """SIGTERM or SIGHUP, treated like Ctrl-C: a command ends its children before it exits."""

    def __init__(self, signum: int) -> None:
        self.signum = signum
        super().__init__(signal.Signals(signum).name)


@contextlib.contextmanager
def raised() -> Iterator[None]:
    """Inside the block SIGTERM and SIGHUP raise Stopped, as Ctrl-C raises KeyboardInterrupt."""

    def stop(signum: int, frame: FrameType | None) -> None:
        raise Stopped(signum)

    before = {number: signal.signal(number, stop) for number in (signal.SIGTERM, signal.SIGHUP)}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


@contextlib.contextmanager
def caught() -> Iterator[list[int]]:
    """A list of the signals that have come in; inside the block they raise nothing."""
    signals: list[int] = []

    def note(signum: int, frame: FrameType | None) -> None:
        signals.append(signum)

    before = {number: signal.signal(number, note) for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)}
    try:
        yield signals
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
