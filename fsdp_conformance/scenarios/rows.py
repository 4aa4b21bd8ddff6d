"""
The frozen rows of the pair profile: scenarios that together have every possible pair of values.

A row keeps its id, and its values on the axes that it was frozen with, which the file lists. When axes are added, the
rows first get values on these, and only then rows are appended for the pairs that are left
(`python -m fsdp_conformance.explore.freeze`); until then they have the plain values of the new axes.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from fsdp_conformance.scenarios.axes import SPACE
from fsdp_conformance.scenarios.covering import Coverage
from fsdp_conformance.scenarios.scenario import Scenario

#: How the ids of the rows' cases begin.
ID = "R000/pairs-row"

FILE = Path(__file__).with_name("pairs.json")


@cache
def pairs() -> tuple[Scenario, ...]:
    """The rows, in order; the first is row 1. Raises ConfigError if one of them is no longer possible."""
    return tuple(Scenario.of(line["values"], salt=line["salt"]) for line in _written()["rows"])


@cache
def axes() -> tuple[str, ...]:
    """The axes that the rows were frozen with."""
    return tuple(_written()["axes"])


def _written() -> dict[str, Any]:
    """The content of the file."""
    content: dict[str, Any] = (
        json.loads(FILE.read_text(encoding="utf-8")) if FILE.exists() else {"axes": [], "rows": []}
    )
    return content


def number_of(case: str) -> int | None:
    """The number of the row that a case is, by the case's id; None for any other case."""
    digits = case.removeprefix(ID).partition("-")[0] if case.startswith(ID) else ""
    return int(digits) if digits.isdecimal() else None


@dataclass(frozen=True, slots=True)
class EngineRow:
    """A row as one engine gets it."""

    scenario: Scenario
    without: tuple[str, ...] = ()
    """The combinations that the engine avoids and that the row would have, in words."""


def for_engine(number: int, declared: frozenset[str], avoids: Sequence[Mapping[str, str]] = ()) -> EngineRow:
    """
    A row, by its number from 1, for an engine with these capabilities: what it cannot be asked for is plain.

    Of a combination that the engine avoids, one value becomes plain, but not the number of ranks, which is the case's;
    which one differs from row to row, so that the pairs of each value with others stay covered.
    """
    row = pairs()[number - 1]
    choice, without = without_avoided(SPACE.adapted(row.choice, declared), avoids, number)
    return EngineRow(Scenario.of(choice, salt=row.salt), without)


def without_avoided(
    choice: Mapping[str, str], avoids: Sequence[Mapping[str, str]], number: int
) -> tuple[dict[str, str], tuple[str, ...]]:
    """
    A choice without the combinations that an engine avoids, and in words those that it had.

    One value of each becomes plain, but not the number of ranks; which one depends on `number`.
    """
    left, without = dict(choice), []
    for values in avoids:
        if values.items() <= left.items():
            without.append(" and ".join(f"{axis} {value}" for axis, value in values.items()))
            axes_given = [axis for axis in values if axis != "ranks"]
            given = axes_given[number % len(axes_given)]
            left = SPACE.without_orphans({**left, given: SPACE.by_name[given].plain})
    return left, tuple(without)


def coverage(
    declared: frozenset[str], avoids: Sequence[Mapping[str, str]] = (), rows: Iterable[int] | None = None
) -> Coverage:
    """
    The pairs that there are for an engine, and those that are left after some rows, by number; None: all rows.

    A row counts without the combinations that the engine avoids.
    """
    numbers = range(1, len(pairs()) + 1) if rows is None else rows
    return Coverage(SPACE, declared, rows=[for_engine(n, declared, avoids).scenario.choice for n in numbers])


def to_text(rows: Iterable[Scenario]) -> str:
    """The text of the file, with one row a line, for rows that have a value on every axis of the space."""
    lines = [json.dumps({"salt": row.salt, "values": dict(row.values)}) for row in rows]
    return '{"axes": ' + json.dumps([*SPACE.by_name]) + ',\n"rows": [\n' + ",\n".join(lines) + "\n]}\n"
