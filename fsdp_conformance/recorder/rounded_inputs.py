"""Inputs that mixed precision rounds although they are large: times, positions and counts, not activations."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping

import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule, FullyShardedDataParallel

from fsdp_conformance.recorder.fingerprints import Part

#: From here on, the numbers of bfloat16 are two apart.
_LARGE = 256.0


def rounded_inputs(module: nn.Module, inputs: Mapping[str, list[Part]]) -> Iterator[str]:
    """Name and describe each large input of the root FSDP unit that its policy rounds. Waits for the device."""
    dtype = _dtype_of_inputs(module)
    if dtype is None or not dtype.is_floating_point:
        return
    for name, parts in inputs.items():
        values = parts[0].values.detach()
        is_finer = values.is_floating_point() and torch.finfo(values.dtype).eps < torch.finfo(dtype).eps
        if not is_finer or not values.numel():
            continue
        largest = float(values.abs().max())
        if math.isfinite(largest) and largest > _LARGE and not bool((values.to(dtype) == values).all()):
            apart = torch.finfo(dtype).eps * 2.0 ** math.floor(math.log2(largest))
            kind = str(dtype).removeprefix("torch.")
            yield f"{name} has values up to {largest:.4g}, where the numbers of {kind} are {apart:g} apart"


def _dtype_of_inputs(module: nn.Module) -> torch.dtype | None:
    """The dtype in which a unit gets its inputs; None if it does not cast them."""
    if isinstance(module, FSDPModule):
        policy = module._get_fsdp_state()._mp_policy
        return policy.param_dtype if policy.cast_forward_inputs else None
    if isinstance(module, FullyShardedDataParallel):
        mixed = module.mixed_precision
        # The outermost module is the root. `check_is_root()` would initialise it.
        casts = mixed.cast_forward_inputs or mixed.cast_root_forward_inputs
        return mixed.param_dtype if casts else None
    return None
