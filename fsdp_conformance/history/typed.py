"""
Checking that a value which came from elsewhere has the types that its class declares, down to the last field.

A history that a rank has sent may hold anything. Oracles read it as its dataclasses say, and an oracle that stumbles
would look like a mistake of the suite.
"""

from __future__ import annotations

import functools
import types
from collections.abc import Iterator
from dataclasses import is_dataclass
from typing import Any, Union, get_args, get_origin, get_type_hints

_SEQUENCES = (list, tuple, set, frozenset)


def mistakes(value: Any, hint: Any, place: str) -> Iterator[str]:
    """Where the value, or something in it, is of another type than `hint`, one phrase each; `place` names the value."""
    origin, arguments = get_origin(hint), get_args(hint)
    if hint is Any:
        return
    if origin in (Union, types.UnionType):
        if all(next(mistakes(value, argument, place), None) for argument in arguments):
            # Of a dict or list that is nearly right, say what is wrong in it.
            of_kind = [each for each in arguments if isinstance(value, get_origin(each) or _class(each))]
            yield next(mistakes(value, of_kind[0], place)) if of_kind else _mistake(value, hint, place)
    elif origin is dict:
        yield from _in_dict(value, arguments, hint, place)
    elif origin in _SEQUENCES:
        yield from _in_sequence(value, origin, arguments, hint, place)
    elif not isinstance(value, _class(hint)) or (isinstance(value, bool) and hint in (int, float)):
        yield _mistake(value, hint, place)
    elif isinstance(hint, type) and is_dataclass(hint):
        for name, field_hint in _hints_of(hint).items():
            yield from mistakes(getattr(value, name), field_hint, f"{place}.{name}")


def _in_dict(value: Any, arguments: tuple[Any, ...], hint: Any, place: str) -> Iterator[str]:
    if not isinstance(value, dict):
        yield _mistake(value, hint, place)
        return
    for key, item in value.items():
        yield from mistakes(key, arguments[0], f"a key of {place}")
        yield from mistakes(item, arguments[1], f"{place}[{key!r}]")


def _in_sequence(value: Any, origin: Any, arguments: tuple[Any, ...], hint: Any, place: str) -> Iterator[str]:
    hints = arguments[:1] * len(value) if isinstance(value, origin) else ()
    if origin is tuple and arguments[-1] is not Ellipsis:
        hints = arguments
    if not isinstance(value, origin) or len(hints) != len(value):
        yield _mistake(value, hint, place)
        return
    for index, (item, item_hint) in enumerate(zip(value, hints, strict=True)):
        yield from mistakes(item, item_hint, f"{place}[{index}]")


def _class(hint: Any) -> Any:
    """The class, or classes, that `isinstance` takes for a plain hint."""
    if hint is None:
        return types.NoneType
    return (int, float) if hint is float else hint


def _mistake(value: Any, hint: Any, place: str) -> str:
    name = hint.__name__ if isinstance(hint, type) and not get_args(hint) else str(hint).replace("typing.", "")
    return f"{place} as {name}, got {type(value).__name__}"


@functools.cache
def _hints_of(kind: type[Any]) -> dict[str, Any]:
    return get_type_hints(kind)
