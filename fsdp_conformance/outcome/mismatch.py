"""
Ranks that called different collectives and wait for each other forever, found in the trace that each left.

A backend between processes does not compare what its ranks call: they hang, or misread each other's bytes.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass

from fsdp_conformance.outcome.records import RankExit

#: `#14 issued all_gather 29184B float32 SUM [0,1] at unit.py:212 in unshard (forward, step 0)`
_LINE = re.compile(
    r"#(?P<seq>\d+) (?P<state>issued|closed) (?P<call>[a-z_]+(?: \d+B \S+)?(?: [A-Z]+)?) (?P<group>\[[^\]]*\])"
    r"(?: at (?P<site>.*?))?(?: \([^)]*\))?$"
)


@dataclass(frozen=True, slots=True)
class _Open:
    """A collective that has not returned, or (`is_last`) that returned and was the rank's last."""

    rank: int
    seq: str
    call: str
    site: str
    is_last: bool

    def __str__(self) -> str:
        return f"rank {self.rank} called {self.call}" + (f" at {self.site}" if self.site else "")


def differing_calls(exits: Iterable[RankExit]) -> str:
    """Which ranks of one group wait in different collectives, with the lines that called them; empty if none do."""
    by_group: dict[str, list[_Open]] = {}
    for end in exits:
        for group, call in _first_open(end).items():
            by_group.setdefault(group, []).append(call)
    for group, waiting in by_group.items():
        other = next((one for one in waiting if _differs(one, waiting[0])), None)
        if other is not None:
            return f"the ranks of group {group} called different collectives: {waiting[0]}, {other}"
    return ""


def _differs(one: _Open, other: _Open) -> bool:
    # A collective that returned may be one that the other rank called too, under another number.
    return one.call != other.call and (not (one.is_last or other.is_last) or one.seq == other.seq)


def _first_open(end: RankExit) -> dict[str, _Open]:
    """
    By group, the first collective of a rank that has not returned.

    If all have, the last of all: a collective that passes its deadline returns as well.
    """
    calls: dict[str, _Open] = {}
    matches = [match for line in end.last_collectives if (match := _LINE.match(line.strip())) is not None]
    for match in matches:
        if match["state"] == "issued":
            calls.setdefault(match["group"], _open(end.rank, match, is_last=False))
    if matches and not calls:
        calls[matches[-1]["group"]] = _open(end.rank, matches[-1], is_last=True)
    return calls


def _open(rank: int, match: re.Match[str], *, is_last: bool) -> _Open:
    return _Open(rank, match["seq"], match["call"], match["site"] or "", is_last)
