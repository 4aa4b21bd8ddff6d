"""Events: where they are legal, what a regime makes of them, and every point of a step."""

from __future__ import annotations

import pytest

from fsdp_conformance.errors import ConfigError
from fsdp_conformance.workload.definition import Regime, every_point
from fsdp_conformance.workload.events import LEGAL, LOCAL, Action, Event, Moment, without_a_save


def _event(action: Action, moment: Moment, **fields: object) -> Event:
    given: dict[str, object] = {"step": 0, **fields}
    return Event(action=action, moment=moment, **given)  # type: ignore[arg-type]


def test_every_action_has_legal_moments() -> None:
    """No action is missing from the table, and none is illegal everywhere."""
    assert set(LEGAL) == set(Action)
    assert all(LEGAL.values())


@pytest.mark.parametrize(
    ("action", "moment", "fields", "problem"),
    [
        (Action.READ, Moment.LOSS, {}, "moment must be one of"),
        (Action.FREEZE, Moment.OPTIMIZER, {}, "moment must be one of before the step, after the optimizer"),
        (Action.EVALUATE, Moment.STEP, {"ranks": (1,)}, "ranks must be empty: all ranks take part"),
        (Action.LEARNING_RATE, Moment.STEP, {"ranks": (0,), "value": 0.5}, "ranks must be empty"),
        (Action.EVALUATE, Moment.STEP, {"step": -1}, "must not be negative"),
        (Action.EVALUATE, Moment.STEP, {"micro": 1}, "micro must be 0"),
        (Action.DROP, Moment.OPTIMIZER, {}, "names must not be empty"),
        (Action.EVALUATE, Moment.STEP, {"names": ("a",)}, "names must be empty"),
        (Action.LEARNING_RATE, Moment.STEP, {}, "value must be a number"),
        (Action.READ, Moment.STEP, {"value": 1.0}, "value must be None"),
        (Action.SAVE, Moment.BACKWARD, {}, "moment must be one of before the step, after the optimizer"),
        (Action.LOAD, Moment.OPTIMIZER, {}, "moment must be one of before the step, after the optimizer"),
        (Action.SHOW, Moment.LOSS, {}, "moment must be one of"),
        (Action.WRITE_SHOWN, Moment.END, {"value": 0.5}, "names must not be empty"),
        (Action.WRITE_SHOWN_GRADIENT, Moment.OPTIMIZER, {"names": ("a",)}, "value must be a number"),
        (Action.RAISE, Moment.END, {}, "moment must be one of before the forward"),
        (Action.RAISE, Moment.FORWARD, {"ranks": (1,)}, "ranks must be empty"),
    ],
)
def test_illegal_events(action: Action, moment: Moment, fields: dict[str, object], problem: str) -> None:
    """The constructor refuses what has no defined result, and says why."""
    with pytest.raises(ConfigError, match=problem):
        _event(action, moment, **fields)


def test_only_local_actions_may_differ_between_ranks() -> None:
    """An action that communicates, or that leaves ranks with different values, happens on all of them."""
    assert frozenset({Action.TOGGLE}) == LOCAL
    assert [_event(Action.TOGGLE, Moment.LOSS, ranks=(1,)).happens_on(rank) for rank in range(3)] == [
        False,
        True,
        False,
    ]
    assert _event(Action.READ, Moment.STEP).happens_on(5)


def test_events_outside_the_run() -> None:
    """A regime refuses events that would never happen."""
    for step, micro in ((3, 0), (0, 2)):
        with pytest.raises(ConfigError, match="events must lie within 3 steps of 2 micro-batches"):
            Regime(micro_batches=2, events=(_event(Action.TOGGLE, Moment.LOSS, step=step, micro=micro),))


def test_a_load_needs_a_save() -> None:
    """A regime refuses to load what was never saved, whatever the order of its events is."""
    save, load = _event(Action.SAVE, Moment.END, step=1), _event(Action.LOAD, Moment.END, step=1)
    before = _event(Action.LOAD, Moment.STEP, step=1)

    assert Regime(events=(save, load)).happens(Action.LOAD)
    assert without_a_save((load, save)) == (load,)
    assert without_a_save((save, before, load)) == (before,)
    with pytest.raises(ConfigError, match="load before the step in step 1 and no save before it"):
        Regime(events=(save, before))


def test_exceptions_only_where_their_effect_is_known() -> None:
    """Not in a pipeline, and not where the optimizer has stepped before the backward ends."""
    raising = (_event(Action.RAISE, Moment.OPTIMIZER, step=1),)
    with pytest.raises(ConfigError, match="must not raise in a pipeline"):
        Regime(pipeline="1f1b", micro_batches=2, events=raising)
    with pytest.raises(ConfigError, match="must not raise with the optimizer in backward"):
        Regime(optimizer_in_backward=True, events=raising)


def test_attempts() -> None:
    """How many micro-batches an interrupted attempt begins."""
    regime = Regime(
        micro_batches=3,
        events=(_event(Action.RAISE, Moment.LOSS, micro=1), _event(Action.RAISE, Moment.OPTIMIZER)),
    )
    assert [begun for _, begun in regime.attempts(0)] == [2, 3]
    assert regime.attempts(1) == []


def test_fields_that_stand_for_events() -> None:
    """Fields of the regime and events are interpreted alike, fields first."""
    later = _event(Action.READ, Moment.STEP, step=1)
    regime = Regime(
        eval_before=(1,), eval_between=(0,), idle_forwards=2, gradient_to_none=("a",), frozen_at=((1, ("b",)),),
        events=(later,),
    )  # fmt: skip
    assert [event.action for event in regime.at(Moment.STEP, 1)] == [
        Action.FREEZE, Action.EVALUATE, Action.FORWARD, Action.FORWARD, Action.READ,
    ]  # fmt: skip
    assert [event.action for event in regime.at(Moment.OPTIMIZER, 0)] == [Action.DROP, Action.EVALUATE]
    assert not regime.at(Moment.END, 0)
    assert [regime.frozen(step) for step in range(3)] == [None, ("b",), ("b",)]
    assert regime.dropped(2) == {"a"}
    assert regime.happens(Action.READ)
    assert not regime.happens(Action.SKIP)
    assert [event.action for event in regime.undisturbed(1).in_step(0)] == [Action.FORWARD, Action.FORWARD, Action.DROP]


def test_freezing_after_a_step() -> None:
    """It holds from the next step on."""
    regime = Regime(
        events=(_event(Action.FREEZE, Moment.END, names=("a",)), _event(Action.FREEZE, Moment.STEP, step=2))
    )
    assert [regime.frozen(step) for step in range(3)] == [None, ("a",), ()]


def test_regimes_for_references() -> None:
    """Events without effect on replicated training are left out, so that such regimes are trained once."""
    plain = Regime(events=(_event(Action.EVALUATE, Moment.LOSS),))
    marked = Regime(events=(_event(Action.TOGGLE, Moment.STEP, ranks=(0,)), *plain.events))
    assert marked != plain
    assert marked.for_references() == plain


def test_every_point() -> None:
    """One regime for each legal moment and micro-batch, with the event in every step; none twice."""
    regime = Regime(steps=3, micro_batches=2)
    regimes = dict(every_point(regime, Action.EVALUATE))
    assert list(regimes) == [
        "evaluate before the step",
        "evaluate before the forward of micro-batch 0",
        "evaluate before the forward of micro-batch 1",
        "evaluate between forward and backward of micro-batch 0",
        "evaluate between forward and backward of micro-batch 1",
        "evaluate after the backward of micro-batch 0",
        "evaluate after the backward of micro-batch 1",
        "evaluate before the optimizer",
        "evaluate after the optimizer",
    ]
    for disturbed in regimes.values():
        assert [event.step for event in disturbed.events] == [0, 1, 2]
        assert len({(event.moment, event.micro) for event in disturbed.events}) == 1
    waiting = dict(every_point(regime, Action.EVALUATE, pending=True))
    assert list(waiting) == ["evaluate after the backward of micro-batch 1", "evaluate before the optimizer"]
    others = dict(every_point(regime, Action.EVALUATE, pending=False))
    assert waiting.keys() | others.keys() == regimes.keys()
    assert not waiting.keys() & others.keys()


def test_points_dealt_to_few_runs() -> None:
    """Every point is in exactly one of the runs, and neighbours are in different ones."""
    regime = Regime(steps=3, micro_batches=2)
    alone = [disturbed.events for _, disturbed in every_point(regime, Action.EVALUATE)]
    dealt = dict(every_point(regime, Action.EVALUATE, runs=2))
    assert list(dealt)[1] == (
        "evaluate before the forward of micro-batch 0, between forward and backward of micro-batch 0, "
        "after the backward of micro-batch 0, before the optimizer"
    )
    runs = [disturbed.events for disturbed in dealt.values()]
    assert sorted(map(str, runs[0] + runs[1])) == sorted(str(event) for events in alone for event in events)
    assert all(any(event in runs[place % 2] for event in events) for place, events in enumerate(alone))
    assert len(list(every_point(regime, Action.EVALUATE, runs=100))) == len(alone)


def test_every_point_adds_to_the_regime() -> None:
    """The events that a regime has stay, and further fields reach each new event."""
    before = _event(Action.READ, Moment.STEP)
    ((point, disturbed),) = every_point(Regime(steps=1, events=(before,)), Action.DROP, names=("a",))
    assert point == "drop before the optimizer"
    assert disturbed.events == (before, _event(Action.DROP, Moment.OPTIMIZER, names=("a",)))
