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
    missing = {pair for row in candidates for pair in pairs(row)}
    chosen = []
    while missing:
        best = max(candidates, key=lambda row: sum(pair in missing for pair in pairs(row)))
        missing.difference_update(pairs(best))
        chosen.append(best)
    return chosen


def pairs(row: Combination) -> Iterator[Pair]:
    """Every two values of a combination."""
    return (frozenset(pair) for pair in itertools.combinations(row.items(), 2))
