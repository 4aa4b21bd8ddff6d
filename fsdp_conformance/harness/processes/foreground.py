"""
The rank in the foreground: one that has the terminal of the command, so that a debugger in it can be talked to.

A rank is forked by a server that has no terminal, so the controller sends it its own stdin, stdout and stderr over the
rank's pipe. The rank stays in its own session: Ctrl-C reaches the controller, which passes it on.
"""

from __future__ import annotations

import contextlib
import io
import os
import pdb  # noqa: T100 - this module is for it
import signal
import socket
import sys
import traceback
from bdb import BdbQuit
from collections.abc import Callable, Iterator, Sequence
from multiprocessing import reduction
from multiprocessing.connection import Connection
from types import FrameType
from typing import Any

_STREAMS = (0, 1, 2)


def send_terminal(connection: Connection) -> None:
    """Send the streams of this process to the rank at the other end, which takes them with `take_terminal`."""
    with _socket_of(connection) as channel:
        reduction.sendfds(channel, list(_STREAMS))


def take_terminal(connection: Connection) -> None:
    """In a rank: make the streams that were sent its own."""
    with _socket_of(connection) as channel:
        received: Sequence[int] = reduction.recvfds(channel, len(_STREAMS))
    for stream, descriptor in zip(_STREAMS, received, strict=True):
        os.dup2(descriptor, stream, inheritable=False)
        os.close(descriptor)
    # multiprocessing gives a process no stdin.
    sys.stdin = io.TextIOWrapper(open(0, "rb", closefd=False), encoding="utf-8", errors="replace")  # noqa: SIM115
    for name in ("stdout", "stderr"):
        stream = getattr(sys, name)
        if hasattr(stream, "reconfigure"):
            stream.reconfigure(line_buffering=True)
    signal.signal(signal.SIGINT, signal.default_int_handler)


def announce_prompts(tell: Callable[[bool], object]) -> None:
    """In a rank: call `tell` with True when pdb begins to wait for commands, and with False when the code goes on."""
    interact = pdb.Pdb.interaction

    def announced(self: pdb.Pdb, *args: Any, **kwargs: Any) -> None:
        tell(True)
        try:
            interact(self, *args, **kwargs)
        finally:
            tell(False)

    pdb.Pdb.interaction = announced  # type: ignore[method-assign]


def ignore_breakpoints(note: Callable[[], object] = lambda: None) -> None:
    """
    In a rank without the terminal: pass over breakpoints, where pdb would find no input and end the rank.

    `note` is called at each breakpoint that is passed over.
    """

    def go_on(*args: object, **kwargs: object) -> None:
        note()

    sys.breakpointhook = go_on
    # breakpoint(), pdb.set_trace() and torch.distributed.breakpoint() come here, if a script has changed the hook.
    pdb.Pdb.set_trace = go_on  # type: ignore[method-assign]


def examine(error: BaseException) -> None:
    """Open pdb where the exception was raised, unless the user has just left a debugger."""
    if isinstance(error, BdbQuit | SystemExit):
        return
    traceback.print_exception(error)
    pdb.post_mortem(error.__traceback__)


@contextlib.contextmanager
def passing_on_interrupts(pid: Callable[[], int | None]) -> Iterator[None]:
    """Inside, Ctrl-C interrupts the process with that pid instead of this one; without one, this one."""

    def pass_on(signum: int, frame: FrameType | None) -> None:
        child = pid()
        if child is None:
            raise KeyboardInterrupt
        with contextlib.suppress(ProcessLookupError):
            os.kill(child, signum)

    before = signal.signal(signal.SIGINT, pass_on)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)


def _socket_of(connection: Connection) -> socket.socket:
    return socket.socket(fileno=os.dup(connection.fileno()))
