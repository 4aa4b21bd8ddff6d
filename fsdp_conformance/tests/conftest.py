"""What pytest does before and after the package's tests."""

from __future__ import annotations

import signal

import pytest

from fsdp_conformance.tests.simulator import simulator_process


def pytest_configure() -> None:
    """A shell's job in the background ignores SIGINT, and so does all that it starts: some tests send it to a child."""
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)


def pytest_collection_finish(session: pytest.Session) -> None:
    """Nothing has run yet, which is what a process that others are forked from should have done."""
    if not session.config.option.collectonly:
        simulator_process.start_server(session.items)


def pytest_sessionfinish() -> None:
    simulator_process.stop_server()
