"""
Rows that together contain every possible pair of values, or every triple.

A row is a choice on every axis. One with a value that hides others (one rank, where nothing is sharded) counts only for
combinations with that value, because a defect of two other values would not show in it. This is masking in covering
arrays (Yilmaz, Dumlu, Cohen and Porter, "Reducing masking effects in combinatorial interaction testing", 2014).

`covering` adds rows to those that exist, so that frozen rows keep their place when an axis is added. Greedy, as in AETG
(Cohen et al., 1997): of several candidates for a row, the one with the most combinations that are not covered yet.

Sets of values are the bits of an integer, so that "with which of the chosen values is this one left" is one operation.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable, Iterator, Mapping
from itertools import combinations

from fsdp_conformance.scenarios.space import Choice, Space

#: Of so many candidates for a row, the best is taken.
CANDIDATES = 6

#: Some values by number, in order.
Numbers = tuple[int, ...]


class Coverage:
    """
    The combinations of `strength` values (2 or 3) that are possible, and those among them that no row has had.

    `declared`: only values that an engine with these capabilities can be asked for; None: all of them.
    """

    def __init__(
        self,
        space: Space,
        declared: frozenset[str] | None = None,
        *,
        strength: int = 2,
        rows: Iterable[Choice] = (),
    ) -> None:
        self.space = space
        self.strength = strength
        self.declared = declared
        self.items = [(axis.name, name) for axis in space.axes for name in space.offered(axis, declared)]
        self._number = {item: number for number, item in enumerate(self.items)}
        self._hiding = sum(1 << number for number, item in enumerate(self.items) if space.value_of[item].hides)
        self._hidden: dict[Numbers, int] = {}
        """In the form of `_left`: the combinations that are possible only beside a value that hides them."""
        self._left = self._possible()
        """One value less than the combinations have, to the values, as bits, with which that is left."""
        self.possible = self.left
        """How many combinations are possible."""
        for row in rows:
            self.add(row)

    def _possible(self) -> dict[Numbers, int]:
        compatible, demands = self.compatible(), self._demands()
        demanding = sum(1 << number for number in demands)
        partners = list(compatible)
        for one, bits in enumerate(compatible):
            for other in positions(bits if demanding & 1 << one else bits & demanding):
                if not _can_be_completed(1 << one | 1 << other, compatible, demands):
                    partners[one] &= ~(1 << other)
                    partners[other] &= ~(1 << one)
        if self.strength == 2:
            pairs: dict[Numbers, int] = {(number,): bits for number, bits in enumerate(partners)}
            self._hidden = self._always_hidden(pairs, partners, demands)
            return pairs
        triples: dict[Numbers, int] = {}
        for one, bits in enumerate(partners):
            for other in (other for other in positions(bits) if other > one):
                pair = 1 << one | 1 << other
                third = bits & partners[other]
                # Conflicts are between two values, and so were seen when pairs were.
                for number in positions(third if pair & demanding else third & demanding):
                    if not _can_be_completed(pair | 1 << number, partners, demands):
                        third &= ~(1 << number)
                triples[one, other] = third
        self._hidden = self._always_hidden(triples, partners, demands)
        return triples

    def _always_hidden(
        self, combinations_: dict[Numbers, int], partners: list[int], demands: dict[int, list[tuple[int, int]]]
    ) -> dict[Numbers, int]:
        """Of some combinations, those that have one of the values they demand only where that hides them."""
        open_ = {number: [(axis, right & ~self._hiding) for axis, right in of] for number, of in demands.items()}
        affected = 0
        while True:
            more = sum(
                1 << number for number, of in demands.items() if any(r & (self._hiding | affected) for _, r in of)
            )
            if more == affected:
                break
            affected = more
        hidden: dict[Numbers, int] = {}
        for rest, bits in combinations_.items():
            chosen = sum(1 << number for number in rest)
            for number in positions(bits if chosen & affected else bits & affected):
                if not _can_be_completed(chosen | 1 << number, partners, open_):
                    hidden[rest] = hidden.get(rest, 0) | 1 << number
        return hidden

    def compatible(self) -> list[int]:
        """For each value, those of other axes that neither a conflict nor what a value demands rules out."""
        everything = (1 << len(self.items)) - 1
        of_axis = {
            axis: self.bits_of_values(axis, [v.name for v in of.values]) for axis, of in self.space.by_name.items()
        }
        compatible = [everything & ~of_axis[axis] for axis, _ in self.items]

        def exclude(values: int, others: int) -> None:
            for number in positions(values):
                compatible[number] &= ~others
            for number in positions(others):
                compatible[number] &= ~values

        for number, item in enumerate(self.items):
            for axis, right in self.space.value_of[item].with_.items():
                exclude(1 << number, of_axis[axis] & ~self.bits_of_values(axis, right))
        for conflict in self.space.conflicts:
            exclude(*(self.bits_of_values(axis, names) for axis, names in conflict.of.items()))
        return compatible

    def _demands(self) -> dict[int, list[tuple[int, int]]]:
        """Of values that make sense only beside others: the values of the other axis, and the right ones of them."""
        return {
            number: [
                (
                    self.bits_of_values(axis, self.space.offered(self.space.by_name[axis], self.declared)),
                    self.bits_of_values(axis, names),
                )
                for axis, names in self.space.value_of[item].with_.items()
            ]
            for number, item in enumerate(self.items)
            if self.space.value_of[item].with_
        }

    @property
    def left(self) -> int:
        """How many combinations no row has had."""
        return sum(bits.bit_count() for bits in self._left.values()) // self.strength

    @property
    def covered(self) -> int:
        """How many combinations rows have had."""
        return self.possible - self.left

    def add(self, row: Choice) -> int:
        """Count a row's combinations as covered; how many of them no other row has had."""
        chosen = self.bits_of(row)
        new = 0
        for rest in combinations(positions(chosen), self.strength - 1):
            bits = self._new(rest, chosen)
            new += bits.bit_count()
            if bits:
                self._left[rest] &= ~bits
        return new // self.strength

    def _new(self, rest: Numbers, chosen: int) -> int:
        """The values of a row with which the rest of a combination is left, unless another one of the row hides it."""
        bits = self._left.get(rest, 0) & chosen
        hiding = chosen & self._hiding
        if not bits or not hiding:
            return bits
        for number in rest:
            hiding &= ~(1 << number)
        if not hiding:
            return bits
        last = hiding if hiding.bit_count() == 1 else 0
        return bits & (last | self._hidden.get(rest, 0))

    def gain(self, chosen: int, number: int) -> int:
        """
        How many combinations a value would add to those of the values that are chosen, which are given as bits.

        Less than none for a value that hides them.
        """
        together = chosen | 1 << number
        if 1 << number & self._hiding:
            return self._gain_of(together) - self._gain_of(chosen)
        if self.strength == 2:
            return self._new((number,), together).bit_count()
        pairs = ((min(number, other), max(number, other)) for other in positions(chosen))
        # Each triple is seen from both of its other values.
        return sum(self._new(pair, together).bit_count() for pair in pairs) // 2

    def gain_of(self, row: Choice) -> int:
        """How many combinations a row has that no other row has had."""
        return self._gain_of(self.bits_of(row))

    def _gain_of(self, chosen: int) -> int:
        rests = combinations(positions(chosen), self.strength - 1)
        return sum(self._new(rest, chosen).bit_count() for rest in rests) // self.strength

    def bits_of(self, choice: Choice) -> int:
        """The values of a choice as bits; those that the engine cannot be asked for are left out."""
        return sum(1 << self._number[item] for item in choice.items() if item in self._number)

    def bits_of_values(self, axis: str, names: Iterable[str]) -> int:
        """The values of an axis as bits; those that the engine cannot be asked for are left out."""
        return sum(1 << self._number[axis, name] for name in names if (axis, name) in self._number)

    def number_of(self, axis: str, name: str) -> int:
        """The number of a value."""
        return self._number[axis, name]

    def scarcest(self, without: set[Numbers]) -> Numbers | None:
        """A combination that is left, of values that have much left; always the same one. None if there is none."""
        for rest in sorted(self._left, key=lambda rest: (-self._left[rest].bit_count(), rest)):
            for number in sorted(positions(self._left[rest]), key=lambda n: -self._left.get((n,), 0).bit_count()):
                combination = tuple(sorted((*rest, number)))
                if combination not in without:
                    return combination
        return None

    def is_left(self, numbers: Numbers) -> bool:
        """True if no row has had this combination."""
        return bool(self._left.get(numbers[:-1], 0) & 1 << numbers[-1])

    def words(self, numbers: Numbers) -> dict[str, str]:
        """Values as a choice."""
        return dict(self.items[number] for number in numbers)

    def combinations_left(self) -> Iterator[dict[str, str]]:
        """The combinations that no row has had, each once, as choices."""
        return self._combinations(self._left)

    def always_hidden(self) -> Iterator[dict[str, str]]:
        """The combinations that are possible only beside a value that hides others, and so count there, each once."""
        return self._combinations(self._hidden)

    def _combinations(self, numbers: Mapping[Numbers, int]) -> Iterator[dict[str, str]]:
        for rest, bits in numbers.items():
            for number in positions(bits):
                if number > rest[-1]:
                    yield self.words((*rest, number))


def covering(
    coverage: Coverage, *, seed: int = 0, accepts: Callable[[dict[str, str]], bool] = lambda row: True
) -> Iterator[dict[str, str]]:
    """
    Rows that cover what is left, each counted as soon as it is taken, until nothing is left that a row can cover.

    `accepts` may reject a row for reasons that the space does not know; it is then tried again with other values, and
    with random ones, a few times. A combination that only such rows have stays left.
    """
    random_ = random.Random(seed)
    hopeless: set[Numbers] = set()
    while (first := coverage.scarcest(hopeless)) is not None:
        row = best_row(coverage, random_, start=coverage.words(first), accepts=accepts)
        if row is None:
            hopeless.add(first)
            continue
        coverage.add(row)
        if coverage.is_left(first):
            hopeless.add(first)
        yield row


def best_row(
    coverage: Coverage,
    random_: random.Random,
    *,
    start: Choice,
    accepts: Callable[[dict[str, str]], bool] = lambda row: True,
    candidates: int = CANDIDATES,
) -> dict[str, str] | None:
    """A row with the values of `start` and many combinations that are left; None if no acceptable one was made."""
    rows = [row for _ in range(candidates) if (row := _filled(coverage, random_, start)) is not None]
    rows.sort(key=coverage.gain_of, reverse=True)
    accepted = next((row for row in rows if accepts(row)), None)
    if accepted is not None or not rows:
        return accepted
    # What is never accepted is always left, so that the rows that add most have it again and again.
    others = (_filled(coverage, random_, start, at_random=True) for _ in range(candidates))
    return next((row for row in others if row is not None and accepts(row)), None)


def _filled(
    coverage: Coverage, random_: random.Random, start: Choice, *, at_random: bool = False
) -> dict[str, str] | None:
    """A row that begins with some values, and has the value next that adds most, on whichever axis it is, or any."""
    space = coverage.space
    choice: dict[str, str] = dict(start)
    chosen = coverage.bits_of(choice)
    left = {axis.name: space.offered(axis, coverage.declared) for axis in space.axes if axis.name not in choice}
    # A row that is made for one combination must not hide it, unless every row does.
    hiding = len(start) < coverage.strength or space.completed(start, coverage.declared, hiding=False) is None
    while left:
        gains = [
            (0 if at_random else coverage.gain(chosen, coverage.number_of(axis, name)), random_.random(), axis, name)
            for axis, names in left.items()
            for name in names
            if hiding or not space.value_of[axis, name].hides
        ]
        for _, _, axis, name in sorted(gains, reverse=True):
            tried = {**choice, axis: name}
            if space.completed(tried, coverage.declared, hiding=hiding) is not None:
                choice, chosen = tried, chosen | 1 << coverage.number_of(axis, name)
                del left[axis]
                break
        else:
            return None
    return choice


def _can_be_completed(chosen: int, partners: list[int], demands: Mapping[int, list[tuple[int, int]]]) -> bool:
    """True if values that are possible two by two have what all of them demand, given as bits."""
    for number in positions(chosen):
        for of_axis, right in demands.get(number, ()):
            if not chosen & of_axis:
                return any(
                    chosen & ~partners[candidate] == 0 and _can_be_completed(chosen | 1 << candidate, partners, demands)
                    for candidate in positions(right)
                )
    return True


def positions(number: int) -> Iterator[int]:
    """The positions of its bits, from the lowest."""
    while number:
        lowest = number & -number
        yield lowest.bit_length() - 1
        number ^= lowest
