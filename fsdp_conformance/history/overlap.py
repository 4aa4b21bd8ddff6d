"""
Work that may run at the same time on a device: collectives and computation, each with what it waits for.

Nothing here has a duration. Two pieces of work may overlap if neither has to wait for the other, which depends on the
program alone; whether they do overlap is a matter of the machine.
"""

from __future__ import annotations

from dataclasses import dataclass, field

Clock = tuple[int, ...]
"""For each stream of the process, by number, how many of its operations are known to have finished; 0 is the host."""


def finished(clock: Clock, stream: int) -> int:
    """How many operations of a stream are known to have finished. Streams beyond the clock are unknown to it."""
    return clock[stream] if stream < len(clock) else 0


@dataclass(frozen=True, kw_only=True, slots=True)
class Operation:
    """An operation of a stream, and what has to finish before it begins."""

    stream: int
    number: int
    """Counted on its stream, from 1."""
    after: Clock
    known_to_host: Clock
    """The operations that the host had waited for when it issued this one."""
    order: int
    """Its place among what the host issued."""
    phase: str
    step: int | None

    def waits_for(self, other: Operation) -> bool:
        """True if the other one is finished when this one begins."""
        return finished(self.after, other.stream) >= other.number


@dataclass(frozen=True, kw_only=True, slots=True)
class Computed(Operation):
    """A kernel in the middle of a unit's computation."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Communicated(Operation):
    """A collective on the device."""

    op: str
    nbytes: int
    """Of the unsharded side."""

    def may_overlap(self, computed: Computed) -> bool:
        """True if neither waits for the other."""
        return not self.waits_for(computed) and not computed.waits_for(self)


@dataclass(kw_only=True, slots=True)
class DeviceWork:
    """The operations that a rank issued, each kind in order."""

    communicated: list[Communicated] = field(default_factory=list)
    computed: list[Computed] = field(default_factory=list)
