"""
The pictures on the page: where tensors differ, which collectives ranks issued, how many bytes they held.

Each picture is a table of small marks with a sentence for each, so that it can be read without seeing colours.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Any

from fsdp_conformance.outcome.records import CaseRecord, Finding, RankExit

#: More rows, marks or ranks than these are counted instead of drawn.
MOST_ROWS = 40
MOST_MARKS = 240
MOST_RANKS = 16

#: "#89 closed all_gather 576B float32 [0,1] at checkpointing.py:35 in recomputed (forward, step 1)"
_TRACED = re.compile(r"^#(?P<number>\d+) (?P<state>\w+) (?P<op>\w+) (?P<bytes>\d+)B\b")
#: "backward all_gather 192B float32 [0,1]"
_SCHEDULED = re.compile(r"^(?P<phase>\S+) (?P<op>\w+) (?P<bytes>\d+)B\b")

_DONE = "closed"
_BOUND = ", bound"
_RANK = re.compile(r"^rank \d+$")


@dataclass(frozen=True, slots=True)
class Mark:
    """One small box: a tensor in a step, or a collective."""

    text: str
    """The sentence behind it."""
    kind: str = ""
    """The operation of a collective."""
    share: float = 0.0
    """From 0 to 1: how much of a tensor differs, or how large a collective is next to the largest one."""
    open: bool = False
    """True for a collective that had not ended."""


@dataclass(frozen=True, slots=True)
class Lane:
    """A row of marks with a name; None where there is nothing."""

    name: str
    marks: tuple[Mark | None, ...]


@dataclass(frozen=True, slots=True)
class Strip:
    """Lanes under common headings."""

    columns: tuple[str, ...]
    lanes: tuple[Lane, ...]
    left_out: int = 0
    """Lanes, or marks of a lane, that are not drawn."""


@dataclass(frozen=True, slots=True)
class Level:
    """Bytes at one moment, next to their bound if there is one."""

    moment: str
    held: int
    bound: int | None

    @property
    def scale(self) -> int:
        """The larger of the two; at least 1."""
        return max(self.held, self.bound or 0, 1)

    @property
    def exceeded(self) -> bool:
        """True if more was held than allowed."""
        return self.bound is not None and self.held > self.bound


@dataclass(frozen=True, slots=True)
class Memory:
    """The bytes that one rank of a case held, moment by moment."""

    case: str
    rank: str
    quantity: str
    levels: tuple[Level, ...]

    @property
    def scale(self) -> int:
        """The largest value or bound; at least 1."""
        return max(level.scale for level in self.levels)


def differences(findings: Iterable[Finding]) -> Strip | None:
    """A row for each tensor that differs, a column for each step; None if no finding compares a tensor."""
    cells: dict[tuple[str, int], Finding] = {}
    for finding in findings:
        if finding.fqn is None or finding.step is None or not finding.elements:
            continue
        key = (f"{finding.fqn} · {finding.check}", finding.step)
        if key not in cells or _share(finding) > _share(cells[key]):
            cells[key] = finding
    if not cells:
        return None
    names = list(dict.fromkeys(name for name, _ in cells))
    steps = sorted({step for _, step in cells})
    lanes = [
        Lane(name, tuple(_difference(cells[name, step]) if (name, step) in cells else None for step in steps))
        for name in names[:MOST_ROWS]
    ]
    return Strip(tuple(f"step {step}" for step in steps), tuple(lanes), len(names) - len(lanes))


def _share(finding: Finding) -> float:
    return (finding.differing or 0) / (finding.elements or 1)


def _difference(finding: Finding) -> Mark:
    return Mark(f"{finding.message} [{finding.where()}]", share=_share(finding))


def last_collectives(exits: Sequence[RankExit]) -> Strip | None:
    """A lane for each rank with the collectives before its end; None if no rank has left any."""
    traced = {end.rank: end.last_collectives for end in exits if end.last_collectives}
    if not traced:
        return None
    largest = max((_size(line, _TRACED) for lines in traced.values() for line in lines), default=0)
    lanes = [
        Lane(f"rank {rank}", tuple(_collective(line, _TRACED, largest) for line in traced[rank]))
        for rank in sorted(traced)[:MOST_RANKS]
    ]
    return Strip((), tuple(lanes), len(traced) - len(lanes))


def schedule(lines: Sequence[str]) -> Strip | None:
    """The collectives of a training on rank 0, a lane for each stretch of one phase; None if there are none."""
    if not lines:
        return None
    shown = lines[:MOST_MARKS]
    largest = max(_size(line, _SCHEDULED) for line in shown)
    lanes = [
        Lane(phase, tuple(_collective(line, _SCHEDULED, largest) for line in stretch))
        for phase, stretch in groupby(shown, key=lambda line: line.partition(" ")[0])
    ]
    return Strip((), tuple(lanes), len(lines) - len(shown))


def traced(line: str) -> re.Match[str] | None:
    """The parts of a line of a rank's trace: `number`, `state`, `op`, `bytes`."""
    return _TRACED.match(line)


def scheduled(line: str) -> re.Match[str] | None:
    """The parts of a line of a schedule: `phase`, `op`, `bytes`."""
    return _SCHEDULED.match(line)


def _size(line: str, form: re.Pattern[str]) -> int:
    match = form.match(line)
    return int(match["bytes"]) if match else 0


def _collective(line: str, form: re.Pattern[str], largest: int) -> Mark:
    match = form.match(line)
    if match is None:  # a line of a later version is shown as text
        return Mark(line)
    state = match.groupdict().get("state", _DONE)
    return Mark(line, match["op"], int(match["bytes"]) / max(largest, 1), state != _DONE)


def memory(records: Iterable[CaseRecord]) -> list[Memory]:
    """Measurements in bytes that have a bound; the ones that exceed it come first."""
    measurements = [
        Memory(record.case, rank, quantity, levels)
        for record in records
        for quantity, measured in record.measurements.items()
        if isinstance(measured, dict)
        for rank, figures in _by_rank(measured)
        if (levels := _levels(figures))
    ]
    return sorted(measurements, key=lambda one: (not any(level.exceeded for level in one.levels), one.case, one.rank))


def _by_rank(measured: Mapping[str, Any]) -> list[tuple[str, Mapping[str, Any]]]:
    """The figures of each rank. What is the same on every rank is there once."""
    if measured and all(_RANK.match(name) and isinstance(value, dict) for name, value in measured.items()):
        return list(measured.items())
    return [("every rank", measured)]


def _levels(figures: Mapping[str, Any]) -> tuple[Level, ...]:
    bounded = [name.removesuffix(_BOUND) for name in figures if name.endswith(_BOUND)]
    return tuple(
        Level(name, figures[name], figures[name + _BOUND])
        for name in bounded
        if isinstance(figures.get(name), int) and isinstance(figures[name + _BOUND], int)
    )
