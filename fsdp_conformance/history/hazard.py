"""Two accesses to the same memory that nothing orders, as seen by the simulated accelerator's checker."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum


class HazardKind(StrEnum):
    """How the two accesses conflict."""

    READ_AFTER_WRITE = "read_after_write"
    WRITE_AFTER_READ = "write_after_read"
    WRITE_AFTER_WRITE = "write_after_write"
    REUSE_IN_FLIGHT = "reuse_in_flight"
    """The memory was freed and allocated again while its previous tenant was still in use."""
    HOST_WRITE_IN_FLIGHT = "host_write_in_flight"
    """The host wrote into pinned memory that a copy was still using."""
    HOST_READ_IN_FLIGHT = "host_read_in_flight"
    """The host read pinned memory before the copy into it was done."""
    UNINITIALIZED_READ = "uninitialized_read"
    """A value that nothing has written reached a collective, the host or a branch."""


@dataclass(frozen=True, kw_only=True, slots=True)
class HazardRecord:
    """One race: `then` comes first in the program, and `now` does not wait for it, or uses what it did not write."""

    kind: HazardKind
    then_op: str
    then_label: str
    """The phase of the training loop, or the unit, that issued it; "" if unknown."""
    now_op: str
    now_label: str
    sentence: str
    """The accesses and the missing wait, in one line."""
    text: str
    """The whole argument in several lines, with both stacks."""
    count: int = 1
    """How often the race was seen."""
