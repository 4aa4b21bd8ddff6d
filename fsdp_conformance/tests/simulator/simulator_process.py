"""
Tests that make the simulated accelerator active, each in its own process: a process cannot deactivate it again.

They are forked from a process that was itself forked when pytest had collected and had run nothing. A child of the
process that runs the tests would not do: where one of them has run a backward pass, autograd has counted the devices,
and does not count them again after a fork.
"""

from __future__ import annotations

import functools
import gc
import os
import pickle
import select
import signal
import socket
import struct
import sys
import time
import traceback
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any, NoReturn

import pytest
import torch

from fsdp_conformance.simulator import checker
from fsdp_conformance.simulator.activation import activate
from fsdp_conformance.simulator.device import build

#: What a test may take; it takes seconds at most.
DEADLINE_S = 600

compiled = pytest.mark.skipif(build.unavailable() is not None, reason=str(build.unavailable()))


def in_process_of_its_own(test: Callable[..., None]) -> Callable[..., None]:
    """
    The test, run in a child that is forked for it and in which the device is active.

    What it raises there fails it here. Tests must not have hazards in the end, unless they have cleared them. Its
    fixtures' values must pickle, its parameters need not.
    """

    @functools.wraps(test)
    def run(*args: Any, **kwargs: Any) -> None:
        del args  # the instance: a test does not get what another left in it
        build.require()  # not in the child, whose deadline does not allow for compiling
        nodeid, _, _ = os.environ["PYTEST_CURRENT_TEST"].rpartition(" ")
        text = _servers[os.getpid()].run(nodeid, kwargs)
        if text:
            pytest.fail(f"in the child:\n{text}", pytrace=False)

    run.in_process_of_its_own = True  # type: ignore[attr-defined]
    return run


@dataclass(frozen=True)
class Server:
    """The process that children are forked from, and this end of the connection to it."""

    pid: int
    connection: socket.socket
    items: Mapping[str, pytest.Function]

    def run(self, nodeid: str, kwargs: Mapping[str, Any]) -> str:
        """The traceback of what this test raises; empty if nothing."""
        fixtures = {name: value for name, value in kwargs.items() if name not in _parameters(self.items[nodeid])}
        _send(self.connection, pickle.dumps((nodeid, fixtures)))
        self.connection.settimeout(2 * DEADLINE_S)
        return _receive(self.connection).decode()

    def stop(self) -> None:
        self.connection.shutdown(socket.SHUT_RDWR)
        self.connection.close()
        os.waitpid(self.pid, 0)


#: By the process that asks: a fork has no server.
_servers: dict[int, Server] = {}


def start_server(items: Iterable[pytest.Item]) -> None:
    """Fork the server of the tests among `items` that run in their own processes, if there are any."""
    tests = {item.nodeid: item for item in items if isinstance(item, pytest.Function) and _wants_process(item)}
    if not tests or build.unavailable() is not None:
        return
    ours, theirs = socket.socketpair()
    sys.stdout.flush()
    sys.stderr.flush()
    pid = os.fork()
    if pid == 0:
        ours.close()
        _serve(theirs, tests)
    theirs.close()
    _servers[os.getpid()] = Server(pid, ours, tests)


def stop_server() -> None:
    server = _servers.pop(os.getpid(), None)
    if server is not None:
        server.stop()


def _serve(connection: socket.socket, items: Mapping[str, pytest.Function]) -> NoReturn:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # whoever interrupts the tests closes the connection
    try:
        while True:
            nodeid, fixtures = pickle.loads(_receive(connection))  # from the process that forked this one
            _send(connection, run_in_child(functools.partial(_run, items[nodeid], fixtures)).encode())
    except ConnectionError:
        pass
    except BaseException:  # noqa: BLE001 - it is reported only here
        traceback.print_exc()
        sys.stderr.flush()
    finally:
        os._exit(0)


def _run(item: pytest.Function, fixtures: Mapping[str, Any]) -> None:
    test = _function(item).__wrapped__
    instance = () if item.cls is None else (item.cls(),)
    test(*instance, **_parameters(item), **fixtures)


def _wants_process(item: pytest.Function) -> bool:
    return getattr(_function(item), "in_process_of_its_own", False)


def _function(item: pytest.Function) -> Any:
    return getattr(item.obj, "__func__", item.obj)


def _parameters(item: pytest.Function) -> Mapping[str, Any]:
    return item.callspec.params if hasattr(item, "callspec") else {}


def _send(connection: socket.socket, message: bytes) -> None:
    connection.sendall(struct.pack("!I", len(message)) + message)


def _receive(connection: socket.socket) -> bytes:
    (length,) = struct.unpack("!I", _receive_bytes(connection, 4))
    return _receive_bytes(connection, length)


def _receive_bytes(connection: socket.socket, length: int) -> bytes:
    message = b""
    while len(message) < length:
        part = connection.recv(length - len(message))
        if not part:
            raise ConnectionError("the other process has ended")
        message += part
    return message


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
        gc.freeze()  # the parent's imports are never garbage
        activate()
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
