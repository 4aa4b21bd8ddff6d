"""
Whose code a rank runs, and whose time passes: that of the code under test, or the suite's own.

A rank tells the controller when it changes between the two. While the suite works, the deadlines of the code under test
stand still, and the deadline of the suite's own work runs: an implementation is never accused of a hang because a
comparison, a reference or an analysis took long.

    with context.working(Part.SUITE):    in a rank: what follows is the suite's own work
    Clock                                in the controller: how much time has passed for whom

Standard library only.
"""

from __future__ import annotations

from collections.abc import Collection
from enum import StrEnum


class Part(StrEnum):
    """Whose code a rank runs."""

    ENGINE = "engine"
    """The code under test: an implementation, an adapter, or the body of a plain test."""
    SUITE = "suite"
    """The suite's own work, on this rank alone."""
    MEETING = "meeting"
    """The suite's own work once it has issued a collective: the rank may be waiting for its peers."""


def owner_of_time(parts: Collection[Part]) -> Part:
    """
    Whose time passes, ENGINE or SUITE, while the ranks that have not reported run these parts.

    Ranks wait for the slowest. One that works for the suite on its own keeps the others waiting, whatever they do. One
    that meets its peers in a collective of the suite may itself be waiting for a rank that is in the code under test.
    """
    if Part.SUITE in parts:
        return Part.SUITE
    return Part.SUITE if Part.MEETING in parts and Part.ENGINE not in parts else Part.ENGINE


class Clock:
    """The seconds that have passed for the code under test and for the suite, of one case."""

    def __init__(self, now: float) -> None:
        self._now = now
        self._seconds = {Part.ENGINE: 0.0, Part.SUITE: 0.0}

    def advance(self, now: float, parts: Collection[Part]) -> None:
        """Attribute the time since the last call, in which the ranks that had not reported ran `parts`."""
        if now <= self._now:
            return
        self._seconds[owner_of_time(parts)] += now - self._now
        self._now = now

    @property
    def engine_s(self) -> float:
        """Seconds of the code under test."""
        return self._seconds[Part.ENGINE]

    @property
    def suite_s(self) -> float:
        """Seconds of the suite's own work."""
        return self._seconds[Part.SUITE]
