"""
0. Combinations: every possible pair of the values on which trainings differ, in as few trainings as that takes.

Each row is a scenario with many features at once, and everything that can be judged is judged in it. An engine that
does not declare some of them gets the row without these. Fresh scenarios are drawn for each run.
"""

from __future__ import annotations

from fsdp_conformance.cases.declaration import conformance_case
from fsdp_conformance.explore.case import REQUIREMENTS, ScenarioCase
from fsdp_conformance.outcome.records import SCENARIO
from fsdp_conformance.run_settings import RunOrder
from fsdp_conformance.scenarios import fresh, rows
from fsdp_conformance.scenarios.axes import PROCESSES_ALONE
from fsdp_conformance.scenarios.scenario import Scenario, scenario_from_json

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
    def trains(self) -> tuple[Scenario, RunOrder]:
        """In the controller: the training of the case, and the order that its ranks got, to shrink it if it fails."""
        number = dict(self.case.axes)["row"]
        return self._engine_row(number, self.description.declared(self.order.device)).scenario, self.order

    def _engine_row(self, number: int, declared: frozenset[str]) -> rows.EngineRow:
        return rows.for_engine(number, _asked_for(self, declared), self.description.avoids)

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


class _Fresh(ScenarioCase):
    """A scenario of this run alone: see `scenarios.fresh`."""

    shares_references = False

    @property
    def trains(self) -> tuple[Scenario, RunOrder] | None:
        """In the controller, after the ranks have ended: the same as for a row; None if no rank has named it."""
        text = self.record.measurements.get(SCENARIO) if self.record is not None else None
        return (scenario_from_json(text), self.order) if isinstance(text, str) else None

    def _check_drawn(self, draw: fresh.Draw) -> None:
        seed, declared = self.order.settings.scenario_seed, _asked_for(self, self.here.declared)
        self.check_scenario(*fresh.candidates(draw, seed, declared, self.description.avoids))


class FreshCombinations(_Fresh):
    """A combination of what the engine declares each, drawn for this run alone."""

    @conformance_case(
        *REQUIREMENTS,
        chapter="0",
        axes={"number": range(1, len(fresh.COMBINED) + 1)},
        world_size=lambda values: fresh.world_size(fresh.COMBINED[values["number"] - 1]),
        kills=("sum-instead-of-mean",),
        # The references of many ranks take a while, also those of candidates that cannot be judged.
        timeout_s=120,
    )
    def test_fresh(self, number: int) -> None:
        """A training that is drawn for this run alone is at parity with unsharded training, or it is refused."""
        self._check_drawn(fresh.COMBINED[number - 1])


class FreshBase(_Fresh):
    """Trainings that every engine must support, drawn for this run alone. Some are larger than all other cases."""

    may_refuse = False

    @conformance_case(
        "R001",
        *(name for name in REQUIREMENTS if name != "R001"),
        chapter="A",
        axes={"number": range(1, len(fresh.BASE) + 1)},
        world_size=lambda values: fresh.world_size(fresh.BASE[values["number"] - 1]),
        kills=lambda values: ("sum-instead-of-mean", *(("rounded-parameters",) if values["number"] == 1 else ())),
        timeout_s=120,
    )
    def test_fresh(self, number: int) -> None:
        """A training of what is mandatory, drawn for this run alone, is at parity with unsharded training."""
        self.has_control = number == 1
        self._check_drawn(fresh.BASE[number - 1])


def _asked_for(case: ScenarioCase, declared: frozenset[str]) -> frozenset[str]:
    """The capabilities that an engine can be asked for in this run."""
    return declared - PROCESSES_ALONE if case.order.settings.ranks == "simulated" else declared
