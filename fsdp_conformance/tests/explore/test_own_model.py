"""Exploring with the user's own model: only what the model has is drawn, failures are shrunk, and rights pass."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from fsdp_conformance import codec
from fsdp_conformance.adapters import registry
from fsdp_conformance.capability import CAPABILITIES
from fsdp_conformance.contract.gate import empty_record
from fsdp_conformance.explore.building import example_of
from fsdp_conformance.explore.case import case_for
from fsdp_conformance.explore.exploration import Budget, Explorer
from fsdp_conformance.explore.own_model import OwnModel, left_out
from fsdp_conformance.explore.pool import Outcome, WarmWorker
from fsdp_conformance.explore.saved import save
from fsdp_conformance.fixtures import llama
from fsdp_conformance.plan import Plan
from fsdp_conformance.run_settings import RunOrder, RunSettings
from fsdp_conformance.scenarios.axes import SPACE
from fsdp_conformance.scenarios.scenario import Scenario, scenario_from_json
from fsdp_conformance.verdict import Verdict
from fsdp_conformance.workload.definition import Workload
from fsdp_conformance.workload.events import Action

_HERE = f"{__name__}:"
_LLAMA = f"{_HERE}own_llama"
ALL = frozenset(CAPABILITIES)


def own_llama() -> Workload:
    """As a user names it."""
    return llama.llama()


def own_root() -> Workload:
    """A model without units."""
    return replace(llama.llama(), units=())


def _never_fails(scenario: Scenario) -> Outcome:
    record = empty_record(case_for(scenario), RunSettings(), "cpu")
    record.verdict = Verdict.PASS
    return Outcome(record=record)


class _Engine:
    def __init__(self) -> None:
        self.ran: list[Scenario] = []

    def run(self, scenario: Scenario) -> Outcome:
        self.ran.append(scenario)
        return _never_fails(scenario)


def test_the_model_stays_as_it_is() -> None:
    """Nothing of the model is drawn; what its workload lacks is left out with its reason."""
    gone = left_out(OwnModel(_LLAMA), (2,))

    of_model = [(axis.name, value.name) for axis in SPACE.axes if axis.area == "model" for value in axis.values[1:]]
    assert set(of_model) < gone.keys()
    assert gone["exception", "in forward"] == "the workload has no fuse, which would make its model raise"
    assert gone["derivatives", "of inputs before a step"] == "the first input is not a floating-point tensor"
    assert gone["built", "on meta"] == "the workload has no build_on_meta"
    assert ("sharding", "hybrid") not in gone
    assert ("checkpoints", "loaded later") not in gone
    assert not any(value == SPACE.by_name[axis].plain for axis, value in gone)


def test_only_what_is_left_is_drawn() -> None:
    """Every scenario has the user's model, values of the limited space alone, and can be built."""
    engine = _Engine()
    space = SPACE.without(left_out(OwnModel(_LLAMA), (2, 3, 4)))
    Explorer(engine, ALL, Budget(max_examples=25), space=space, workload=_LLAMA, world_sizes=(2, 3, 4)).explore()

    assert len(set(engine.ran)) == 25
    assert {scenario.workload for scenario in engine.ran} == {_LLAMA}
    assert all(item in space.value_of for scenario in engine.ran for item in scenario.values)
    for scenario in engine.ran:
        example = example_of(scenario)
        assert set(example.plan.units) <= {"blocks.0", "blocks.1", "blocks.0+blocks.1"}
        assert example.workload().name == "llama"
        assert scenario_from_json(scenario.to_json()) == scenario


def test_its_numbers_are_those_of_the_model() -> None:
    """Clipping strikes, a new rate is lower than the user's, and written are parameters that there are."""
    choice = {"clipping": "2-norm", "learning rate": "new", "written by the user": "gradients in place"}
    example = example_of(Scenario.of(choice, workload=_LLAMA))

    measured = OwnModel(_LLAMA).measured
    assert example.regime.max_norm is not None
    assert measured.norms[2.0] / 4 <= example.regime.max_norm <= measured.norms[2.0] / 2
    rates = [event.value for event in example.regime.events if event.action is Action.LEARNING_RATE]
    assert rates == [0.25, 0.0625]
    written = {name for event in example.regime.events for name in event.names}
    assert written <= example.model.shapes().keys()


def test_units_that_a_new_engine_leaves_are_not_gathered_by_hand() -> None:
    """Where training is resumed in other units, events name those that both engines have."""
    choice = {"resumed": "in other units", "gathered by hand": "before a forward"}
    example = example_of(Scenario.of(choice, workload=_LLAMA))

    assert example.resumed is not None
    assert example.resumed.units == ("blocks.1",)
    assert {event.names for event in example.regime.events} == {("blocks.1",)}


def test_a_model_without_units_has_no_events_of_units() -> None:
    """Values that need a unit are left out, and so are those that need such a value."""
    gone = left_out(OwnModel(f"{_HERE}own_root"), (2,))

    space = SPACE.without(gone)
    assert "gathered by hand" not in space.by_name
    assert ("accumulation", "deferred in one unit") not in space.value_of
    assert example_of(Scenario.of({"accumulation": "two reduced"}, workload=f"{_HERE}own_root")).plan == Plan(
        micro_batches=2
    )


def test_the_saved_file_names_it(tmp_path: Path) -> None:
    """A saved failure trains the user's model, too."""
    scenario = Scenario.of({"accumulation": "two reduced"}, workload="model.py:mine")
    path = save(tmp_path, scenario, implementation="mine.py:Mine", signature="R003 gradient parity")

    assert '"workload": "model.py:mine"' in path.read_text(encoding="utf-8")


@pytest.mark.nightly
@pytest.mark.slow
@pytest.mark.parametrize(
    ("implementation", "requirement"), [("torch-fsdp2", ""), ("mutant:sum-instead-of-mean", "R003")]
)
def test_an_engine_is_judged_on_it(implementation: str, requirement: str) -> None:
    """A right engine passes with many values at once, a wrong one fails for its defect, with the model's parameters."""
    choice = {"accumulation": "two reduced", "optimizer": "adam, foreach", "checkpoints": "loaded later", "ranks": "3"}
    settings = RunSettings(implementation=implementation, ranks="simulated")
    description = registry.describe(implementation)
    with WarmWorker(RunOrder(settings=settings, description=codec.plain(description), device="cpu")) as worker:
        outcome = worker.run(Scenario.of(choice, workload=_LLAMA))

    assert not outcome.rejected
    assert outcome.record is not None
    assert {finding.requirement for finding in outcome.record.findings} >= ({requirement} - {""})
    assert outcome.failed is bool(requirement)
    assert outcome.record.comparisons > 100
