"""Bind a test method to the requirements that it tests, and expand it over its axes: one `Case` per combination."""

from __future__ import annotations

import inspect
import itertools
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar

from parameterized import parameterized

from fsdp_conformance.contract.case import CASE_ATTRIBUTE, TIMEOUT_S, Case
from fsdp_conformance.errors import ConfigError

F = TypeVar("F", bound=Callable[..., Any])


def conformance_case(
    *requirements: str,
    chapter: str,
    slug: str | None = None,
    axes: Mapping[str, Sequence[Any]] | None = None,
    only: Callable[[dict[str, Any]], bool] | None = None,
    world_size: int | Callable[[dict[str, Any]], int] | None = None,
    needs: Sequence[str] | Callable[[dict[str, Any]], Sequence[str]] = (),
    environment: Sequence[str] | Callable[[dict[str, Any]], Sequence[str]] = (),
    kills: Sequence[str] | Callable[[dict[str, Any]], Sequence[str]] = (),
    timeout_s: float = TIMEOUT_S,
    processes: str = "",
) -> Callable[[F], F | None]:
    """
    Bind a test method to requirements, and expand it over its axes.

    `axes` maps argument names to values. The decorated method is replaced by one method for each combination of values
    (filtered by `only`), in the order of the axes. An axis named `world_size` sets the case's world size; without one,
    `world_size` must be given. `needs`, `environment`, `kills` and `world_size` may be functions of the axis values.

    Raises ConfigError for a method without a docstring, a malformed requirement id, or an axis value that does not make
    a stable id.
    """
    caller = inspect.currentframe()
    namespace = caller.f_back.f_locals if caller is not None and caller.f_back is not None else None

    def decorate(method: F) -> F | None:
        stem = slug or method.__name__.removeprefix("test_").replace("_", "-")
        title = " ".join((inspect.getdoc(method) or "").split("\n\n")[0].split())
        where = f"conformance_case on {method.__qualname__}"
        problems = []
        well_formed = all(len(item) == 4 and item[0] == "R" and item[1:].isdigit() for item in requirements)
        if not requirements or not well_formed:
            problems.append(f"requirements must be ids such as 'R001', the primary one first, got {requirements}")
        if not title:
            problems.append("the method must have a docstring: the expected behaviour in one statement")
        if problems:
            raise ConfigError(problems, where=where)

        def make(values: dict[str, Any]) -> Case:
            size = values.get("world_size", world_size(values) if callable(world_size) else world_size)
            if not isinstance(size, int) or size < 1:
                raise ConfigError([f"world_size must be a positive integer or an axis, got {size!r}"], where=where)
            tags = [_tag(name, value, where) for name, value in values.items() if name != "world_size"]
            return Case(
                id="-".join([f"{requirements[0]}/{stem}", *(tag for tag in tags if tag), f"ws{size}"]),
                requirements=tuple(requirements),
                chapter=chapter,
                world_size=size,
                title=title,
                needs=tuple(needs(values) if callable(needs) else needs),
                environment=tuple(environment(values) if callable(environment) else environment),
                kills=tuple(kills(values) if callable(kills) else kills),
                timeout_s=timeout_s,
                processes=processes,
                axes=tuple(values.items()),
            )

        if not axes:
            setattr(method, CASE_ATTRIBUTE, make({}))
            return method
        combinations = [dict(zip(axes, point, strict=True)) for point in itertools.product(*axes.values())]
        combinations = [values for values in combinations if only is None or only(values)]
        names: list[str] = []

        def name_method(function: Callable[..., Any], num: str, param: Any) -> str:
            case = make(combinations[int(num)])
            names.append("test_" + case.id.split("/", 1)[1].replace("-", "_").replace(".", "_"))
            return names[-1]

        if namespace is None:
            raise ConfigError(["no enclosing class body found"], where=where)
        parameterized.expand(
            [tuple(values.values()) for values in combinations], name_func=name_method, namespace=namespace
        )(method)
        if len(set(names)) != len(names):
            raise ConfigError([f"axis values must make distinct names, got {sorted(names)}"], where=where)
        for name, values in zip(names, combinations, strict=True):
            setattr(namespace[name], CASE_ATTRIBUTE, make(values))
        return None

    return decorate


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
