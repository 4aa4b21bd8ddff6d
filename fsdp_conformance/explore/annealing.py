"""
Fewer rows with every possible pair of values than a greedy search needs, by simulated annealing.

The number of rows is given, and what stays in each, such as its number of ranks. A pair that no row has is written into
a row, which may lose others by that: more of them at the beginning, hardly any at the end (Torres-Jimenez and
Rodriguez-Tello, "New bounds for binary covering arrays using simulated annealing", 2012).

Rows are arrays with a value on every axis. So what a value demands of another axis has been decided, and everything
that is impossible is so because of two values. Rows that exist already are starts with a value on every axis.
"""

from __future__ import annotations

import math
import random
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from fsdp_conformance.scenarios.covering import Coverage, positions
from fsdp_conformance.scenarios.space import Choice, Space

#: The temperature at the beginning and at the end: a move that loses so many pairs is made about every third time.
_WARM, _COLD = 0.6, 0.05

#: How often values that do not go with a new pair are replaced before it is tried elsewhere.
_REPAIRS = 6

#: How often a pair is tried in a row that has one of its values.
_HALF = 0.8

#: On an axis where a row may have any value.
_FREE = -1

Row = NDArray[np.int64]
"""The number of the value on each axis."""
Table = NDArray[np.bool_]
"""For each value and each other one."""


def annealed(space: Space, starts: Sequence[Choice], *, moves: int, seed: int = 0) -> list[dict[str, str]]:
    """
    As many rows as there are `starts`, each with the values of its start; after `moves` they miss few pairs, or none.

    The same arguments give the same rows.
    """
    search = _Annealing(space, starts, random.Random(seed))
    for number in range(moves):
        if not search.missing:
            break
        search.move(_WARM + (_COLD - _WARM) * number / moves)
    return search.choices()


class _Annealing:
    """The rows, how often each pair is in them, and which pairs are missing."""

    def __init__(self, space: Space, starts: Sequence[Choice], random_: random.Random) -> None:
        self._random = random_
        coverage = Coverage(space)
        self._items = coverage.items
        axes = {axis.name: place for place, axis in enumerate(space.axes)}
        self._axis = np.array([axes[name] for name, _ in self._items])
        self._values = [[coverage.number_of(axis.name, each.name) for each in axis.values] for axis in space.axes]
        self._together: Table = np.eye(len(self._items), dtype=np.bool_)
        for number, others in enumerate(coverage.compatible()):
            self._together[number, list(positions(others))] = True
        self._wanted: Table = np.zeros_like(self._together)
        for pair in coverage.combinations_left():
            one, other = (coverage.number_of(*item) for item in pair.items())
            self._wanted[one, other] = self._wanted[other, one] = True
        self._hiding = np.array([space.value_of[item].hides for item in self._items])
        self._hidden: Table = np.zeros_like(self._together)
        for pair in coverage.always_hidden():
            one, other = (coverage.number_of(*item) for item in pair.items())
            self._hidden[one, other] = self._hidden[other, one] = True
        self._one, self._other = np.triu_indices(len(axes), 1)
        """The places of the axes of each pair in a row."""
        self._given = np.full((len(starts), len(axes)), _FREE)
        """For each row, the number of the value that stays on each axis."""
        for given, start in zip(self._given, starts, strict=True):
            for axis, name in start.items():
                given[axes[axis]] = coverage.number_of(axis, name)
        self._rows = np.array([self._random_row(given) for given in self._given])
        self._count = np.zeros(self._wanted.shape, np.int32)
        """For each pair of a smaller and a larger number, the rows that count for it."""
        for row in self._rows:
            self._count[self._pairs(row)] += 1
        self._lacking: Table = np.triu(self._wanted) & (self._count == 0)

    @property
    def missing(self) -> int:
        """How many pairs no row has."""
        return int(self._lacking.sum())

    def choices(self) -> list[dict[str, str]]:
        """The rows by axis and value."""
        return [dict(self._items[number] for number in row) for row in self._rows]

    def move(self, temperature: float) -> None:
        """Write a pair that is missing into a row, if that does not lose too many others."""
        one, other = self._missing_pair()
        place = self._place_for(one, other)
        row = None if place is None else self._with_pair(place, one, other)
        if place is None or row is None:
            return
        lost = self._change_of_missing(self._rows[place], row)
        if lost <= 0 or self._random.random() < math.exp(-lost / temperature):
            self._replace(place, row)

    def _random_row(self, given: Row) -> Row:
        while True:
            row = given.copy()
            free = [int(axis) for axis in np.flatnonzero(given == _FREE)]
            self._random.shuffle(free)
            for axis in free:
                fitting = [v for v in self._values[axis] if self._together[v, row[row != _FREE]].all()]
                if not fitting:
                    break
                row[axis] = self._random.choice(fitting)
            else:
                return row

    def _missing_pair(self) -> tuple[int, int]:
        ones, others = np.nonzero(self._lacking)
        number = self._random.randrange(len(ones))
        return int(ones[number]), int(others[number])

    def _place_for(self, one: int, other: int) -> int | None:
        """A row where the pair can be, most often one with either value; None if there is none."""
        axes, pair = self._axis[[one, other]], np.array([one, other])
        given = self._given[:, axes]
        possible = ((given == _FREE) | (given == pair)).all(axis=1)
        half = possible & (self._rows[:, axes] == pair).any(axis=1)
        if half.any() and self._random.random() < _HALF:
            possible = half
        places = np.flatnonzero(possible)
        return int(places[self._random.randrange(len(places))]) if len(places) else None

    def _with_pair(self, place: int, one: int, other: int) -> Row | None:
        """A row with the pair; what does not go with it gets other values. None if that does not succeed."""
        row: Row = self._rows[place].copy()
        axes = self._axis[[one, other]]
        row[axes] = one, other
        done = {*map(int, axes), *map(int, np.flatnonzero(self._given[place] != _FREE))}
        for _ in range(_REPAIRS):
            bad = ~self._together[np.ix_(row, row)]
            wrong = np.flatnonzero(bad.any(axis=1))
            if not len(wrong):
                return row
            free = [int(axis) for axis in wrong if axis not in done]
            if not free:
                return None
            axis = self._random.choice(free)
            rest = np.delete(row, axis)
            fitting = [v for v in self._values[axis] if self._together[v, row[list(done)]].all()]
            fitting = [v for v in fitting if self._together[v, rest].all()] or fitting
            if not fitting:
                return None
            row[axis] = self._random.choice(fitting)
            done.add(axis)
        return None

    def _change_of_missing(self, old: Row, new: Row) -> int:
        """How many pairs more are missing if a row is replaced by another."""
        before, after = self._shown(old), self._shown(new)
        pairs, others = (old[self._one], old[self._other]), (new[self._one], new[self._other])
        same = before & after & (pairs[0] == others[0]) & (pairs[1] == others[1])
        lost = before & ~same & self._wanted[pairs] & (self._count[pairs] == 1)
        won = after & ~same & self._lacking[others]
        return int(lost.sum()) - int(won.sum())

    def _shown(self, row: Row) -> NDArray[np.bool_]:
        """Of the pairs of a row, those for which it counts: none that one of its values hides."""
        one, other = row[self._one], row[self._other]
        shown = np.ones(len(one), np.bool_)
        for number in row[self._hiding[row]]:
            shown &= (one == number) | (other == number)
        return shown | self._hidden[one, other]

    def _pairs(self, row: Row) -> tuple[Row, Row]:
        """The pairs for which a row counts."""
        shown = self._shown(row)
        return row[self._one[shown]], row[self._other[shown]]

    def _replace(self, place: int, row: Row) -> None:
        old, new = self._pairs(self._rows[place]), self._pairs(row)
        self._count[old] -= 1
        self._count[new] += 1
        for pairs in (old, new):
            self._lacking[pairs] = self._wanted[pairs] & (self._count[pairs] == 0)
        self._rows[place] = row
