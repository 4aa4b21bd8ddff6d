"""
Bind a test method to the requirements that it tests, and expand it over its axes: one `Case` per combination.

`conformance_case` only stores the declaration on the method. When the class is complete, `DeclaresCases` replaces each
declared method by the methods of its cases.
"""

from __future__ import annotations

import inspect
import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

from parameterized import parameterized

from fsdp_conformance.contract.case import CASE_ATTRIBUTE, TIMEOUT_S, Case
from fsdp_conformance.contract.profile import COMPONENT_CHAPTERS
from fsdp_conformance.errors import ConfigError

F = TypeVar("F", bound=Callable[..., Any])

#: Attribute of a declared method that holds its `_Declaration`, until its class is complete.
_DECLARATION = "__conformance_declaration__"

#: Strings that are the same for all cases of a method, or a function of the axis values.
Strings = Sequence[str] | Callable[[dict[str, Any]], Sequence[str]]


def conformance_case(
    *requirements: str,
    chapter: str,
    slug: str | None = None,
    axes: Mapping[str, Sequence[Any]] | None = None,
    only: Callable[[dict[str, Any]], bool] | None = None,
    world_size: int | Callable[[dict[str, Any]], int] | None = None,
    needs: Strings = (),
    environment: Strings = (),
    kills: Strings = (),
    timeout_s: float = TIMEOUT_S,
    starts_early: bool = False,
    processes: str = "",
    live: str = "",
    faults: Strings = (),
) -> Callable[[F], F]:
    """
    Bind a test method of a `DeclaresCases` to requirements, and expand it over its axes.

    `axes` maps argument names to values. The method is replaced by one method for each combination of values (filtered
    by `only`), in the order of the axes. An axis named `world_size` sets the case's world size; without one,
    `world_size` must be given. `needs`, `environment`, `kills`, `faults` and `world_size` may be functions of the axis
    values.

    Raises ConfigError for a method without a docstring or a malformed requirement id, and, when the class is complete,
    for a world size that is missing or an axis value that does not make a stable id.
    """

    def decorate(method: F) -> F:
        where = f"conformance_case on {method.__qualname__}"
        title = " ".join((inspect.getdoc(method) or "").split("\n\n")[0].split())
        problems = []
        well_formed = all(len(item) == 4 and item[0] == "R" and item[1:].isdigit() for item in requirements)
        if not requirements or not well_formed:
            problems.append(f"requirements must be ids such as 'R001', the primary one first, got {requirements}")
        if not title:
            problems.append("the method must have a docstring: the expected behaviour in one statement")
        if problems:
            raise ConfigError(problems, where=where)

        def case_at(values: dict[str, Any]) -> Case:
            size = values.get("world_size", world_size(values) if callable(world_size) else world_size)
            if not isinstance(size, int) or size < 1:
                raise ConfigError([f"world_size must be a positive integer or an axis, got {size!r}"], where=where)
            stem = slug or method.__name__.removeprefix("test_").replace("_", "-")
            tags = [_tag(name, value, where) for name, value in values.items() if name != "world_size"]
            return Case(
                id="-".join([f"{requirements[0]}/{stem}", *(tag for tag in tags if tag), f"ws{size}"]),
                requirements=tuple(requirements),
                chapter=chapter,
                world_size=size,
                title=title,
                needs=_strings(needs, values),
                environment=_strings(environment, values),
                kills=_strings(kills, values),
                timeout_s=timeout_s,
                starts_early=starts_early,
                processes=processes,
                live=live or ("a component is an object of the engine" if chapter in COMPONENT_CHAPTERS else ""),
                faults=_strings(faults, values),
                axes=tuple(values.items()),
            )

        setattr(method, _DECLARATION, _Declaration(where=where, case_at=case_at, axes=axes or {}, only=only))
        return method

    return decorate


@dataclass(frozen=True, kw_only=True, slots=True)
class _Declaration:
    """A method as `conformance_case` declares it."""

    where: str
    """The method, for messages."""
    case_at: Callable[[dict[str, Any]], Case]
    """The case at one point of the axes."""
    axes: Mapping[str, Sequence[Any]]
    only: Callable[[dict[str, Any]], bool] | None

    def points(self) -> list[dict[str, Any]]:
        """The combinations of axis values that are cases."""
        combinations = [dict(zip(self.axes, point, strict=True)) for point in itertools.product(*self.axes.values())]
        return [values for values in combinations if self.only is None or self.only(values)]

    def methods(self, method: Callable[..., Any]) -> Iterator[tuple[str, Callable[..., Any]]]:
        """The method of each case, by name. Raises ConfigError for cases that would have the same name."""
        if not self.axes:
            setattr(method, CASE_ATTRIBUTE, self.case_at({}))
            yield method.__name__, method
            return
        points = self.points()
        cases = [self.case_at(values) for values in points]
        names = ["test_" + case.id.split("/", 1)[1].replace("-", "_").replace(".", "_") for case in cases]
        if len(set(names)) != len(names):
            raise ConfigError([f"axis values must make distinct names, got {sorted(names)}"], where=self.where)
        expanded: dict[str, Callable[..., Any]] = {}
        parameterized.expand(
            [tuple(values.values()) for values in points],
            name_func=lambda function, index, point: names[int(index)],
            doc_func=lambda function, index, point: function.__doc__,
            namespace=expanded,
        )(method)
        for name, case in zip(names, cases, strict=True):
            setattr(expanded[name], CASE_ATTRIBUTE, case)
            yield name, expanded[name]


class DeclaresCases:
    """A test class whose declared methods become the methods of their cases."""

    def __init_subclass__(cls, **options: Any) -> None:
        super().__init_subclass__(**options)
        declared = {name: method for name, method in vars(cls).items() if hasattr(method, _DECLARATION)}
        for name, method in declared.items():
            declaration = getattr(method, _DECLARATION)
            # The methods that replace it copy its attributes, and must not be expanded again in a subclass.
            delattr(method, _DECLARATION)
            delattr(cls, name)
            for case_name, case_method in declaration.methods(method):
                setattr(cls, case_name, case_method)


def _strings(strings: Strings, values: dict[str, Any]) -> tuple[str, ...]:
    return tuple(strings(values) if callable(strings) else strings)


def _tag(name: str, value: Any, where: str) -> str:
    """The part of a case id for an axis value: `sgd`, `prefetch`, `no-prefetch`, `k3`."""
    if isinstance(value, bool):
        return name.replace("_", "-") if value else "no-" + name.replace("_", "-")
    if isinstance(value, int):
        return f"{name.replace('_', '-')}{value}"
    text = str(value).replace("_", "-")
    if not text or not all(char.isalnum() or char in "-." for char in text) or text != text.lower():
        raise ConfigError(
            [f"axis value {name} must consist of lower-case letters, digits, '-' and '.', got {value!r}"], where=where
        )
    return text
