"""
Ranks that called different collectives and wait for each other forever, found in the trace that each left.

A backend between processes does not compare what its ranks call: they hang, or misread each other's bytes.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
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


#: Operations of which every rank of a group must pass as many bytes as the others.
_SAME_BYTES = frozenset({"all_reduce", "broadcast", "reduce"})
#: Operations that are one thing on one rank and another on its peer.
_PAIRED = frozenset({"send", "recv"})


def differing_calls(exits: Iterable[RankExit]) -> str:
    """
    Which ranks of one group called different collectives, with the lines that called them; empty if none did.

    The first calls of the same number that differ, also if the backend has paired them: two of equal size and different
    type or reduction return, and the ranks hang in a later one. Where ranks use several groups, their numbers say
    little: then the calls that have not returned.
    """
    exits = list(exits)
    return _first_difference(exits) or _waiting_apart(exits)


def _first_difference(exits: Sequence[RankExit]) -> str:
    by_rank = {end.rank: {match["seq"]: match for match in _matches(end)} for end in exits}
    groups = {match["group"] for calls in by_rank.values() for match in calls.values()}
    if len(groups) != 1:
        return ""
    (group,) = groups
    shared = set.intersection(*(set(calls) for calls in by_rank.values()))
    for seq in sorted(shared, key=int):
        ranks = list(by_rank)
        kinds = {rank: _kind(by_rank[rank][seq]["call"]) for rank in ranks}
        other = next((rank for rank in ranks if kinds[rank] != kinds[ranks[0]]), None)
        if other is not None:
            calls = ", ".join(str(_open(rank, by_rank[rank][seq], is_last=False)) for rank in (ranks[0], other))
            return f"call {seq} of group {group} differs between ranks: {calls}"
    return ""


def _kind(call: str) -> tuple[str, ...]:
    """The part of a call that must be equal on all ranks of its group."""
    op, *figures = call.split()
    if op in _PAIRED:
        return ()
    if op in _SAME_BYTES or not figures:
        return op, *figures
    return op, *figures[1:]


def _waiting_apart(exits: Sequence[RankExit]) -> str:
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
    return _kind(one.call) != _kind(other.call) and (not (one.is_last or other.is_last) or one.seq == other.seq)


def _first_open(end: RankExit) -> dict[str, _Open]:
    """
    By group, the first collective of a rank that has not returned.

    If all have, the last of all: a collective that passes its deadline returns as well.
    """
    calls: dict[str, _Open] = {}
    matches = _matches(end)
    for match in matches:
        if match["state"] == "issued":
            calls.setdefault(match["group"], _open(end.rank, match, is_last=False))
    if matches and not calls:
        calls[matches[-1]["group"]] = _open(end.rank, matches[-1], is_last=True)
    return calls


def _matches(end: RankExit) -> list[re.Match[str]]:
    return [match for line in end.last_collectives if (match := _LINE.match(line.strip())) is not None]


def _open(rank: int, match: re.Match[str], *, is_last: bool) -> _Open:
    return _Open(rank, match["seq"], match["call"], match["site"] or "", is_last)
