"""
Checks whether a class follows the adapter protocol, from the class alone: nothing is set up, no engine is imported.

All problems are reported at once, and in terms of the adapter: nothing here judges an implementation. `smoke` continues
from here by running the adapter.
"""

from __future__ import annotations

import difflib
import inspect
from collections.abc import Iterator, Mapping
from typing import Any

from fsdp_conformance.adapters.allowances import BOUNDED, excesses
from fsdp_conformance.adapters.base import Adapter
from fsdp_conformance.capability import CAPABILITIES, unknown
from fsdp_conformance.scenarios.axes import SPACE
from fsdp_conformance.suggestions import near

#: How the suite calls each method, without `self`: positional arguments, keyword arguments.
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
    "register_comm_hook": (((None,), {}),),
    "divide_gradients_by": (((1.0,), {}),),
    "full_params_context": (
        (("",), {}),
        (
            ("",),
            {"recurse": True, "writeback": True, "rank0_only": False, "to_cpu": False, "with_grads": False},
        ),
    ),
    "apply": (((None,), {}),),
    "clip_unit": ((("", 1.0), {}),),
    "scale_losses": (((1.0, 2), {}),),
    "loss_scale": (((), {}),),
    "recover": (((), {}),),
    "full_state_dict": (((), {}), ((), {"rank0_only": True})),
    "load_full_state_dict": ((({},), {}), (({},), {"strict": False})),
    "sharded_state_dict": (((), {}),),
    "load_sharded_state_dict": ((({},), {}),),
    "optim_state_dict": (((), {}),),
    "load_optim_state_dict": ((({},), {}),),
    "save_checkpoint": (((None,), {}),),
    "load_checkpoint": (((None,), {}),),
    "save_checkpoint_async": (((None,), {}),),
    "module": (((), {}),),
    "parameters": (((), {}),),
    "set_requires_grad": ((((),), {}),),
    "drop_grads": ((((),), {}),),
    "train": (((True,), {}),),
    "close": (((), {}),),
}
#: Class variables: the expected value in words, and the check.
_VARIABLES: dict[str, tuple[str, Any]] = {
    "name": ("a str", lambda value: isinstance(value, str)),
    "package": ("a str", lambda value: isinstance(value, str)),
    "capabilities": ("a frozenset of flags", lambda value: _is_collection(value, set | frozenset)),
    "declines_on": (
        "a dict of device types to frozensets of flags",
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
    "cuda_names": ("True or False", lambda value: isinstance(value, bool)),
    "shims": ("a tuple of sentences", lambda value: _is_collection(value, tuple | list)),
    "avoids": (
        "a tuple of dicts, each axis to value",
        lambda value: isinstance(value, tuple | list) and all(isinstance(each, Mapping) for each in value),
    ),
    "preload": ("a tuple of module names", lambda value: _is_collection(value, tuple | list)),
    "max_unsharded": ("a non-negative int", lambda value: isinstance(value, int) and value >= 0),
    "grad_reduction_of_accumulation": ('"local" or "reduced"', lambda value: value in ("local", "reduced")),
}


def validate(adapter: type[Adapter]) -> list[str]:
    """Every violation of the protocol in the class, one sentence each."""
    return [
        *_variables(adapter),
        *_flags(adapter),
        *_avoided(adapter),
        *_abstract(adapter),
        *_signatures(adapter),
        *_misspelt(adapter),
    ]


def _variables(adapter: type[Adapter]) -> Iterator[str]:
    for variable, (expected, holds) in _VARIABLES.items():
        value = getattr(adapter, variable)
        if not holds(value):
            yield f"{adapter.__name__}.{variable} must be {expected}, got {value!r}"
    for problem in excesses({name: getattr(adapter, name) for name in BOUNDED}):
        yield f"{adapter.__name__}.{problem}"


def _avoided(adapter: type[Adapter]) -> Iterator[str]:
    if not _VARIABLES["avoids"][1](adapter.avoids):
        return
    for values in adapter.avoids:
        items = tuple(dict(values).items())
        unknown_items = [f"{axis}: {value}" for axis, value in items if (axis, value) not in SPACE.value_of]
        plain = [f"{axis}: {value}" for axis, value in items if SPACE.plain.get(axis) == value]
        # A row runs with its number of ranks, whatever else is left out of it.
        if unknown_items or plain or set(dict(values)) <= {"ranks"}:
            yield (
                f"{adapter.__name__}.avoids must have dicts that map axes of scenarios.axes to values that are not "
                f"plain, and name more than ranks, got {', '.join(unknown_items or plain) or values!r}"
            )


def _flags(adapter: type[Adapter]) -> Iterator[str]:
    by_variable = {"capabilities": adapter.capabilities, "declines": adapter.declines}
    if isinstance(adapter.declines_on, Mapping):
        by_variable |= {f"declines_on[{device!r}]": flags for device, flags in adapter.declines_on.items()}
    for variable, flags in by_variable.items():
        if not _is_collection(flags, set | frozenset):
            continue
        for flag in unknown(frozenset(flags)):
            close = near(flag, CAPABILITIES, count=2, cutoff=0.6)
            hint = f"; did you mean {' or '.join(map(repr, close))}?" if close else ""
            yield f"{adapter.__name__}.{variable} must contain only flags of capability.py, got {flag!r}{hint}"
    if "rate_limit" in adapter.declared() and not adapter.max_unsharded:
        yield f"{adapter.__name__} declares 'rate_limit', so it must set max_unsharded to the number of units"
    methods = {flag: method for base in adapter.__mro__ for method, flag in vars(base).get("optional", {}).items()}
    for flag in sorted(set(methods) & adapter.declared()):
        if not _is_written(adapter, methods[flag]):
            yield f"{adapter.__name__} declares {flag!r}, so it must implement {methods[flag]}(), which the suite calls"


def _abstract(adapter: type[Adapter]) -> Iterator[str]:
    for method in sorted(getattr(adapter, "__abstractmethods__", ())):
        yield f"{adapter.__name__} does not implement {method}(), which the protocol requires"


def _signatures(adapter: type[Adapter]) -> Iterator[str]:
    for name, calls in _CALLS.items():
        written = inspect.getattr_static(adapter, name)
        where = _place(written)
        if not inspect.isfunction(written):
            yield f"{adapter.__name__}.{name} must be a method, got a {type(written).__name__}{where}"
            continue
        if inspect.iscoroutinefunction(written) or inspect.isasyncgenfunction(written):
            yield f"{adapter.__name__}.{name} must be a plain method, but is async{where}"
        elif inspect.isgeneratorfunction(written):
            hint = "; decorate it with contextlib.contextmanager" if name == "microbatch" else ""
            yield f"{adapter.__name__}.{name} must be a plain method, but is a generator{hint}{where}"
        for positional, keyword in calls:
            try:
                inspect.signature(written).bind(None, *positional, **keyword)
            except TypeError as error:
                yield (
                    f"{adapter.__name__}.{name}{inspect.signature(written)} must accept the call "
                    f"{name}({_arguments(positional, keyword)}): {error}{where}"
                )
                break


def _misspelt(adapter: type[Adapter]) -> Iterator[str]:
    """Public methods whose names resemble a protocol method that is not implemented."""
    for base in adapter.__mro__:
        if base.__module__.startswith("fsdp_conformance.adapters.") or not issubclass(base, Adapter):
            continue
        for name, value in vars(base).items():
            if name.startswith("_") or not inspect.isfunction(value) or hasattr(Adapter, name):
                continue
            for close in difflib.get_close_matches(name, _CALLS, n=1, cutoff=0.8):
                if not _is_written(adapter, close):
                    yield f"{base.__name__}.{name}() is never called; if it implements {close}(), rename it"


def _is_written(adapter: type[Adapter], method: str) -> bool:
    """True if a subclass of the class that introduces the method implements it."""
    introduced = next(base for base in reversed(adapter.__mro__) if method in vars(base))
    return inspect.getattr_static(adapter, method) is not vars(introduced)[method]


def _is_collection(value: object, kinds: Any) -> bool:
    return isinstance(value, kinds) and all(isinstance(item, str) for item in value)


def _arguments(positional: tuple[Any, ...], keyword: Mapping[str, Any]) -> str:
    return ", ".join([*("..." for _ in positional), *(f"{name}={value}" for name, value in keyword.items())])


def _place(function: Any) -> str:
    code = getattr(inspect.unwrap(function) if callable(function) else function, "__code__", None)
    return f" [{code.co_filename}:{code.co_firstlineno}]" if code is not None else ""
