"""What pytest does before and after the package's tests."""

from __future__ import annotations

import pytest

from fsdp_conformance.tests import simulator_process


def pytest_collection_finish(session: pytest.Session) -> None:
    """Nothing has run yet, which is what a process that others are forked from should have done."""
    if not session.config.option.collectonly:
        simulator_process.start_server(session.items)


def pytest_sessionfinish() -> None:
    simulator_process.stop_server()
