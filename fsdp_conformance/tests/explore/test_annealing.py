"""Annealed rows are possible, keep what they start with, and need fewer rows for all pairs than a greedy search."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from fsdp_conformance.explore.annealing import annealed
from fsdp_conformance.scenarios.covering import Coverage, covering
from fsdp_conformance.scenarios.space import Choice, Space, axis
from fsdp_conformance.tests.scenarios.test_covering import BOUND, FREE, HIDING

#: Thirteen axes of three values. Fifteen rows are the fewest that are known to have all pairs.
WIDE = Space(axes=tuple(axis(name, "model", "0", "1", "2") for name in "abcdefghijklm"))


def _left(space: Space, rows: Sequence[Choice]) -> int:
    return Coverage(space, rows=rows).left


@pytest.mark.slow
def test_fewer_rows_than_greedy_ones_have_all_pairs() -> None:
    """Three fewer are enough here."""
    greedy = len(list(covering(Coverage(WIDE))))
    rows = annealed(WIDE, [{}] * (greedy - 3), moves=20_000)

    assert len(rows) == greedy - 3
    assert _left(WIDE, rows) == 0


@pytest.mark.parametrize("space", [FREE, BOUND, HIDING], ids=["free", "bound", "hiding"])
def test_rows_are_whole_and_possible(space: Space) -> None:
    """Also where values have conflicts and demands, and while pairs are missing."""
    for moves in (0, 50, 5_000):
        rows = annealed(space, [{}] * 24, moves=moves)
        assert all(set(row) == set(space.by_name) and space.why_impossible(row) is None for row in rows)
    assert _left(space, rows) == 0


def test_what_rows_start_with_stays() -> None:
    """Pairs of other values of the axis stay missing, and are the only ones."""
    rows = annealed(FREE, [{"a": "0"}] * 6 + [{"a": "1"}] * 6, moves=5_000)

    assert [row["a"] for row in rows] == ["0"] * 6 + ["1"] * 6
    assert all(pair.get("a") == "2" for pair in Coverage(FREE, rows=rows).combinations_left())


def test_rows_that_exist_stay_and_the_others_have_what_they_lack() -> None:
    """A start with a value on every axis is a row that counts and does not change."""
    frozen = list(covering(Coverage(HIDING)))[:6]
    rows = annealed(HIDING, [*frozen, *[{}] * 14], moves=5_000)

    assert rows[:6] == frozen
    assert _left(HIDING, rows) == 0


def test_the_same_seed_gives_the_same_rows() -> None:
    """Rows can be made again; another seed gives others."""
    first, again, other = (annealed(WIDE, [{}] * 16, moves=500, seed=seed) for seed in (0, 0, 1))

    assert first == again
    assert first != other
