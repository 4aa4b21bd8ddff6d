"""
Simulated GPUs in this process and all that it starts, with their findings: what the pytest plugin and the context
manager have in common.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace

from fsdp_conformance.simulator.checker.hazard import Hazard
from fsdp_conformance.simulator.simulated_cuda import simulation
from fsdp_conformance.simulator.simulated_cuda.findings import Inbox, Observations
from fsdp_conformance.simulator.simulated_cuda.settings import Children
from fsdp_conformance.simulator.suppressions import NO_SUPPRESSIONS, Suppressions

__all__ = ["CudaSession", "SimulatedCuda", "opened"]

_open: CudaSession | None = None


class CudaSession:
    """While it is open there are `num_devices` GPUs. There is at most one session at a time in a process."""

    def __init__(self, num_devices: int, *, checks: bool, suppressions: Suppressions = NO_SUPPRESSIONS) -> None:
        global _open
        self._simulation = simulation.begin(num_devices, checks=checks)
        try:
            self._children = Children(num_devices, checks=checks, variables=simulation.extension_variables())
        except BaseException:
            simulation.end()
            raise
        self._inbox = Inbox(self._children.directory, suppressions)
        self._taken = Observations()
        self._checks = checks
        _open = self

    @property
    def num_devices(self) -> int:
        """How many GPUs there are."""
        return self._simulation.num_devices

    def set_checks(self, checks: bool) -> None:
        """Turn the race checker on or off, here and in processes that are started from now on."""
        # Waits are always tracked, so this can be done at any time.
        if checks != self._checks:
            self._checks = checks
            self._simulation.set_checks(checks)
            self._children.set_checks(checks)

    def look(self) -> Observations:
        """The observations since the last `take` of this process and of children that have saved them."""
        # Read what is new, and keep it for `take`.
        self._taken = self._taken.joined(self._inbox.collect(self._simulation.observed()))
        self._simulation.forget_hazards()
        return self._taken

    def take(self) -> Observations:
        """Return the same, and start over."""
        observations = self.look()
        self._taken = Observations()
        return observations

    def put_back(self, earlier: Observations) -> None:
        """Undo a `take`."""
        self._taken = earlier.joined(self._taken)

    @property
    def checks(self) -> bool:
        """True if the race checker is on."""
        return self._checks

    def forget_unfinished(self) -> None:
        """Forget unfinished work on the devices, so that the next test is not blamed for it."""
        self._simulation.forget()

    def close(self) -> None:
        """End the simulation. Everything that was taken before remains valid. A second call does nothing."""
        global _open
        if _open is not self:
            return
        _open = None
        simulation.end()
        self._children.close()


@contextmanager
def opened(num_devices: int, *, checks: bool) -> Iterator[CudaSession]:
    """
    A context with that many GPUs: in a new session, or in the one that is open, if it has as many.

    Raises ConfigError if it has not, and in a child process of one that simulates GPUs, which judges the hazards.
    """
    if _open is None or _open.num_devices != num_devices:
        session = CudaSession(num_devices, checks=checks)
        try:
            yield session
        finally:
            session.close()
        return
    session = _open
    earlier, checked = session.take(), session.checks
    session.set_checks(checks)
    try:
        yield session
    finally:
        session.set_checks(checked)
        session.put_back(earlier)


class SimulatedCuda:
    """The session as a test or a block sees it."""

    def __init__(self, session: CudaSession) -> None:
        self._session = session

    @property
    def device_count(self) -> int:
        """The number of GPUs."""
        return self._session.num_devices

    def hazards(self) -> tuple[Hazard, ...]:
        """The hazards found so far, in this process and in child processes that have ended."""
        return self._session.look().hazards

    def take_hazards(self) -> tuple[Hazard, ...]:
        """The same, and forget them: for a test that expects them."""
        taken = self._session.take()
        self._session.put_back(replace(taken, findings=[]))
        return taken.hazards
