"""A few combinations of options in which every pair of values stands, in place of all of them."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

Combination = dict[str, Any]
Pair = frozenset[tuple[str, Any]]


def covering(
    axes: Mapping[str, Sequence[Any]], is_legal: Callable[[Combination], bool] = lambda _: True
) -> list[Combination]:
    """
    Legal combinations of one value of each axis, such that every pair that stands in a legal one stands in one of them.

    Greedy: each next one has the most pairs that are new, and of those the first in the order of the axes.
    """
    candidates = [
        row for values in itertools.product(*axes.values()) if is_legal(row := dict(zip(axes, values, strict=True)))
    ]
    pairs_of = [frozenset(pairs(row)) for row in candidates]
    missing = set().union(*pairs_of)
    chosen = []
    while missing:
        best = max(range(len(candidates)), key=lambda place: len(missing & pairs_of[place]))
        missing -= pairs_of[best]
        chosen.append(candidates[best])
    return chosen


def pairs(row: Combination) -> Iterator[Pair]:
    """Every two values of a combination."""
    return (frozenset(pair) for pair in itertools.combinations(row.items(), 2))
