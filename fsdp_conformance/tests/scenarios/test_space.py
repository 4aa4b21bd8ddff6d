"""A space says what is wrong with it, and completes, adapts and simplifies scenarios without making impossible ones."""

from __future__ import annotations

import random
from collections.abc import Iterator
from itertools import combinations

import pytest

from fsdp_conformance.capability import CAPABILITIES
from fsdp_conformance.errors import ConfigError
from fsdp_conformance.scenarios.axes import SPACE
from fsdp_conformance.scenarios.space import Axis, Choice, Conflict, Space, axis, value

pytestmark = pytest.mark.slow

SMALL = Space(
    axes=(
        axis("ranks", "engine", "2", "4", "1"),
        axis("sharding", "engine", "default", value("hybrid", "hsdp", ranks="4"), value("full", "zero3")),
        axis(
            "accumulation",
            "training",
            "none",
            "reduced",
            value("deferred", "no_sync"),
            value("over replicas", "hsdp_defer_allreduce", sharding="hybrid"),
        ),
        axis("batches", "training", "same", value("by micro-batch", accumulation=("reduced", "deferred"))),
        axis("prefetch", "engine", "default", value("forward", "prefetch_forward")),
    ),
    conflicts=(
        Conflict(reason="full has one micro-batch", of={"sharding": ("full",), "accumulation": ("reduced",)}),
        Conflict(reason="nothing to prefetch", of={"ranks": ("1",), "prefetch": ("forward",)}),
    ),
)

ALL = frozenset(CAPABILITIES)


def _problems(*axes: Axis, conflicts: tuple[Conflict, ...] = ()) -> str:
    with pytest.raises(ConfigError) as info:
        Space(axes=axes, conflicts=conflicts)
    return str(info.value)


def test_every_problem_of_a_space_is_reported_at_once() -> None:
    """Someone who edits the axes sees all that is wrong with them."""
    text = _problems(
        axis("a", "model", "plain", "special"),
        axis("a", "model", "plain", "special"),
        axis("b", "model", value("plain", "zero3"), value("other", "no_such_flag")),
        axis("c", "model", "the same", "the same"),
        axis("d", "model", "alone"),
        axis("f", "model", "plain", value("special", g="plain")),
    )

    for problem in (
        "axes must be distinct, got 'a' twice",
        "b: its first value must need and hide nothing",
        "b: 'no_such_flag' is not a capability",
        "c must have at least two distinct values",
        "d must have at least two distinct values",
        "f: special: must name axes and values of the space, got 'g'",
    ):
        assert problem in text


@pytest.mark.parametrize(
    ("of", "problem"),
    [
        ({"a": ("plain",), "b": ("special",)}, "must not name plain values, got a: plain"),
        ({"a": ("special",), "c": ("special",)}, "must name axes and values of the space, got 'c'"),
        ({"a": ("special", "strange"), "b": ("special",)}, "got 'a': ['strange']"),
        ({"a": ("special",)}, "must be between two axes, got a"),
        ({"a": ("special",), "b": ("special",), "d": ("special",)}, "must be between two axes, got a, b, d"),
    ],
)
def test_conflicts_are_between_two_axes_and_leave_the_plain_values_alone(
    of: dict[str, tuple[str, ...]], problem: str
) -> None:
    """Otherwise a scenario could not be made plainer."""
    text = _problems(
        *(axis(name, "model", "plain", "special") for name in "abd"), conflicts=(Conflict(reason="because", of=of),)
    )

    assert f"because: {problem}" in text or problem in text


@pytest.mark.parametrize(
    ("choice", "reason"),
    [
        ({}, None),
        ({"sharding": "hybrid", "ranks": "4"}, None),
        ({"sharding": "hybrid", "ranks": "2"}, "sharding: hybrid makes sense only with ranks: 4"),
        ({"sharding": "full", "accumulation": "reduced"}, "full has one micro-batch"),
        (
            {"batches": "by micro-batch", "accumulation": "none"},
            "makes sense only with accumulation: reduced or deferred",
        ),
    ],
)
def test_why_values_cannot_be_together(choice: Choice, reason: str | None) -> None:
    """The reason is that of the conflict, or the value that is demanded; axes without a value do not matter."""
    why = SMALL.why_impossible(choice)

    assert why is None if reason is None else reason in str(why)


@pytest.mark.parametrize(
    ("choice", "special"),
    [
        ({}, {}),
        ({"sharding": "hybrid"}, {"ranks": "4", "sharding": "hybrid"}),
        ({"accumulation": "over replicas"}, {"ranks": "4", "sharding": "hybrid", "accumulation": "over replicas"}),
        ({"batches": "by micro-batch"}, {"batches": "by micro-batch", "accumulation": "reduced"}),
        (
            {"batches": "by micro-batch", "sharding": "full"},
            {"sharding": "full", "batches": "by micro-batch", "accumulation": "deferred"},
        ),
        ({"accumulation": "over replicas", "ranks": "2"}, None),
        ({"accumulation": "over replicas", "batches": "by micro-batch"}, None),
    ],
)
def test_a_choice_is_completed_by_what_it_demands_and_plain_values(
    choice: Choice, special: dict[str, str] | None
) -> None:
    """The first of the values that are demanded is taken, unless it is in conflict; demands of demands are met, too."""
    completed = SMALL.completed(choice)

    assert (None if completed is None else SMALL.special(completed)) == special


def test_a_choice_is_completed_by_what_an_engine_declares() -> None:
    """With nothing declared, a value whose demands need a capability cannot be had."""
    assert SMALL.completed({"accumulation": "over replicas"}, frozenset({"hsdp_defer_allreduce"})) is None
    assert SMALL.completed({"batches": "by micro-batch", "sharding": "full"}, frozenset({"zero3"})) is None
    assert SMALL.completed({"batches": "by micro-batch"}, frozenset()) is not None


@pytest.mark.parametrize(
    ("choice", "declared", "special"),
    [
        ({"sharding": "hybrid", "ranks": "4"}, {"hsdp"}, {"sharding": "hybrid", "ranks": "4"}),
        ({"sharding": "hybrid", "ranks": "4"}, set(), {"ranks": "4"}),
        (
            {"sharding": "hybrid", "ranks": "4", "accumulation": "over replicas"},
            {"hsdp_defer_allreduce"},
            {"ranks": "4"},
        ),
        (
            {"batches": "by micro-batch", "accumulation": "deferred", "ranks": "4"},
            set(),
            {"batches": "by micro-batch", "accumulation": "reduced", "ranks": "4"},
        ),
    ],
)
def test_a_scenario_is_adapted_to_what_an_engine_declares(
    choice: Choice, declared: set[str], special: dict[str, str]
) -> None:
    """Values that it cannot be asked for become plain. A value that stays gets another one of those that it demands."""
    assert SMALL.special(SMALL.adapted(SMALL.whole(choice), frozenset(declared))) == special


def test_simpler_scenarios_have_one_value_less_and_those_that_need_it() -> None:
    """Nothing remains that makes sense only with the value that is gone."""
    whole = SMALL.whole({"ranks": "4", "sharding": "hybrid", "accumulation": "over replicas", "prefetch": "forward"})

    simpler = [SMALL.special(each) for each in SMALL.simpler(whole)]

    assert simpler == [
        {"prefetch": "forward"},
        {"ranks": "4", "prefetch": "forward"},
        {"ranks": "4", "sharding": "hybrid", "prefetch": "forward"},
        {"ranks": "4", "sharding": "hybrid", "accumulation": "over replicas"},
    ]
    assert list(SMALL.simpler(SMALL.plain)) == []


def test_unknown_names_are_refused() -> None:
    """A misspelt value would otherwise be a scenario that is plain in secret."""
    with pytest.raises(ConfigError, match="got ranks: many, wings: 2"):
        SMALL.whole({"ranks": "many", "wings": "2"})


# --- the space of all scenarios ---------------------------------------------------------------------------------------


def _scenarios(number: int) -> Iterator[tuple[random.Random, dict[str, str]]]:
    """Possible scenarios with a random number of special values."""
    for seed in range(number):
        random_ = random.Random(seed)
        choice: dict[str, str] = {}
        share = random_.random()
        for each in random_.sample(SPACE.axes, len(SPACE.axes)):
            if each.name not in choice and random_.random() < share:
                tried = {**choice, each.name: random_.choice(each.values).name}
                if SPACE.completed(tried) is not None:
                    choice = tried
        completed = SPACE.completed(choice)
        assert completed is not None
        yield random_, completed


def test_whatever_is_completed_is_possible_and_keeps_the_choice() -> None:
    """Of each value, and of pairs of values."""
    items = list(SPACE.value_of)
    for (one, name), (other, another) in random.Random(0).sample(list(combinations(items, 2)), 2000):
        choice = {one: name, other: another}
        completed = SPACE.completed(choice)
        if completed is not None:
            assert SPACE.why_impossible(completed) is None
            assert completed.items() >= choice.items()
    assert all(SPACE.completed({one: name}) is not None for one, name in items)


def test_every_adapted_scenario_is_possible_and_needs_nothing_undeclared() -> None:
    """For any set of capabilities: with one missing, with half of them, with hardly any."""
    for random_, choice in _scenarios(120):
        declared = frozenset(random_.sample(sorted(ALL), random_.randrange(len(ALL) + 1)))
        for each in (declared, ALL - {random_.choice(sorted(SPACE.needs(choice) or ALL))}):
            adapted = SPACE.adapted(choice, each)
            assert SPACE.why_impossible(adapted) is None
            assert SPACE.needs(adapted) <= each
        assert SPACE.adapted(choice, ALL) == choice


def test_an_adapted_scenario_keeps_every_pair_that_the_engine_can_be_asked_for() -> None:
    """Otherwise a pair that some row has could be in no row of an engine that declares both values."""
    for random_, choice in _scenarios(120):
        needs = sorted(SPACE.needs(choice))
        declared = ALL - frozenset(random_.sample(needs, random_.randrange(len(needs) + 1)))
        adapted = SPACE.adapted(choice, declared)
        offered = [item for item in SPACE.special(choice).items() if SPACE.value_of[item].needs <= declared]
        for one, other in combinations(offered, 2):
            if SPACE.completed(dict([one, other]), declared) is not None:
                assert adapted.items() >= {one, other}


def test_every_simpler_scenario_is_possible_and_needs_no_more() -> None:
    """Whatever value becomes plain, alone or with what needs it."""
    for _, choice in _scenarios(200):
        special = SPACE.special(choice)
        simpler = list(SPACE.simpler(choice))
        assert len(simpler) == len(special)
        for each in simpler:
            assert SPACE.why_impossible(each) is None
            assert SPACE.special(each).items() < special.items()
            assert SPACE.needs(each) <= SPACE.needs(choice)


def test_conflicts_have_reasons_and_values_are_words() -> None:
    """Reports quote both."""
    assert all(conflict.reason and not conflict.reason.endswith(".") for conflict in SPACE.conflicts)
    assert all(name.isprintable() and name == name.strip() for _, name in SPACE.value_of)
    assert {each.area for each in SPACE.axes} == {"engine", "model", "training", "events"}
