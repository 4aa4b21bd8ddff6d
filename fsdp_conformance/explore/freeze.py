"""
Extend the pair profile until every possible pair of values is in one of its rows, or make all rows again:

    python -m fsdp_conformance.explore.freeze
    python -m fsdp_conformance.explore.freeze --from-scratch

Extending keeps the ids, but the number of rows only grows. Made from scratch, between two releases, there are fewer,
and most have two ranks, because a row with four takes three times as long.

On axes that a row was frozen with, its values stay. On axes that were added since, it gets the values that cover most
of what is left, as in the horizontal growth of IPOG (Lei et al., 2007). Then rows are appended for the rest: annealed
ones first, and greedy ones for the few pairs that these miss. A row is taken only if its references can judge it: on a
row that ought to be exact, every order of adding gives the same bits, and elsewhere no bound is so wide that a fault
could hide in it.
"""

from __future__ import annotations

import argparse
import random
import sys
from collections.abc import Iterable, Iterator, Sequence

import torch

from fsdp_conformance.errors import NotExact
from fsdp_conformance.explore.annealing import annealed
from fsdp_conformance.explore.references import judgeable, too_wide
from fsdp_conformance.scenarios import rows
from fsdp_conformance.scenarios.axes import SPACE
from fsdp_conformance.scenarios.covering import Coverage, best_row, covering
from fsdp_conformance.scenarios.scenario import Scenario
from fsdp_conformance.scenarios.space import Choice

#: By number of ranks, how many rows there are to begin with, if all are made again. Rows for the few pairs that these
#: miss are appended. Some sharding is possible with four ranks only, and has to meet every value of the other axes.
ROWS = {"1": 12, "2": 46, "3": 12, "4": 24}

#: How many annealed rows are appended: this part of what a greedy search needs.
APPENDED = 2 / 3

#: How long the search for them is, about five minutes, and which of a few searches missed the fewest pairs.
MOVES, SEED = 400_000, 1


def why_unjudgeable(scenario: Scenario) -> str | None:
    """Why the references of a scenario cannot judge an engine; None if they can."""
    try:
        _, prepared = judgeable(scenario)
    except NotExact as error:
        return str(error)
    return too_wide(prepared)


def extended(coverage: Coverage, frozen: Iterable[Scenario]) -> Iterator[Scenario]:
    """
    The frozen rows, extended by values on new axes. Each is counted as covered before the next one is extended.

    If none of the rows that were tried can be judged, the new axes have plain values.
    """
    random_ = random.Random(0)
    for row in frozen:

        def accepts(choice: dict[str, str], salt: int = row.salt) -> bool:
            return why_unjudgeable(Scenario.of(choice, salt=salt)) is None

        known = {axis: row.choice[axis] for axis in rows.axes()}
        choice = best_row(coverage, random_, start=known, accepts=accepts) or row.choice
        coverage.add(choice)
        yield Scenario.of(choice, salt=row.salt)


def from_scratch(coverage: Coverage) -> Iterator[Scenario]:
    """Rows with nearly all pairs, as far as they can be judged. Each is counted as covered when the next one comes."""
    yield from _judged(coverage, [{"ranks": ranks} for ranks, number in ROWS.items() for _ in range(number)], ())


def appended(coverage: Coverage, frozen: Sequence[Scenario]) -> Iterator[Scenario]:
    """The same, beside frozen rows: with the numbers of ranks of the greedy rows that add most."""
    choices = [row.choice for row in frozen]
    greedy = list(covering(Coverage(SPACE, rows=choices)))
    starts = [{"ranks": choice["ranks"]} for choice in greedy[: round(APPENDED * len(greedy))]]
    yield from _judged(coverage, starts, choices)


def _judged(coverage: Coverage, starts: Sequence[Choice], frozen: Sequence[Choice]) -> Iterator[Scenario]:
    for choice in annealed(SPACE, [*frozen, *starts], moves=MOVES, seed=SEED)[len(frozen) :]:
        if why_unjudgeable(Scenario.of(choice)) is None:
            coverage.add(choice)
            yield Scenario.of(choice)


def main(words: list[str]) -> int:
    """Write the rows. Returns 0, or 1 if pairs are left that no row can have."""
    torch.set_num_threads(1)
    parser = argparse.ArgumentParser(prog="python -m fsdp_conformance.explore.freeze")
    parser.add_argument("--from-scratch", action="store_true", help="make all rows again")
    again = parser.parse_args(words).from_scratch
    before = () if again else rows.pairs()
    coverage = Coverage(SPACE, rows=[{axis: row.choice[axis] for axis in rows.axes()} for row in before])
    frozen = list(before)

    def note(row: Scenario) -> None:
        frozen.append(row)
        print(f"row {len(frozen)}: {coverage.left} of {coverage.possible} pairs left", flush=True)

    if again or set(rows.axes()) != set(SPACE.by_name):
        frozen.clear()
        for row in from_scratch(coverage) if again else extended(coverage, before):
            note(row)
    for row in () if again else appended(coverage, tuple(frozen)):
        note(row)
    for choice in covering(coverage, accepts=lambda choice: why_unjudgeable(Scenario.of(choice)) is None):
        note(Scenario.of(choice))
    # Numbers that judge the whole row well, so that a run need not look for them.
    frozen = [Scenario.of(row.choice, salt=judgeable(row)[0].model.salt) for row in frozen]
    rows.FILE.write_text(rows.to_text(frozen), encoding="utf-8")
    print(f"{rows.FILE}: {len(frozen)} rows, {len(frozen) - len(before)} of them new; {coverage.left} pairs in none")
    return 1 if coverage.left else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
