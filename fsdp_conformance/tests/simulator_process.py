"""Tests that make the simulated accelerator active, in processes of their own: a process cannot be rid of it again."""

from __future__ import annotations

import functools
import os
import select
import signal
import sys
import time
import traceback
from collections.abc import Callable
from typing import Any, NoReturn

import pytest
import torch

from fsdp_conformance.simulator import build, checker, device

#: What a test may take; it takes seconds at most.
DEADLINE_S = 180

compiled = pytest.mark.skipif(build.unavailable() is not None, reason=str(build.unavailable()))


def in_process_of_its_own(test: Callable[..., None]) -> Callable[..., None]:
    """
    The test, run in a child that is forked for it and in which the device is active.

    What it raises there fails it here. Tests must not have hazards in the end, unless they have cleared them.
    """

    @functools.wraps(test)
    def run(*args: Any, **kwargs: Any) -> None:
        build.require()  # not in the child: the deadline is no compilation's
        text = run_in_child(lambda: test(*args, **kwargs))
        if text:
            pytest.fail(f"in the child:\n{text}", pytrace=False)

    return run


def run_in_child(function: Callable[[], Any], *, deadline_s: float = DEADLINE_S) -> str:
    """The traceback of what `function` raises in a child with the device active; empty if nothing."""
    reader, writer = os.pipe()
    sys.stdout.flush()
    sys.stderr.flush()
    child = os.fork()
    if child == 0:
        os.close(reader)
        _report(function, writer)
    os.close(writer)
    try:
        return _read(reader, deadline_s)
    finally:
        os.close(reader)
        os.kill(
            child, signal.SIGKILL
        )  # a child that has ended is waited for below, so that its number is still its own
        os.waitpid(child, 0)


def _report(function: Callable[[], Any], writer: int) -> NoReturn:
    text = "the child ended without a word"
    try:
        torch.set_num_threads(1)  # a thread pool of the parent is not there
        device.activate()
        function()
        checker.expect_clean() if checker.num_hazards() else None
        text = "."
    except BaseException:  # noqa: BLE001 - whatever it is, the parent tells it
        text = traceback.format_exc()
    finally:
        os.write(writer, text.encode()[-60000:])
        os._exit(0)


def _read(reader: int, deadline_s: float) -> str:
    deadline = time.monotonic() + deadline_s
    received = b""
    while True:
        ready, _, _ = select.select([reader], [], [], max(0.0, deadline - time.monotonic()))
        if not ready:
            return f"no end after {deadline_s} s"
        part = os.read(reader, 65536)
        if not part:
            break
        received += part
    text = received.decode()
    return "" if text == "." else text or "the child died"
