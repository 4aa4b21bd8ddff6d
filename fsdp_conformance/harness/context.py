"""
The running rank's own state: its log of collectives, and the case that it runs.

    context.log()        the log of collectives, in any process
    context.running()    the case of this rank, with its order, payload and report
    context.working()    tells the controller whose code this rank runs

There is one current context per process. In a rank that is a process it is that rank's. Simulated ranks take turns, and
the scheduler switches the context with the turn (`simulated_ranks.state`), so that it is right in every thread that
works for the rank, autograd's threads included.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from fsdp_conformance.errors import SuiteError
from fsdp_conformance.harness.accounting import Part
from fsdp_conformance.harness.rank import RankRun
from fsdp_conformance.harness.recording.collective_log import CollectiveLog


class RankContext:
    """The state of one rank. `run` is None in the controller, and in simulated ranks that run a bare function."""

    def __init__(self, run: RankRun | None = None) -> None:
        self.run: RankRun | None = None
        self.log = CollectiveLog()
        if run is not None:
            self.begin(run)

    def begin(self, run: RankRun) -> None:
        """Run this case from now on."""
        self.run = run
        self.log.on_issue = run.meet_peers


_current = RankContext()


def current() -> RankContext:
    """The context of the rank that is running, or the controller's."""
    return _current


def switch_to(context: RankContext) -> None:
    """Make `context` the current one."""
    global _current
    _current = context


def log() -> CollectiveLog:
    """The log of the rank that is running."""
    return _current.log


def running() -> RankRun:
    """The case that this rank runs. Raises SuiteError in the controller."""
    if _current.run is None:
        raise SuiteError("this process is not running a case as a rank: it is the controller")
    return _current.run


@contextmanager
def working(part: Part) -> Iterator[None]:
    """Tell the controller whose code this rank runs inside (`harness.accounting`). Does nothing without a case."""
    run = _current.run
    if run is None:
        yield
        return
    outer = run.turn_to(part)
    try:
        yield
    finally:
        run.turn_to(outer)
