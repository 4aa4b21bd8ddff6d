"""
Append rows to the pair profile until every possible pair of values is in one of them:

    python -m fsdp_conformance.explore.freeze

Rows that are there stay. A new row is taken only if its references can judge it: on a row that ought to be exact, every
order of adding gives the same bits, and elsewhere no bound is so wide that a fault could hide in it.
"""

from __future__ import annotations

import sys

import torch

from fsdp_conformance.errors import NotExact
from fsdp_conformance.explore.references import judgeable, too_wide
from fsdp_conformance.scenarios import rows
from fsdp_conformance.scenarios.axes import SPACE
from fsdp_conformance.scenarios.covering import Coverage, covering
from fsdp_conformance.scenarios.scenario import Scenario


def why_unjudgeable(scenario: Scenario) -> str | None:
    """Why the references of a scenario cannot judge an engine; None if they can."""
    try:
        _, prepared = judgeable(scenario)
    except NotExact as error:
        return str(error)
    return too_wide(prepared)


def main() -> int:
    """Write the rows. Returns 0, or 1 if pairs are left that no row can have."""
    torch.set_num_threads(1)
    frozen = list(rows.pairs())

    def accepts(choice: dict[str, str]) -> bool:
        return why_unjudgeable(Scenario.of(choice)) is None

    coverage = Coverage(SPACE, rows=[row.choice for row in frozen])
    before = len(frozen)
    for choice in covering(coverage, accepts=accepts):
        frozen.append(Scenario.of(choice))
        print(f"row {len(frozen)}: {coverage.left} of {coverage.possible} pairs left", flush=True)
    rows.FILE.write_text(rows.to_text(frozen), encoding="utf-8")
    print(f"{rows.FILE}: {len(frozen)} rows, {len(frozen) - before} of them new; {coverage.left} pairs in none")
    return 1 if coverage.left else 0


if __name__ == "__main__":
    sys.exit(main())
