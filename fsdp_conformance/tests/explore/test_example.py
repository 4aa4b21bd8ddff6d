"""An example is the same in every process: its JSON form, what it asks of an engine, and its axes."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest
from hypothesis import HealthCheck, given, settings

from fsdp_conformance.capability import CAPABILITIES
from fsdp_conformance.driver.events import EVENT_FLAGS
from fsdp_conformance.errors import ConfigError
from fsdp_conformance.explore.example import (
    PLAIN,
    UNREACHED_NORM,
    Example,
    asks,
    axes,
    example_from_json,
    features,
    used_blocks,
    uses_all,
)
from fsdp_conformance.explore.simplify import simpler
from fsdp_conformance.explore.strategies import _writes_to_gathered, examples
from fsdp_conformance.fixtures.drawn import DrawnBlock, DrawnModel
from fsdp_conformance.plan import Plan, Sharding
from fsdp_conformance.workload.definition import Regime
from fsdp_conformance.workload.events import Action, Event, Moment, in_order

#: Everything that can be declared.
ALL = frozenset(CAPABILITIES)


def _planned(model: DrawnModel, **rest: object) -> Example:
    return Example(model=model, plan=Plan(units=model.units()), **rest)  # type: ignore[arg-type]


@pytest.mark.slow
@settings(max_examples=80, deadline=None, derandomize=True, suppress_health_check=list(HealthCheck))
@given(examples(ALL))
def test_what_is_drawn_can_be_written_and_built(example: Example) -> None:
    """JSON gives back the same example, and the model has the parameters that `shapes` predicts."""
    assert example_from_json(example.to_json()) == example

    built = {name: tuple(param.shape) for name, param in example.workload().build(0).named_parameters()}

    assert built == example.model.shapes()
    assert set(axes(example)) == set(PLAIN)
    assert asks(example) <= ALL
    assert {name for name, param in example.workload().build(1).named_parameters() if param.requires_grad}
    assert _names(example) <= {*built, *example.plan.units}


@settings(max_examples=40, deadline=None, derandomize=True, suppress_health_check=list(HealthCheck))
@given(examples(ALL, (1,)))
def test_a_schedule_names_what_the_model_has(example: Example) -> None:
    """Also on one rank, which has no peers that use other layers: a name that is missing would end the references."""
    assert _names(example) <= {*example.model.shapes(), *example.plan.units}
    assert "unused_divergent" not in asks(example)


@pytest.mark.parametrize(
    ("forward", "write", "is_kept"),
    [
        ((Moment.STEP, 1), (Moment.STEP, 1), False),
        ((Moment.BACKWARD, 0), (Moment.OPTIMIZER, 0), False),
        ((Moment.END, 0), (Moment.STEP, 1), False),
        ((Moment.STEP, 0), (Moment.STEP, 1), True),
        ((Moment.FORWARD, 0), (Moment.END, 0), True),
        ((Moment.END, 1), (Moment.STEP, 1), True),
    ],
)
def test_writes_while_a_forward_waits_are_left_out(
    forward: tuple[Moment, int], write: tuple[Moment, int], is_kept: bool
) -> None:
    """Units may still be gathered then. A backward in between ends that."""
    events = (
        Event(action=Action.FORWARD, moment=forward[0], step=forward[1]),
        Event(action=Action.WRITE, moment=write[0], step=write[1], names=("head.weight",), value=2.0),
    )
    regime = Regime(steps=2, events=in_order(events))

    assert (list(_writes_to_gathered(regime)) == []) is is_kept


def test_a_write_after_an_idle_forward_is_left_out() -> None:
    """An idle forward comes first in its step."""
    event = Event(action=Action.WRITE, moment=Moment.STEP, step=1, names=("head.weight",), value=2.0)

    assert list(_writes_to_gathered(Regime(steps=2, idle_forwards=1, events=(event,)))) == [event]


def _names(example: Example) -> set[str]:
    """The parameters and units that the schedule names."""
    regime = example.regime
    mentioned = {*regime.gradient_to_none, *(name for _, names in regime.frozen_at for name in names)}
    return mentioned | {name for event in regime.events for name in event.names}


@pytest.mark.slow
@settings(max_examples=40, deadline=None, derandomize=True, suppress_health_check=list(HealthCheck))
@given(examples(ALL))
def test_a_simpler_example_is_whole_and_asks_for_no_more(example: Example) -> None:
    """Whatever is made plain, the model has the parameters and units that the plan and the schedule name."""
    candidates = list(simpler(example))

    for candidate in candidates:
        shapes = candidate.model.shapes()
        modules = {name for name, _ in candidate.model.walk()}
        assert asks(candidate) <= asks(example)
        assert {name for event in candidate.regime.events for name in event.names} <= {*shapes, *candidate.plan.units}
        assert set(candidate.model.frozen) <= {*shapes, *modules}
        assert example_from_json(candidate.to_json()) == candidate
    for candidate in candidates[:3]:
        candidate.workload().build(0)
    assert example not in candidates


def test_the_plainest_example_has_nothing_simpler() -> None:
    """There is nothing left to take away."""
    plainest = Example(plan=Plan(units=DrawnModel().units()), regime=Regime(steps=1))

    assert list(simpler(plainest)) == []


@settings(max_examples=60, deadline=None, derandomize=True, suppress_health_check=list(HealthCheck))
@given(examples(frozenset({"cpu_compute"})))
def test_only_what_is_declared_is_drawn(example: Example) -> None:
    """For an engine that declares nothing, neither the plan nor the model asks for anything."""
    assert example.plan.capabilities() <= {"cpu_compute"}
    assert asks(example) == frozenset()
    assert all(example.regime.is_reduced(micro) for micro in range(example.regime.micro_batches))
    assert example.regime.max_norm is None
    assert {EVENT_FLAGS.get(event.action) for event in example.regime.events} <= {None}


def test_the_save_and_its_load_go_together() -> None:
    """Without the save there would be nothing to load; the load alone can go."""
    events = (
        Event(action=Action.SAVE, moment=Moment.STEP, step=0),
        Event(action=Action.READ, moment=Moment.STEP, step=0),
        Event(action=Action.LOAD, moment=Moment.END, step=0),
    )
    example = _planned(DrawnModel(), regime=Regime(steps=1, events=events))

    actions = {tuple(event.action for event in each.regime.events) for each in simpler(example)}

    assert actions >= {(Action.READ,), (Action.SAVE, Action.READ), (Action.SAVE, Action.LOAD)}
    assert (Action.READ, Action.LOAD) not in actions


def test_events_move_to_the_first_step() -> None:
    """The later steps can then be removed; a load never comes before its save."""
    events = (
        Event(action=Action.SAVE, moment=Moment.STEP, step=1),
        Event(action=Action.LOAD, moment=Moment.END, step=1),
    )
    example = _planned(DrawnModel(), regime=Regime(steps=2, events=events))

    steps = {tuple(event.step for event in each.regime.events) for each in simpler(example)}

    assert (0, 1) in steps
    assert (0, 0) not in steps


def test_the_plainest_example_has_no_features() -> None:
    """The example that everything shrinks to is plain on every axis."""
    assert features(_planned(DrawnModel(), regime=Regime(steps=1))) == frozenset()


@pytest.mark.parametrize(
    ("model", "flag"),
    [
        (DrawnModel(blocks=(DrawnBlock(extras=((),)),)), "scalar_params"),
        (DrawnModel(blocks=(DrawnBlock(extras=((2, 3),), transposed=True),)), "noncontiguous_params"),
        (DrawnModel(blocks=(DrawnBlock(by_rank=True),)), "unused_divergent"),
        (DrawnModel(frozen=("blocks.0.up.bias",)), "frozen_mixed"),
        (
            DrawnModel(blocks=(DrawnBlock(), DrawnBlock()), ties=(("blocks.1.up.weight", "blocks.0.up.weight"),)),
            "shared_across_units",
        ),
        (
            DrawnModel(
                blocks=(DrawnBlock(is_unit=False), DrawnBlock(is_unit=False)),
                ties=(("blocks.1.up.weight", "blocks.0.up.weight"),),
            ),
            "shared_params",
        ),
    ],
)
def test_what_a_model_asks_for(model: DrawnModel, flag: str) -> None:
    """The flag is asked for, and nothing else."""
    assert asks(_planned(model)) == {flag}


def test_a_frozen_unit_is_not_mixed() -> None:
    """A unit whose parameters are all frozen asks for nothing."""
    assert asks(_planned(DrawnModel(frozen=("blocks.0",)))) == frozenset()


def test_which_blocks_a_step_uses() -> None:
    """Orders repeat with steps and micro-batches."""
    model = DrawnModel(blocks=(DrawnBlock(), DrawnBlock()), calls=((0,), (1, 0)))

    assert used_blocks(_planned(model), 0) == {0}
    assert used_blocks(_planned(model), 1) == {0, 1}
    assert not uses_all(_planned(model))
    assert uses_all(_planned(model, regime=Regime(micro_batches=2)))


@pytest.mark.parametrize(
    ("change", "axis", "value"),
    [
        ({"plan": Plan(sharding=Sharding.HYBRID, replicas=2)}, "sharding", "hybrid, 2 replicas"),
        ({"plan": Plan(reshard_after_forward=False)}, "reshard", "after backward"),
        ({"plan": Plan(reshard_after_forward=2)}, "reshard", "to a smaller group"),
        ({"regime": Regime(max_norm=UNREACHED_NORM)}, "clipping", "inactive"),
        ({"regime": Regime(micro_batches=3, reduced=(True, False, True))}, "accumulation", "reduced and deferred"),
        ({"regime": Regime(micro_batches=2, reduced=(False, True))}, "accumulation", "deferred"),
        ({"model": DrawnModel(width=1)}, "shapes", "empty shards"),
        ({"world_size": 3, "model": DrawnModel(width=4)}, "shapes", "empty shards"),
        ({"model": DrawnModel(blocks=(DrawnBlock(repeat=2),))}, "use", "some twice"),
    ],
)
def test_the_words_of_an_axis(change: dict[str, object], axis: str, value: str) -> None:
    """Values are named as the summary shows them."""
    assert axes(replace(Example(), **change))[axis] == value  # type: ignore[arg-type]


@pytest.mark.parametrize(
    "text",
    [
        "",
        "[]",
        "{}",
        json.dumps({"format": 2}),
        json.dumps({"format": 1, "world": 2}),
        json.dumps({"format": 1, "model": {"blocks": [{"wings": 2}]}}),
        json.dumps({"format": 1, "model": {"blocks": 3}}),
        json.dumps({"format": 1, "plan": {"sharding": "sideways"}}),
        json.dumps({"format": 1, "regime": {"steps": 0}}),
    ],
)
def test_other_text_is_refused(text: str) -> None:
    """Text that is not an example of this version raises ConfigError instead of training something else."""
    with pytest.raises(ConfigError):
        example_from_json(text)


def test_the_digest_is_of_the_content() -> None:
    """Equal examples have equal digests, others do not."""
    assert Example().digest == example_from_json(Example().to_json()).digest
    assert Example().digest != Example(world_size=3).digest
