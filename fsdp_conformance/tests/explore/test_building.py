"""Each value of each axis means something: the example of a scenario with it differs, can be built, and trains."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from fsdp_conformance.driver.events import EVENT_FLAGS
from fsdp_conformance.explore.building import example_of
from fsdp_conformance.explore.example import Example, asks
from fsdp_conformance.fixtures.drawn import DrawnModel
from fsdp_conformance.scenarios import rows
from fsdp_conformance.scenarios.axes import SPACE
from fsdp_conformance.scenarios.covering import Coverage
from fsdp_conformance.scenarios.scenario import Extent, Scenario
from fsdp_conformance.workload.definition import BatchKey, Regime
from fsdp_conformance.workload.events import Action, Event, Moment

PLAIN = example_of(Scenario())
SPECIAL = [(axis, name) for axis, name in SPACE.value_of if name != SPACE.by_name[axis].plain]

#: Every engine is asked for a CPU, or another device.
DEVICE = {"cpu_compute"}

each_value = pytest.mark.parametrize(("axis", "name"), SPECIAL, ids=[f"{axis}: {name}" for axis, name in SPECIAL])
each_row = pytest.mark.parametrize("row", rows.pairs(), ids=range(1, len(rows.pairs()) + 1))


def _needs_of(example: Example) -> frozenset[str]:
    """The flags that an engine must declare to be asked for an example, from its plan and its model."""
    return example.plan.capabilities() | asks(example)


def _choice(axis: str, name: str) -> dict[str, str]:
    completed = SPACE.completed({axis: name})
    assert completed is not None
    return completed


def _trained(example: Example) -> list[torch.Tensor | None]:
    """The gradients of one step of one rank, without an engine."""
    workload = example.workload()
    model = workload.build(0)
    batch = workload.batch(BatchKey(step=0, world_size=example.world_size))
    workload.loss(model(*batch.args, **batch.kwargs), batch).backward()
    return [param.grad for param in model.parameters()]


@each_value
def test_no_value_is_inert(axis: str, name: str) -> None:
    """The example differs from the plainest one, and from the same one without the value."""
    choice = _choice(axis, name)
    example = example_of(Scenario.of(choice))
    without = SPACE.without_orphans({**choice, axis: SPACE.by_name[axis].plain})

    assert example != PLAIN
    assert example != example_of(Scenario.of(without))
    assert example == example_of(Scenario.of({axis: name, **SPACE.special(choice)}))


@each_value
def test_every_value_can_be_built_and_trained(axis: str, name: str) -> None:
    """The model has the parameters that are predicted, and some of them get gradients."""
    example = example_of(Scenario.of(_choice(axis, name)))
    model = example.workload().build(0)

    assert {key: tuple(param.shape) for key, param in model.named_parameters()} == example.model.shapes()
    assert any(grad is not None for grad in _trained(example))
    assert example.regime.steps == Extent().steps
    assert example.plan.micro_batches == example.regime.micro_batches


@each_value
def test_a_value_needs_what_its_example_asks_for(axis: str, name: str) -> None:
    """Otherwise an engine would be asked for what it does not declare, or not be asked for what it does."""
    choice = _choice(axis, name)
    example = example_of(Scenario.of(choice))
    needs = SPACE.needs(choice)
    events = {EVENT_FLAGS[event.action] for event in example.regime.events if event.action in EVENT_FLAGS}

    assert _needs_of(example) <= needs | DEVICE
    assert events <= needs


@pytest.mark.nightly
@pytest.mark.slow
def test_two_values_need_no_more_than_each_of_them() -> None:
    """A capability that only two values together need would be asked of engines that do not declare it."""
    undeclared = {}
    for pair in Coverage(SPACE).combinations_left():
        choice = SPACE.completed(pair)
        assert choice is not None
        more = _needs_of(example_of(Scenario.of(choice))) - SPACE.needs(choice) - DEVICE
        if more:
            undeclared[tuple(pair.items())] = more

    assert undeclared == {}


@each_row
def test_a_row_asks_for_what_its_values_need(row: Scenario) -> None:
    """The same where many values meet, also in a row without those that are not declared."""
    for declared in (row.needs, frozenset[str](), frozenset(sorted(row.needs)[::2])):
        adapted = SPACE.adapted(row.choice, declared)
        assert _needs_of(example_of(Scenario.of(adapted, salt=row.salt))) <= SPACE.needs(adapted) | DEVICE


def _names(example: Example) -> set[str]:
    """The parameters and units that a plan and a schedule name."""
    regime, plan = example.regime, example.plan
    frozen = {name for _, names in regime.frozen_at for name in names}
    events = {name for event in regime.events for name in event.names}
    return frozen | events | {unit for unit, _ in plan.unit_dtypes} | set(plan.deferred_units)


@pytest.mark.daily(40)
@each_row
def test_schedules_name_what_the_model_has(row: Scenario) -> None:
    """Whatever is made plain: a name that is missing would end the references."""
    for choice in (row.choice, *SPACE.simpler(row.choice)):
        example = example_of(Scenario.of(choice, salt=row.salt))
        assert isinstance(example.model, DrawnModel)
        shapes = example.model.shapes()
        modules = {name for name, _ in example.model.walk()} | {"first", "head"}
        assert _names(example) <= {*shapes, *example.plan.units}
        assert {part for unit in example.plan.units for part in unit.split("+")} <= modules
        assert set(example.model.frozen) <= {*shapes, *modules}
        assert {name for pair in example.model.ties for name in pair[1:]} <= set(shapes)


@each_row
def test_nothing_is_written_while_a_forward_waits(row: Scenario) -> None:
    """Units may still be gathered then, and no contract says which of the two copies a write reaches."""
    waits = False
    for event in _written_and_passed(example_of(row).regime):
        if event.action is Action.FORWARD:
            waits = event.moment is not Moment.FORWARD
        elif event.action is Action.RAISE:
            # It stands for the backward of a step.
            waits = False
        else:
            assert not waits, event.describe()


def _written_and_passed(regime: Regime) -> list[Event]:
    """Forwards without a backward, backwards, as the exceptions that could be in them, and writes, in order."""
    events = []
    for step in range(regime.steps):
        for moment in Moment:
            if moment is Moment.BACKWARD:
                events.append(Event(action=Action.RAISE, moment=Moment.BACKWARD, step=step))
            events += [
                event
                for event in regime.at(moment, step)
                if event.action in (Action.FORWARD, Action.WRITE, Action.ASSIGN)
            ]
    return events


def test_a_salt_changes_numbers_alone() -> None:
    """The same plan and schedule, with other weights and batches."""
    other = example_of(Scenario(salt=1))

    assert other != PLAIN
    assert replace(other, model=PLAIN.model) == PLAIN
    assert other.model.shapes() == PLAIN.model.shapes()
    assert [grad is None for grad in _trained(other)] == [grad is None for grad in _trained(PLAIN)]
    assert not all(
        torch.equal(one, another)
        for one, another in zip(_trained(other), _trained(PLAIN), strict=True)
        if one is not None and another is not None
    )


def test_the_plainest_example_asks_for_nothing() -> None:
    """Any engine can train it."""
    assert _needs_of(PLAIN) == DEVICE
    assert PLAIN.regime.events == ()


@pytest.mark.parametrize(
    ("ranks", "rows_", "even"),
    [
        (ranks, name, even)
        for ranks in ("1", "2", "3", "4")
        for name, even in (("even", True), ("uneven", False), ("fewer than ranks", False))
        if SPACE.why_impossible({"ranks": ranks, "rows": name}) is None
    ],
)
def test_rows_are_divided_as_the_value_says(ranks: str, rows_: str, even: bool) -> None:
    """Even shards, uneven ones, and ranks without any row of some parameter."""
    example = example_of(Scenario.of({"ranks": ranks, "rows": rows_}))
    first = [shape[0] for shape in example.model.shapes().values() if len(shape) == 2]

    assert all(length % int(ranks) == 0 for length in first) is (even or ranks == "1")
    assert any(length < int(ranks) for length in first) is (rows_ == "fewer than ranks")


def test_replicas_and_shard_groups() -> None:
    """The three ways of hybrid sharding differ in their groups."""
    replicas = {
        name: example_of(Scenario.of({"ranks": ranks, "sharding": name})).plan.replicas
        for name, ranks in (("hybrid", "4"), ("hybrid, shards of one", "3"), ("hybrid, one replica", "4"))
    }

    assert replicas == {"hybrid": 2, "hybrid, shards of one": 3, "hybrid, one replica": 1}


def test_an_extent_changes_sizes_and_names_alone() -> None:
    """The parts with a meaning stay where they are, whatever they are called and however much there is around them."""
    extent = Extent(steps=5, blocks=9, wider=2, hidden=7, ranks=6, names=("into", "layers", "out"))
    for row in rows.pairs():
        example = example_of(replace(row, extent=extent))
        shapes = example.model.shapes()

        assert {name.partition(".")[0] for name in shapes} == set(extent.names)
        assert isinstance(example.model, DrawnModel)
        assert len(example.model.blocks) == 9
        assert example.regime.steps == 5
        assert example.world_size == 6
        assert _names(example) <= {*shapes, *example.plan.units}
        plain = example_of(row).model
        assert isinstance(plain, DrawnModel)
        assert example.model.passing == plain.passing
