"""Coverage counts what brute force counts, and rows cover all of it, whatever is frozen, declared or rejected."""

from __future__ import annotations

import random
from collections.abc import Iterable
from itertools import combinations, product

import pytest

from fsdp_conformance.scenarios.covering import Coverage, best_row, covering
from fsdp_conformance.scenarios.space import Choice, Conflict, Space, axis, value

#: Four axes without conditions.
FREE = Space(axes=tuple(axis(name, "model", "0", "1", "2") for name in "abcd"))

#: Conflicts, a value that demands one of two others, and one whose demand has a demand.
BOUND = Space(
    axes=(
        axis("a", "model", "0", "1", "2", value("3", "zero3")),
        axis("b", "model", "0", "1", value("2", "no_sync", a=("1", "2"))),
        axis("c", "model", "0", "1", value("2", b="2")),
        axis("d", "model", "0", "1", "2"),
        axis("e", "model", "0", "1"),
    ),
    conflicts=(
        Conflict(reason="a1 d1", of={"a": ("1",), "d": ("1",)}),
        Conflict(reason="a2 e1", of={"a": ("2",), "e": ("1",)}),
        Conflict(reason="c1 d2", of={"c": ("1",), "d": ("2",)}),
    ),
)

#: Two values hide the others. One demands either of them, so its pairs with what conflicts with one are always hidden.
HIDING = Space(
    axes=(
        axis("a", "model", "0", "1", value("2", hides=True)),
        axis("b", "model", "0", "1", value("2", hides=True)),
        axis("c", "model", "0", "1", value("2", b=("1", "2"))),
        axis("d", "model", "0", "1", value("2", c="2")),
        axis("e", "model", "0", "1", "2"),
    ),
    conflicts=(Conflict(reason="b1 e1", of={"b": ("1",), "e": ("1",)}),),
)

SPACES = pytest.mark.parametrize("space", [FREE, BOUND, HIDING], ids=["free", "bound", "hiding"])
STRENGTHS = pytest.mark.parametrize("strength", [2, 3], ids=["pairs", "triples"])

Combination = frozenset[tuple[str, str]]


def _possible(space: Space, strength: int, declared: frozenset[str] | None = None) -> set[Combination]:
    """Every combination that is part of some possible scenario."""
    offered = [[(each.name, name) for name in space.offered(each, declared)] for each in space.axes]
    scenarios = [items for items in product(*offered) if space.why_impossible(dict(items)) is None]
    return {frozenset(some) for items in scenarios for some in combinations(items, strength)}


def _in(rows: Iterable[Choice], strength: int) -> set[Combination]:
    return {frozenset(some) for row in rows for some in combinations(row.items(), strength)}


def _hiding(items: Iterable[tuple[str, str]], space: Space) -> Combination:
    return frozenset(item for item in items if space.value_of[item].hides)


def _shown(rows: Iterable[Choice], space: Space, strength: int) -> set[Combination]:
    """The combinations in rows that no other value of their row hides, or that are hidden in every scenario."""
    everything = [
        dict(items)
        for items in product(*([(each.name, value_.name) for value_ in each.values] for each in space.axes))
        if space.why_impossible(dict(items)) is None
    ]

    def visible(of: Iterable[Choice]) -> set[Combination]:
        return {
            frozenset(some)
            for row in of
            for some in combinations(row.items(), strength)
            if _hiding(row.items(), space) <= frozenset(some)
        }

    never = _in(everything, strength) - visible(everything)
    return visible(rows) | (_in(rows, strength) & never)


@SPACES
@STRENGTHS
@pytest.mark.parametrize("declared", [None, frozenset[str](), frozenset({"no_sync"})], ids=["all", "none", "one flag"])
def test_what_is_possible_is_what_some_scenario_has(
    space: Space, strength: int, declared: frozenset[str] | None
) -> None:
    """The number of combinations, and which ones they are; also where a demand can be met in one way only."""
    coverage = Coverage(space, declared, strength=strength)
    possible = _possible(space, strength, declared)

    assert coverage.possible == coverage.left == len(possible)
    assert {frozenset(each.items()) for each in coverage.combinations_left()} == possible


@SPACES
@STRENGTHS
@pytest.mark.parametrize("declared", [None, frozenset[str]()], ids=["all", "none"])
def test_rows_cover_every_combination(space: Space, strength: int, declared: frozenset[str] | None) -> None:
    """All rows are whole and possible, and there are not many more than the largest product of axes."""
    coverage = Coverage(space, declared, strength=strength)
    rows = list(covering(coverage))

    assert coverage.left == 0
    assert _shown(rows, space, strength) == _possible(space, strength, declared)
    assert all(set(row) == set(space.by_name) and space.why_impossible(row) is None for row in rows)
    sizes = sorted((len(space.offered(each, declared)) for each in space.axes), reverse=True)
    least = sizes[0] * sizes[1] * (sizes[2] if strength == 3 else 1)
    hidden = sum(value_.hides for each in space.axes for value_ in each.values)
    assert len(rows) <= (2 + hidden) * least


@STRENGTHS
@pytest.mark.parametrize("seed", range(5))
def test_a_row_does_not_count_for_what_one_of_its_values_hides(strength: int, seed: int) -> None:
    """Whatever rows there are, what counts is what brute force counts, and gains add up."""
    random_ = random.Random(seed)
    coverage = Coverage(HIDING, strength=strength)
    rows: list[Choice] = []
    for _ in range(8):
        row = best_row(coverage, random_, start={"e": random_.choice("012")}, candidates=1)
        assert row is not None
        rows.append(row)
        chosen = gains = 0
        for name, value_ in row.items():
            number = coverage.number_of(name, value_)
            gains += coverage.gain(chosen, number)
            chosen |= 1 << number
        assert gains == coverage.gain_of(row) == coverage.add(row)
        assert coverage.covered == len(_shown(rows, HIDING, strength))


@STRENGTHS
def test_counts_of_a_row(strength: int) -> None:
    """A row's gain is what it adds, once; the second time it adds nothing."""
    coverage = Coverage(BOUND, strength=strength)
    row = BOUND.completed({"b": "2", "d": "2"})
    assert row is not None
    number = len(list(combinations(BOUND.axes, strength)))

    assert coverage.gain_of(row) == number
    assert coverage.add(row) == number
    assert (coverage.gain_of(row), coverage.add(row)) == (0, 0)
    assert (coverage.covered, coverage.left) == (number, coverage.possible - number)


@STRENGTHS
def test_the_gain_of_a_value_is_what_the_row_gains(strength: int) -> None:
    """Added value by value, the gains of a row sum up to that of the row."""
    coverage = Coverage(BOUND, strength=strength)
    random_ = random.Random(0)
    for _ in range(10):
        row = best_row(coverage, random_, start={"e": random_.choice("01")})
        assert row is not None
        chosen = gains = 0
        for name, value_ in row.items():
            number = coverage.number_of(name, value_)
            gains += coverage.gain(chosen, number)
            chosen |= 1 << number
        assert gains == coverage.gain_of(row) == coverage.add(row)


def test_frozen_rows_stay_and_are_extended_when_an_axis_is_added() -> None:
    """The rows that exist count with the plain value of the new axis, and new ones have what they lack."""
    frozen = list(covering(Coverage(BOUND)))
    larger = Space(axes=(*BOUND.axes, axis("f", "model", "0", "1", "2")), conflicts=BOUND.conflicts)
    older = [larger.whole(row) for row in frozen]
    coverage = Coverage(larger, rows=older)
    new = list(covering(coverage))

    assert coverage.left == 0
    assert _in([*older, *new], 2) == _possible(larger, 2)
    assert all(row["f"] != "0" for row in new)
    assert list(covering(Coverage(larger, rows=[*older, *new]))) == []


def test_the_same_seed_makes_the_same_rows() -> None:
    """Rows can be made again; other seeds make others."""
    same, again, other = (list(covering(Coverage(BOUND), seed=seed)) for seed in (3, 3, 4))

    assert same == again
    assert same != other


def test_rows_that_are_not_accepted_are_replaced() -> None:
    """Some other row has their combinations."""
    random_ = random.Random(0)
    rejected: list[dict[str, str]] = []

    def accepts(row: dict[str, str]) -> bool:
        if random_.random() < 0.4:
            rejected.append(row)
            return False
        return True

    coverage = Coverage(BOUND)
    rows = list(covering(coverage, accepts=accepts))

    assert rejected
    assert coverage.left == 0
    assert _in(rows, 2) == _possible(BOUND, 2)


def test_what_only_rejected_rows_have_stays() -> None:
    """The caller sees which combinations these are; all others are covered."""
    coverage = Coverage(BOUND)
    rows = list(covering(coverage, accepts=lambda row: row["d"] != "2"))

    left = {frozenset(each.items()) for each in coverage.combinations_left()}
    assert left == {pair for pair in _possible(BOUND, 2) if ("d", "2") in pair}
    assert all(row["d"] != "2" for row in rows)


def test_nothing_acceptable() -> None:
    """Every combination stays, and the search ends."""
    coverage = Coverage(FREE)

    assert list(covering(coverage, accepts=lambda row: False)) == []
    assert coverage.covered == 0


def test_a_row_that_cannot_be_completed_is_none() -> None:
    """Values that cannot be together begin no row."""
    assert best_row(Coverage(BOUND), random.Random(0), start={"a": "1", "d": "1"}) is None


def test_a_row_begins_with_what_it_is_given() -> None:
    """For every pair that is possible, there is a row."""
    coverage = Coverage(BOUND)
    for pair in _possible(BOUND, 2):
        row = best_row(coverage, random.Random(0), start=dict(pair), candidates=1)
        assert row is not None
        assert row.items() >= pair
        assert BOUND.why_impossible(row) is None
