"""
Extend the pair profile until every possible pair of values is in one of its rows:

    python -m fsdp_conformance.explore.freeze

On axes that a row was frozen with, its values stay. On axes that were added since, it gets the values that cover most
of what is left, as in the horizontal growth of IPOG (Lei et al., 2007). Then rows are appended for the rest. A row is
taken only if its references can judge it: on a row that ought to be exact, every order of adding gives the same bits,
and elsewhere no bound is so wide that a fault could hide in it.
"""

from __future__ import annotations

import random
import sys
from collections.abc import Iterable, Iterator

import torch

from fsdp_conformance.errors import NotExact
from fsdp_conformance.explore.references import judgeable, too_wide
from fsdp_conformance.scenarios import rows
from fsdp_conformance.scenarios.axes import SPACE
from fsdp_conformance.scenarios.covering import Coverage, best_row, covering
from fsdp_conformance.scenarios.scenario import Scenario


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


def main() -> int:
    """Write the rows. Returns 0, or 1 if pairs are left that no row can have."""
    torch.set_num_threads(1)
    before = rows.pairs()
    known = [{axis: row.choice[axis] for axis in rows.axes()} for row in before]
    coverage = Coverage(SPACE, rows=known)
    frozen = list(before)
    if set(rows.axes()) != set(SPACE.by_name):
        frozen = []
        for row in extended(coverage, before):
            frozen.append(row)
            print(f"row {len(frozen)} extended: {coverage.left} of {coverage.possible} pairs left", flush=True)
    for choice in covering(coverage, accepts=lambda choice: why_unjudgeable(Scenario.of(choice)) is None):
        frozen.append(Scenario.of(choice))
        print(f"row {len(frozen)}: {coverage.left} of {coverage.possible} pairs left", flush=True)
    # Numbers that judge the whole row well, so that a run need not look for them.
    frozen = [Scenario.of(row.choice, salt=judgeable(row)[0].model.salt) for row in frozen]
    rows.FILE.write_text(rows.to_text(frozen), encoding="utf-8")
    print(f"{rows.FILE}: {len(frozen)} rows, {len(frozen) - len(before)} of them new; {coverage.left} pairs in none")
    return 1 if coverage.left else 0


if __name__ == "__main__":
    sys.exit(main())
