"""
Does a class keep to the adapter protocol? Read from the class alone: nothing is set up, no engine is imported.

Every problem is reported at once, as a sentence about the adapter: nothing here says anything about an implementation.
`smoke` goes on from here and watches an adapter at work.
"""

from __future__ import annotations

import difflib
import inspect
from collections.abc import Iterator, Mapping
from typing import Any

from fsdp_conformance.adapters.base import Adapter
from fsdp_conformance.capability import CAPABILITIES, unknown
from fsdp_conformance.errors import AdapterError

#: How the suite calls each method, `self` left out: positional arguments, keyword arguments.
_CALLS: dict[str, tuple[tuple[tuple[Any, ...], dict[str, Any]], ...]] = {
    "setup": (((None, None, None), {}),),
    "microbatch": (((True,), {"reduced": True}),),
    "forward": (((None, None), {"mask": None}),),
    "backward": (((None,), {"retain_graph": False}),),
    "step": (((), {}), ((), {"max_norm": 1.0}), ((), {"max_norm": 1.0, "norm_type": 2.0})),
    "full_params": (((), {}),),
    "local_tensors": (((), {}),),
    "full_grads": (((), {}),),
    "full_buffers": (((), {}),),
    "full_optim_state": (((), {}),),
    "write_params": ((({},), {}),),
    "unit_is_unsharded": ((("",), {}),),
    "unshard": ((("",), {}),),
    "reshard": ((("",), {}),),
    "wrap_again": (((), {}),),
    "module": (((), {}),),
    "parameters": (((), {}),),
    "set_requires_grad": ((((),), {}),),
    "drop_grads": ((((),), {}),),
    "train": (((True,), {}),),
    "close": (((), {}),),
}
#: Class variables: what they should be, in words, and the check.
_VARIABLES: dict[str, tuple[str, Any]] = {
    "name": ("a str", lambda value: isinstance(value, str)),
    "capabilities": ("a frozenset of flags", lambda value: _is_collection(value, set | frozenset)),
    "declines_on": (
        "a dict of device type to a frozenset of flags",
        lambda value: (
            isinstance(value, Mapping)
            and all(isinstance(key, str) and _is_collection(flags, set | frozenset) for key, flags in value.items())
        ),
    ),
    "declines": ("a frozenset of flags", lambda value: _is_collection(value, set | frozenset)),
    "environment": (
        "a dict of str to str",
        lambda value: (
            isinstance(value, Mapping) and all(isinstance(item, str) for pair in value.items() for item in pair)
        ),
    ),
    "shims": ("a tuple of sentences", lambda value: _is_collection(value, tuple | list)),
    "preload": ("a tuple of module names", lambda value: _is_collection(value, tuple | list)),
    "padding": ("a number, at least 0", lambda value: isinstance(value, int | float) and value >= 0),
    "max_unsharded": ("an int, at least 0", lambda value: isinstance(value, int) and value >= 0),
    "grad_reduction_of_accumulation": ('"local" or "reduced"', lambda value: value in ("local", "reduced")),
}


def validate(adapter: type[Adapter]) -> list[str]:
    """Everything about the class that breaks the protocol, one sentence each; empty if nothing does."""
    return [
        *_variables(adapter),
        *_flags(adapter),
        *_abstract(adapter),
        *_signatures(adapter),
        *_misspelt(adapter),
    ]


def demand_valid(adapter: type[Adapter]) -> None:
    """Raise AdapterError with everything that `validate` finds."""
    problems = validate(adapter)
    if problems:
        raise AdapterError(problems)


def _variables(adapter: type[Adapter]) -> Iterator[str]:
    for variable, (wanted, holds) in _VARIABLES.items():
        value = getattr(adapter, variable)
        if not holds(value):
            yield f"{adapter.__name__}.{variable}={value!r}, but should be {wanted}"


def _flags(adapter: type[Adapter]) -> Iterator[str]:
    named = {"capabilities": adapter.capabilities, "declines": adapter.declines}
    if isinstance(adapter.declines_on, Mapping):
        named |= {f"declines_on[{device!r}]": flags for device, flags in adapter.declines_on.items()}
    for variable, flags in named.items():
        if not _is_collection(flags, set | frozenset):
            continue
        for flag in unknown(frozenset(flags)):
            close = difflib.get_close_matches(flag, CAPABILITIES, n=2)
            hint = f"; did you mean {' or '.join(map(repr, close))}?" if close else ""
            yield f"{adapter.__name__}.{variable} names {flag!r}, but should name flags of capability.py only{hint}"
    if "rate_limit" in adapter.declared() and not adapter.max_unsharded:
        yield f"{adapter.__name__} declares 'rate_limit', but should then say in max_unsharded how many units it means"
    methods = {flag: method for base in adapter.__mro__ for method, flag in vars(base).get("optional", {}).items()}
    for flag in sorted(set(methods) & adapter.declared()):
        if not _is_written(adapter, methods[flag]):
            yield (
                f"{adapter.__name__} declares {flag!r}, but should then write {methods[flag]}(), "
                "through which the suite asks for it"
            )


def _abstract(adapter: type[Adapter]) -> Iterator[str]:
    for method in sorted(getattr(adapter, "__abstractmethods__", ())):
        yield f"{adapter.__name__} does not write {method}(), but should: the protocol needs it"


def _signatures(adapter: type[Adapter]) -> Iterator[str]:
    for name, calls in _CALLS.items():
        written = inspect.getattr_static(adapter, name)
        where = _place(written)
        if not inspect.isfunction(written):
            yield f"{adapter.__name__}.{name} is a {type(written).__name__}, but should be a method{where}"
            continue
        if inspect.iscoroutinefunction(written) or inspect.isasyncgenfunction(written):
            yield f"{adapter.__name__}.{name} is async, but should be a plain method{where}"
        elif inspect.isgeneratorfunction(written):
            hint = "; decorate it with contextlib.contextmanager" if name == "microbatch" else ""
            yield f"{adapter.__name__}.{name} is a generator, but should be a plain method{hint}{where}"
        for positional, keyword in calls:
            try:
                inspect.signature(written).bind(None, *positional, **keyword)
            except TypeError as error:
                yield (
                    f"{adapter.__name__}.{name}{inspect.signature(written)}, but should take the call "
                    f"{name}({_arguments(positional, keyword)}): {error}{where}"
                )
                break


def _misspelt(adapter: type[Adapter]) -> Iterator[str]:
    """Public methods whose names are close to one of the protocol's that was not written."""
    for base in adapter.__mro__:
        if base.__module__.startswith("fsdp_conformance.adapters.") or not issubclass(base, Adapter):
            continue
        for name, value in vars(base).items():
            if name.startswith("_") or not inspect.isfunction(value) or hasattr(Adapter, name):
                continue
            for close in difflib.get_close_matches(name, _CALLS, n=1, cutoff=0.8):
                if not _is_written(adapter, close):
                    yield f"{base.__name__}.{name}() is never called; if it is the protocol's {close}(), rename it"


def _is_written(adapter: type[Adapter], method: str) -> bool:
    """Whether a class below the one that introduces the method writes it."""
    introduced = next(base for base in reversed(adapter.__mro__) if method in vars(base))
    return inspect.getattr_static(adapter, method) is not vars(introduced)[method]


def _is_collection(value: object, kinds: Any) -> bool:
    return isinstance(value, kinds) and all(isinstance(item, str) for item in value)


def _arguments(positional: tuple[Any, ...], keyword: Mapping[str, Any]) -> str:
    return ", ".join([*("..." for _ in positional), *(f"{name}={value}" for name, value in keyword.items())])


def _place(function: Any) -> str:
    code = getattr(inspect.unwrap(function) if callable(function) else function, "__code__", None)
    return f" [{code.co_filename}:{code.co_firstlineno}]" if code is not None else ""
