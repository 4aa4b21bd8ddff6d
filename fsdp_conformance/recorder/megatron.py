"""
Megatron-FSDP (the package `megatron-fsdp`), whose optimizer has other parameters than the modules.

Modules hold whole parameters while they compute. The optimizer has DTensors of uneven parts, each of which is a range
of a parameter's elements.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Sequence
from typing import Any

from torch import nn

from fsdp_conformance.recorder.observer import Observer

PACKAGE = "megatron_fsdp"

#: Puts what a function makes of an attribute in its place.
Replace = Callable[[Any, str, Callable[[Any], Any]], None]


def watch(observer: Observer, replace: Replace, watch_unit: Callable[[nn.Module], None]) -> None:
    """See which modules Megatron-FSDP, which has been imported, shards, and the step that it takes at the start."""

    def fully_shard_model(original: Any) -> Any:
        signature = inspect.signature(original)

        @functools.wraps(original)
        def wrapped(*args: Any, **kwargs: Any) -> Any:
            call = signature.bind(*args, **kwargs)
            observer.guard.run(lambda: observer.wrapping([call.arguments["module"]]))
            result = original(*args, **kwargs)
            observer.guard.run(lambda: note_model(result, call.arguments.get("fsdp_unit_modules")))
            return result

        return wrapped

    def note_model(model: nn.Module, units: Sequence[type | str] | None) -> None:
        for name, module in model.named_modules():
            if _is_unit(name.removeprefix("module."), module, units or ()):
                watch_unit(module)
        if observer.sharding == "kept":
            held = [parameter for _, parameter in model.param_and_grad_buffer.optimizer_named_parameters]  # type: ignore[union-attr]
            # The modules have either one at this point.
            shards = {id(each): parameter for parameter in held for each in (parameter, parameter.orig_param)}
            observer.shards.remember_of_optimizer(model, shards)

    def fully_shard_optimizer(original: Any) -> Any:
        @functools.wraps(original)
        def wrapped(*args: Any, **kwargs: Any) -> Any:
            observer.guard.run(observer.mark, "step of the engine", "fully_shard_optimizer")
            return original(*args, **kwargs)

        return wrapped

    replace_in_package(replace, fully_shard_model=fully_shard_model, fully_shard_optimizer=fully_shard_optimizer)


def _is_unit(name: str, module: nn.Module, units: Sequence[type | str]) -> bool:
    kinds = {kind if isinstance(kind, str) else f"{kind.__module__}.{kind.__qualname__}" for kind in units}
    own = {f"{kind.__module__}.{kind.__qualname__}" for kind in type(module).__mro__}
    return bool(name) and bool(kinds & own)


def replace_in_package(replace: Replace, **made: Callable[[Any], Any]) -> None:
    """Replace attributes by name, in the package and in the module of its functions, which call each other."""
    import megatron_fsdp
    import megatron_fsdp.fully_shard

    # The package shows a function of the module's name.
    for owner in (megatron_fsdp, inspect.getmodule(megatron_fsdp.fully_shard)):
        for name, make in made.items():
            replace(owner, name, make)
