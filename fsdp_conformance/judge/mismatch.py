"""
Ranks that called different collectives and wait for each other for ever, from the trace that each has left.

A backend between processes does not compare what its ranks call: they hang, or exchange bytes that mean something else.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass

from fsdp_conformance.outcome import RankExit

#: `#14 issued all_gather 29184B float32 SUM [0,1] at unit.py:212 in unshard (forward, step 0)`
_LINE = re.compile(
    r"#\d+ issued (?P<call>[a-z_]+(?: \d+B \S+)?(?: [A-Z]+)?) (?P<group>\[[^\]]*\])"
    r"(?: at (?P<site>.*?))?(?: \([^)]*\))?$"
)


@dataclass(frozen=True, slots=True)
class _Open:
    """A collective that has not come back."""

    rank: int
    call: str
    site: str

    def __str__(self) -> str:
        return f"rank {self.rank} called {self.call}" + (f" at {self.site}" if self.site else "")


def differing_calls(exits: Iterable[RankExit]) -> str:
    """Which ranks of one group wait in different collectives, with the lines of their calls; empty if none do."""
    by_group: dict[str, list[_Open]] = {}
    for end in exits:
        for group, found in _first_open(end).items():
            by_group.setdefault(group, []).append(found)
    for group, waiting in by_group.items():
        other = next((one for one in waiting if one.call != waiting[0].call), None)
        if other is not None:
            return f"the ranks of group {group} called different collectives: {waiting[0]}, {other}"
    return ""


def _first_open(end: RankExit) -> dict[str, _Open]:
    """By group, the first collective of a rank that has not come back."""
    found: dict[str, _Open] = {}
    for line in end.last_collectives:
        match = _LINE.match(line.strip())
        if match is not None:
            found.setdefault(match["group"], _Open(end.rank, match["call"], match["site"] or ""))
    return found
