"""
Typed values to JSON and back.

    plain           a value in terms of JSON: dicts, lists and tuples, strings, numbers
    encode          those terms as text
    parsed          text in terms of JSON
    typed           those terms as a value of a dataclass, or of any other annotation
    unknown_keys    a look at what another version may have written

Reading is strict: unknown and duplicate keys, wrong types, NaN, lone surrogates and deep nesting raise ValueError.
"""

from __future__ import annotations

import json
import math
import re
import typing
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import is_dataclass
from functools import cache, partial
from typing import Any, TypeVar

import msgspec

T = TypeVar("T")

#: Lists and objects nested deeper than this are refused. What we write has less than ten levels.
MAX_NESTING = 64

_SURROGATE = re.compile("[\ud800-\udfff]")
_NO_BRACKETS = re.compile(r"[^][{}]+")


def plain(value: Any, *, default: Callable[[Any], Any] | None = None) -> Any:
    """
    A dataclass, or a container of some, in terms of JSON. Tuples stay tuples, and infinities and NaN stay numbers.

    `default` is called for what has no form in JSON; without it, that raises TypeError.
    """
    return msgspec.to_builtins(value, str_keys=True, enc_hook=partial(_of_base, default=default))


def _of_base(value: Any, *, default: Callable[[Any], Any] | None) -> Any:
    """An instance of a subclass, such as `torch.__version__`, as one of the builtin class, as msgspec requires."""
    for base in (float, int):
        if isinstance(value, base):
            return base(value)
    if isinstance(value, str):
        return str.__str__(value)
    if isinstance(value, Mapping):
        return dict(value)
    if default is None:
        raise TypeError(f"{type(value).__name__} cannot be written as JSON")
    return default(value)


def parsed(text: str, *, with_infinities: bool = False) -> Any:
    """The content of a JSON text, with Python's `Infinity` and `NaN` if asked. Raises ValueError for any other text."""
    try:
        content = json.loads(text, object_pairs_hook=_without_duplicates)
        # json accepts NaN and lone surrogates, msgspec does not.
        if not with_infinities:
            msgspec.json.decode(text)
    except RecursionError:
        raise ValueError("it is nested too deeply") from None
    outside_strings = "".join(text.replace("\\\\", "").replace('\\"', "").split('"')[::2])
    brackets = _NO_BRACKETS.sub("", outside_strings)
    for _ in range(MAX_NESTING):
        if not brackets:
            return content
        brackets = brackets.replace("[]", "").replace("{}", "")
    raise ValueError(f"it is nested more than {MAX_NESTING} levels deep")


def _without_duplicates(pairs: Sequence[tuple[str, Any]]) -> dict[str, Any]:
    content = dict(pairs)
    if len(content) < len(pairs):
        keys = [key for key, _ in pairs]
        raise ValueError(f"duplicate key {next(key for key in content if keys.count(key) > 1)!r}")
    return content


def typed(kind: type[T], data: Any) -> T:
    """
    `data`, in terms of JSON, as a value of type `kind`: the inverse of `plain`.

    Raises ValueError for a wrong type, a missing key, and a key that `kind` does not have.
    """
    value = msgspec.convert(data, kind)
    unknown = list(_unknown_keys(data, plain(value), "$"))
    if unknown:
        raise ValueError(f"unknown key{'s' * (len(unknown) > 1)} {', '.join(unknown)}")
    return value


def _unknown_keys(data: Any, accepted: Any, path: str) -> Iterator[str]:
    """The keys of `data` that are not in `accepted`, which has all keys of the type. msgspec ignores such keys."""
    if data == accepted:
        return
    if isinstance(data, Mapping):
        for key, item in data.items():
            if key in accepted:
                yield from _unknown_keys(item, accepted[key], f"{path}.{key}")
            else:
                yield f"`{path}.{key}`"
    elif isinstance(data, list | tuple):
        for index, (item, other) in enumerate(zip(data, accepted, strict=True)):
            yield from _unknown_keys(item, other, f"{path}[{index}]")


def unknown_keys(kind: Any, data: Mapping[str, Any], *, deep: bool = False) -> list[str]:
    """
    The keys of `data` that the dataclass `kind` does not have; with `deep`, also those inside, each with its path.

    Any key may be missing. Raises ValueError for a wrong type.
    """
    value = msgspec.convert(data, _partial(kind))
    if deep:
        return list(_unknown_keys(data, plain(value), "$"))
    return [key for key in data if key not in kind.__dataclass_fields__]


@cache
def _partial(kind: Any) -> Any:
    """A TypedDict of the dataclass, and of those in its fields, in which keys may be missing and others are ignored."""
    hints: dict[str, Any] = typing.get_type_hints(kind)
    nested = {name for name, hint in hints.items() if is_dataclass(hint)}
    fields = {name: _partial(hint) if name in nested else hint for name, hint in hints.items()}
    return typing.TypedDict(kind.__name__, fields, total=False)  # type: ignore[operator]


def encode(content: Mapping[str, Any], *, indent: int | None = None) -> str:
    """
    One line, without its end; with `indent`, several.

    Values that JSON cannot express become strings, and lone surrogates their escapes, so that no line is lost. Numbers
    are as `json` writes them, since hashes of run files depend on it.
    """
    separators = (",", ":") if indent is None else None
    text = json.dumps(
        _finite(content), ensure_ascii=False, separators=separators, indent=indent, default=str, allow_nan=False
    )
    return _SURROGATE.sub(lambda match: f"\\\\u{ord(match[0]):04x}", text)


def _finite(value: Any) -> Any:
    """The value with infinities and NaN as strings, because JSON has neither."""
    if isinstance(value, float) and not math.isfinite(value):
        return repr(value)
    if isinstance(value, Mapping):
        return {str(key): _finite(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(item) for item in value]
    return value
