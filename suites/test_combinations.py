"""
0. Combinations: every possible pair of the values on which trainings differ, in as few trainings as that takes.

Each row is a scenario with many features at once, and everything that can be judged is judged in it. An engine that
does not declare some of them gets the row without these.
"""

from __future__ import annotations

from fsdp_conformance.cases.declaration import conformance_case
from fsdp_conformance.explore.case import REQUIREMENTS, ScenarioCase
from fsdp_conformance.scenarios import rows

#: Row to known-wrong engines that fail it for the right reason. A row is not there for one defect, and most known-wrong
#: engines fail many of them; these show that rows see anything at all.
_KILLS = {
    1: ("rounded-parameters", "reference-damages-gathered-parameters"),
    58: ("sum-instead-of-mean", "reference-sums-gradients", "loses-a-row-of-the-second-micro-batch"),
}


class Pairs(ScenarioCase):
    """One row of the pair profile each."""

    @conformance_case(
        *REQUIREMENTS,
        chapter="0",
        axes={"row": range(1, len(rows.pairs()) + 1)},
        world_size=lambda values: rows.pairs()[values["row"] - 1].world_size,
        kills=lambda values: _KILLS.get(values["row"], ()),
    )
    def test_pairs(self, row: int) -> None:
        """A training with many features at once is at parity with unsharded training, or they are refused together."""
        mine = rows.for_engine(row, self.here.declared, self.description.avoids)
        self.check_scenario(mine.scenario)
        # The engine avoids them: what else the row has is right, but the row as a whole has not been judged.
        self.report.unobserved += mine.without
