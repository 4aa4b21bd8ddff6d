"""
Options in the spelling of torch's own FullyShardedDataParallel, turned into the engine's.

A script that was written for torch passes torch's enums and dataclasses. They are recognised by name, so nothing of
`torch.distributed.fsdp` is imported here. What the engine cannot do is refused by name.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import nn

from fsdp_conformance.engine.sharding_strategy import BackwardPrefetch, CPUOffload, MixedPrecision, ShardingStrategy
from fsdp_conformance.errors import ConfigError, Unsupported

_WHERE = "FullyShardedDataParallel"

#: The environment variable that gives torch's class full precision in eval mode.
_FULL_PRECISION_IN_EVAL = "FSDP_USE_FULL_PREC_IN_EVAL"


def converted(options: Mapping[str, object]) -> dict[str, Any]:
    """
    Keyword arguments of torch's FullyShardedDataParallel, or some of them, as those of `ShardingOptions`.

    Values that are not torch's stay as they are. Raises Unsupported for what the engine does not offer, ConfigError for
    a device that cannot be parsed and for ignored states that are neither modules nor parameters.
    """
    engine_options: dict[str, Any] = dict(options)
    if not engine_options.pop("use_orig_params", True):
        raise Unsupported("orig_params", "use_orig_params=False: parameters always keep their objects here")
    # Streams order the memory that gathers use, so there is nothing to limit.
    engine_options.pop("limit_all_gathers", None)
    for name, convert in _CONVERSIONS.items():
        if name in engine_options:
            engine_options[name] = convert(engine_options[name])
    _split_ignored_states(engine_options)
    return engine_options


def is_torchs(value: object, name: str) -> bool:
    """True if a value is an instance of a class of torch's FSDP, given by name, or of one derived from it."""
    return any(
        each.__name__ == name and each.__module__.startswith("torch.distributed.fsdp") for each in type(value).__mro__
    )


def _sharding_strategy(value: Any) -> object:
    if value is None:
        return ShardingStrategy.FULL_SHARD
    return ShardingStrategy[value.name.lstrip("_")] if is_torchs(value, "ShardingStrategy") else value


def _backward_prefetch(value: Any) -> object:
    return BackwardPrefetch[value.name] if is_torchs(value, "BackwardPrefetch") else value


def _cpu_offload(value: Any) -> object:
    return CPUOffload(offload_params=value.offload_params) if is_torchs(value, "CPUOffload") else value


def _mixed_precision(value: Any) -> object:
    if not is_torchs(value, "MixedPrecision"):
        return value
    if value.keep_low_precision_grads:
        raise Unsupported(
            "mixed_precision", "keep_low_precision_grads=True: gradients have the dtype of their parameters here"
        )
    excepted = [each for each in value._module_classes_to_ignore if each is not nn.modules.batchnorm._BatchNorm]
    if excepted:
        classes = ", ".join(each.__name__ for each in excepted)
        raise Unsupported(
            "mp_per_unit",
            f"_module_classes_to_ignore={classes}: wrap these modules one by one, with another mixed_precision",
        )
    names = ("param_dtype", "reduce_dtype", "buffer_dtype", "cast_forward_inputs", "cast_root_forward_inputs")
    # torch's class reads this from the environment, too, and has no option for it.
    in_eval = os.environ.get(_FULL_PRECISION_IN_EVAL) == "1"
    return MixedPrecision(**{name: getattr(value, name) for name in names}, full_precision_in_eval=in_eval)


def _device_id(value: Any) -> object:
    if not isinstance(value, str):
        return value
    try:
        return torch.device(value)
    except RuntimeError as error:
        raise ConfigError(
            [f"device_id must be a device, its name or its index, got {value!r}"], where=_WHERE
        ) from error


def _tuple(value: Any) -> object:
    return tuple(value) if isinstance(value, Iterable) else value


_CONVERSIONS = {
    "sharding_strategy": _sharding_strategy,
    "backward_prefetch": _backward_prefetch,
    "cpu_offload": _cpu_offload,
    "mixed_precision": _mixed_precision,
    "device_id": _device_id,
    "ignored_modules": _tuple,
}


def _split_ignored_states(options: dict[str, Any]) -> None:
    """Replace `ignored_states`, modules or parameters, by the option for its kind."""
    states = options.pop("ignored_states", None)
    if states is None:
        return
    if options.get("ignored_modules") is not None:
        raise ConfigError(["pass either ignored_modules or ignored_states, not both"], where=_WHERE)
    states = _tuple(states)
    if isinstance(states, tuple) and all(isinstance(each, nn.Parameter) for each in states):
        options["ignored_parameters"] = states
    elif isinstance(states, tuple) and all(isinstance(each, nn.Module) for each in states):
        options["ignored_modules"] = states
    else:
        raise ConfigError(
            [f"ignored_states must be either all parameters or all modules, got {states!r}"], where=_WHERE
        )
