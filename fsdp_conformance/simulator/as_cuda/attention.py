"""
Attention under CUDA's names: on DTensors, and flex attention.

The device computes attention with the CPU's flash kernel, for which DTensor has no sharding strategy: it has them for
CUDA's kernels. This adds one, as for those: batches and heads can be sharded, everything else is replicated.

torch's flex attention names the devices that it runs on. Here it runs as it does without torch.compile: with all scores
in memory, forward and backward.
"""

from __future__ import annotations

import functools
import sys
from typing import Any

from fsdp_conformance.simulator.device import SIMULATED
from fsdp_conformance.simulator.import_hook import when_imported
from fsdp_conformance.simulator.replacements import Replacements

#: A way to shard: the placements of the outputs, then those of the arguments, None for those that are not tensors.
_Sharding = tuple[list[Any], list[Any]]

_FLEX = "torch.nn.attention.flex_attention"

#: Queries, keys and values are (batch, heads, length, channels); the logarithm of the sum is (batch, heads, length).
_SHARDABLE_DIMS = (0, 1)


def install(replaced: Replacements) -> None:
    """When DTensor is imported, register the strategies; when flex attention is, admit the device."""
    replaced.on_undo(when_imported("torch.distributed.tensor", functools.partial(_register, replaced)))
    replaced.on_undo(when_imported(_FLEX, functools.partial(_admit, replaced)))


def _admit(replaced: Replacements) -> None:
    """Flex attention checks the type of the device, and asks no more of it."""
    module = sys.modules[_FLEX]
    check = module._validate_device

    @functools.wraps(check)
    def check_unless_simulated(query: Any, *others: Any) -> None:
        if query.device.type != SIMULATED:
            check(query, *others)

    # It would warn on each first use that it is slow without torch.compile, which runs eagerly here.
    warned = {*getattr(module, "_WARNINGS_SHOWN", ()), "flex_attention_performance"}
    replaced.set(module, _validate_device=check_unless_simulated, _WARNINGS_SHOWN=warned)


def _register(replaced: Replacements) -> None:
    """Register the strategies, unless torch has some."""
    import torch
    from torch.distributed.tensor import DTensor
    from torch.distributed.tensor.experimental import register_sharding

    forward = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default
    backward = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward.default
    propagator = DTensor._op_dispatcher.sharding_propagator
    tables = (propagator.op_strategy_funcs, propagator.op_to_rules, propagator.op_to_schema_info)
    for op, shardings in ((forward, _forward_shardings), (backward, _backward_shardings)):
        if any(op in table for table in tables):
            continue
        register_sharding(op)(shardings)
        for table in tables:
            replaced.on_undo(functools.partial(table.pop, op, None))


def _forward_shardings(
    query: Any, key: Any, value: Any, dropout_p: float = 0.0, is_causal: bool = False, **options: Any
) -> list[_Sharding]:
    """(output, logsumexp) from (query, key, value)."""
    has_mask = options.get("attn_mask") is not None
    shardings: list[_Sharding] = []
    for placement in _placements():
        mask = [_of_mask(placement, options["attn_mask"])] if has_mask else []
        shardings.append(([placement] * 2, [placement] * 3 + [None] * 2 + mask))
    return shardings


def _backward_shardings(
    grad_out: Any,
    query: Any,
    key: Any,
    value: Any,
    out: Any,
    logsumexp: Any,
    dropout_p: float,
    is_causal: bool,
    **options: Any,
) -> list[_Sharding]:
    """The gradients of (query, key, value), from the gradient of the output and everything that forward had."""
    has_mask = options.get("attn_mask") is not None
    shardings: list[_Sharding] = []
    for placement in _placements():
        mask = [_of_mask(placement, options["attn_mask"])] if has_mask else []
        shardings.append(([placement] * 3, [placement] * 6 + [None] * 2 + mask))
    return shardings


def _placements() -> list[Any]:
    from torch.distributed.tensor import Replicate, Shard

    return [Replicate(), *(Shard(dim) for dim in _SHARDABLE_DIMS)]


def _of_mask(placement: Any, mask: Any) -> Any:
    """A mask may be (length, length), or broadcast over batches or heads."""
    from torch.distributed.tensor import Replicate, Shard

    if isinstance(placement, Shard):
        dim = placement.dim + len(mask.shape) - 4
        if dim >= 0 and mask.shape[dim] > 1:
            return Shard(dim)
    return Replicate()
