"""
Axes, values and conflicts, and whether a choice of values is possible.

A `Space` is data. A scenario chooses one value on each axis; it is written as the values that are not the plain ones.
The first value of an axis is its plain one. It needs no capability, so what an engine does not declare can always be
replaced by something plainer.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property

from fsdp_conformance import capability
from fsdp_conformance.errors import ConfigError

#: Axis to value. Axes that are missing have not been decided.
Choice = Mapping[str, str]


@dataclass(frozen=True, kw_only=True, slots=True)
class Value:
    """One value of an axis."""

    name: str
    needs: frozenset[str] = frozenset()
    """The capabilities that an engine must declare for it."""
    with_: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    """Axis to values: it makes sense only beside one of these."""
    hides: bool = False
    """True if it switches off what other values are about, so a row with it covers only the pairs of this value."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Axis:
    """One thing that differs between trainings."""

    name: str
    area: str
    """"engine", "model", "training" or "events"."""
    values: tuple[Value, ...]

    @property
    def plain(self) -> str:
        """The name of its plain value."""
        return self.values[0].name


@dataclass(frozen=True, kw_only=True, slots=True)
class Conflict:
    """Values of two axes that cannot be chosen at once."""

    reason: str
    of: Mapping[str, tuple[str, ...]]
    """Axis to values, for two axes: none of the one goes with any of the other."""

    def holds(self, choice: Choice) -> bool:
        """True if the choice is impossible because of it."""
        return all(choice.get(axis) in values for axis, values in self.of.items())


@dataclass(frozen=True, kw_only=True)
class Space:
    """All axes, and all conflicts. Raises ConfigError, with every problem, if they contradict each other."""

    axes: tuple[Axis, ...]
    conflicts: tuple[Conflict, ...] = ()

    def __post_init__(self) -> None:
        problems = list(self._problems())
        if problems:
            raise ConfigError(problems, where="scenario space")

    def _problems(self) -> Iterator[str]:
        names = [axis.name for axis in self.axes]
        yield from (
            f"axes must be distinct, got {name!r} twice" for name in sorted(set(names)) if names.count(name) > 1
        )
        by_axis = {axis.name: [value.name for value in axis.values] for axis in self.axes}
        for axis in self.axes:
            if len(set(by_axis[axis.name])) < max(2, len(axis.values)):
                yield f"{axis.name} must have at least two distinct values, got {by_axis[axis.name]}"
            first = axis.values[0]
            if first.needs or first.with_ or first.hides:
                yield f"{axis.name}: its first value must need and hide nothing, got {first}"
            for value in axis.values:
                yield from (
                    f"{axis.name}: {flag!r} is not a capability" for flag in capability.unknown(tuple(value.needs))
                )
        yield from (
            f"{conflict.reason}: must be between two axes, got {', '.join(conflict.of)}"
            for conflict in self.conflicts
            if len(conflict.of) != 2
        )
        plain = {(axis.name, axis.plain) for axis in self.axes if axis.values}
        for conflict in self.conflicts:
            # Otherwise a scenario could not simply be made plainer.
            yield from (
                f"{conflict.reason}: must not name plain values, got {axis}: {value}"
                for axis, values in conflict.of.items()
                for value in values
                if (axis, value) in plain
            )
        uses = [(f"{axis.name}: {value.name}", value.with_) for axis in self.axes for value in axis.values]
        uses += [(conflict.reason, conflict.of) for conflict in self.conflicts]
        for where, mentioned in uses:
            for axis_name, values in mentioned.items():
                unknown = [value for value in values if value not in by_axis.get(axis_name, ())]
                if unknown or axis_name not in by_axis:
                    yield f"{where}: must name axes and values of the space, got {axis_name!r}: {unknown or values}"

    @cached_property
    def by_name(self) -> dict[str, Axis]:
        """The axes by name."""
        return {axis.name: axis for axis in self.axes}

    @cached_property
    def value_of(self) -> dict[tuple[str, str], Value]:
        """The values by axis and name."""
        return {(axis.name, value.name): value for axis in self.axes for value in axis.values}

    @cached_property
    def plain(self) -> dict[str, str]:
        """The plainest scenario."""
        return {axis.name: axis.plain for axis in self.axes}

    @cached_property
    def _conflicts_with(self) -> dict[tuple[str, str], list[Conflict]]:
        """The conflicts that a value is part of."""
        by_value: dict[tuple[str, str], list[Conflict]] = {}
        for conflict in self.conflicts:
            for axis, values in conflict.of.items():
                for value in values:
                    by_value.setdefault((axis, value), []).append(conflict)
        return by_value

    def without(self, values: Collection[tuple[str, str]]) -> Space:
        """The space without some values, as axis and name, and without those that make sense only beside them."""
        gone = set(values)
        while True:
            orphans = {
                (axis.name, value.name)
                for axis in self.axes
                for value in axis.values
                if any(all((other, name) in gone for name in names) for other, names in value.with_.items())
            }
            if orphans <= gone:
                break
            gone |= orphans

        def kept(of: Mapping[str, tuple[str, ...]]) -> dict[str, tuple[str, ...]]:
            return {axis: tuple(name for name in names if (axis, name) not in gone) for axis, names in of.items()}

        axes = [
            replace(
                axis,
                values=tuple(
                    replace(value, with_=kept(value.with_))
                    for value in axis.values
                    if (axis.name, value.name) not in gone
                ),
            )
            for axis in self.axes
        ]
        conflicts = [replace(conflict, of=kept(conflict.of)) for conflict in self.conflicts]
        return Space(
            axes=tuple(axis for axis in axes if len(axis.values) > 1),
            conflicts=tuple(conflict for conflict in conflicts if all(conflict.of.values())),
        )

    def whole(self, choice: Choice) -> dict[str, str]:
        """The scenario with plain values where the choice has none. Raises ConfigError for unknown names."""
        unknown = [f"{axis}: {value}" for axis, value in choice.items() if (axis, value) not in self.value_of]
        if unknown:
            raise ConfigError([f"must be axes and values of the space, got {', '.join(unknown)}"], where="scenario")
        return {**self.plain, **choice}

    def special(self, choice: Choice) -> dict[str, str]:
        """The values that are not plain."""
        return {axis.name: choice[axis.name] for axis in self.axes if choice.get(axis.name, axis.plain) != axis.plain}

    def needs(self, choice: Choice) -> frozenset[str]:
        """The capabilities that an engine must declare for all of it."""
        return frozenset().union(*(self.value_of[item].needs for item in choice.items()))

    def offered(self, axis: Axis, declared: frozenset[str] | None) -> list[str]:
        """The values of an axis that an engine with these capabilities can be asked for; None: all."""
        return [value.name for value in axis.values if declared is None or value.needs <= declared]

    def why_impossible(self, choice: Choice) -> str | None:
        """The reason for which the values that are chosen cannot be together; None if they can."""
        for axis, value in choice.items():
            for conflict in self._conflicts_with.get((axis, value), ()):
                if conflict.holds(choice):
                    return conflict.reason
            for other, values in self.value_of[axis, value].with_.items():
                if other in choice and choice[other] not in values:
                    return f"{axis}: {value} makes sense only with {other}: {' or '.join(values)}"
        return None

    def completed(
        self, choice: Choice, declared: frozenset[str] | None = None, *, hiding: bool = True
    ) -> dict[str, str] | None:
        """
        The plainest scenario that contains the choice, of what an engine with these capabilities can be asked for.

        None if there is none. `hiding`: False if no value may be added that hides others.
        """
        if self.why_impossible(choice) is not None:
            return None
        for axis, value in choice.items():
            for other, values in self.value_of[axis, value].with_.items():
                if other in choice:
                    continue
                allowed = [
                    name
                    for name in self.offered(self.by_name[other], declared)
                    if name in values and (hiding or not self.value_of[other, name].hides)
                ]
                candidates = (self.completed({**choice, other: name}, declared, hiding=hiding) for name in allowed)
                return next((candidate for candidate in candidates if candidate is not None), None)
        whole = self.whole(choice)
        # A plain value is in conflict only where a value demands another one, and that has been decided.
        return whole if self.why_impossible(whole) is None else None

    def adapted(self, choice: Choice, declared: frozenset[str]) -> dict[str, str]:
        """
        The scenario without what an engine with these capabilities cannot be asked for.

        Values that it can be asked for stay, so rows that contain a pair of such values still do. Where one of them
        demands a value that does not stay, it gets another one of those that it makes sense with.
        """
        rest = {axis: name for axis, name in choice.items() if self._can_be_asked(axis, name, declared)}
        completed = self.completed(rest, declared)
        return self.without_orphans(self.whole(rest)) if completed is None else completed

    def _can_be_asked(self, axis: str, name: str, declared: frozenset[str]) -> bool:
        """True if there is a scenario with this value for an engine with these capabilities."""
        key = axis, name, declared
        if key not in self._askable:
            needed = self.value_of[axis, name].needs
            self._askable[key] = needed <= declared and self.completed({axis: name}, declared) is not None
        return self._askable[key]

    @cached_property
    def _askable(self) -> dict[tuple[str, str, frozenset[str]], bool]:
        """Answers of `_can_be_asked`: rows ask the same of a hundred values again and again."""
        return {}

    def simpler(self, choice: Choice) -> Iterator[dict[str, str]]:
        """Scenarios with one value less that is not plain, or with several if one needs the others."""
        for axis in self.special(choice):
            remaining = {name: value for name, value in choice.items() if name != axis}
            plainer = self.without_orphans({**remaining, axis: self.by_name[axis].plain})
            if plainer != dict(choice) and self.why_impossible(plainer) is None:
                yield plainer

    def without_orphans(self, choice: Choice) -> dict[str, str]:
        """The choice without the values that no longer make sense."""
        rest = dict(choice)
        while True:
            orphans = [
                axis
                for axis, value in rest.items()
                if any(rest.get(other) not in values for other, values in self.value_of[axis, value].with_.items())
            ]
            if not orphans:
                return rest
            for axis in orphans:
                rest[axis] = self.by_name[axis].plain


def value(name: str, *needs: str, hides: bool = False, **with_: str | Iterable[str]) -> Value:
    """A value that needs these capabilities, and makes sense only with others: `ranks="4"`, or several of an axis."""
    conditions = {
        axis.replace("_", " "): (values,) if isinstance(values, str) else tuple(values)
        for axis, values in with_.items()
    }
    return Value(name=name, needs=frozenset(needs), with_=conditions, hides=hides)


def axis(name: str, area: str, *values: Value | str) -> Axis:
    """An axis; a value without needs may be given as its name."""
    return Axis(name=name, area=area, values=tuple(v if isinstance(v, Value) else Value(name=v) for v in values))
