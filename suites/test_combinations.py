"""
0. Combinations: every possible pair of the values on which trainings differ, in as few trainings as that takes.

Each row is a scenario with many features at once, and everything that can be judged is judged in it. An engine that
does not declare some of them gets the row without these.
"""

from __future__ import annotations

from fsdp_conformance.cases.declaration import conformance_case
from fsdp_conformance.explore.case import REQUIREMENTS, ScenarioCase
from fsdp_conformance.run_settings import RunOrder
from fsdp_conformance.scenarios import rows
from fsdp_conformance.scenarios.axes import PROCESSES_ALONE
from fsdp_conformance.scenarios.scenario import Scenario

#: Row to known-wrong engines that fail it for the right reason. A row is not there for one defect, and most known-wrong
#: engines fail many of them; these show that rows see anything at all.
_KILLS = {
    1: ("rounded-parameters", "reference-damages-gathered-parameters"),
    16: ("sum-instead-of-mean", "reference-sums-gradients", "loses-a-row-of-the-second-micro-batch"),
    51: ("reference-updates-between-calls",),
}


class Pairs(ScenarioCase):
    """One row of the pair profile each."""

    @property
    def row(self) -> tuple[Scenario, RunOrder]:
        """In the controller: the training of the case, and the order that its ranks got, to shrink it if it fails."""
        number = dict(self.case.axes)["row"]
        return self._engine_row(number, self.description.declared(self.order.device)).scenario, self.order

    def _engine_row(self, number: int, declared: frozenset[str]) -> rows.EngineRow:
        if self.order.settings.ranks == "simulated":
            declared -= PROCESSES_ALONE
        return rows.for_engine(number, declared, self.description.avoids)

    @conformance_case(
        *REQUIREMENTS,
        chapter="0",
        axes={"row": range(1, len(rows.pairs()) + 1)},
        world_size=lambda values: rows.pairs()[values["row"] - 1].world_size,
        kills=lambda values: _KILLS.get(values["row"], ()),
    )
    def test_pairs(self, row: int) -> None:
        """A training with many features at once is at parity with unsharded training, or they are refused together."""
        mine = self._engine_row(row, self.here.declared)
        self.check_scenario(mine.scenario)
        # The engine avoids them: what else the row has is right, but the row as a whole has not been judged.
        self.report.unobserved += mine.without
