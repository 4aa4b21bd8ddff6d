"""The options of a fully sharded module: degree, prefetch, precision, offload. Plain frozen data."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum

import torch

from fsdp_conformance.errors import ConfigError


class ShardingStrategy(Enum):
    """Which of parameters, gradients and optimizer state are sharded, and when parameters are whole."""

    FULL_SHARD = "full_shard"
    """All three (ZeRO-3). Parameters are resharded after forward and gathered again for backward."""
    SHARD_GRAD_OP = "shard_grad_op"
    """All three between steps (ZeRO-2). Parameters stay gathered from forward to backward."""
    NO_SHARD = "no_shard"
    """None: parameters are replicated, and gradients all-reduced."""
    HYBRID_SHARD = "hybrid_shard"
    """FULL_SHARD within a shard group, replicated across groups."""
    HYBRID_SHARD_ZERO2 = "hybrid_shard_zero2"
    """SHARD_GRAD_OP within a shard group, replicated across groups."""

    @property
    def is_hybrid(self) -> bool:
        """True if it uses a shard group and a replica group."""
        return self in (ShardingStrategy.HYBRID_SHARD, ShardingStrategy.HYBRID_SHARD_ZERO2)

    @property
    def reshards_after_forward(self) -> bool:
        """True if a unit below the root frees its whole parameters after its forward."""
        return self in (ShardingStrategy.FULL_SHARD, ShardingStrategy.HYBRID_SHARD)


class BackwardPrefetch(Enum):
    """When the all-gather of the next unit is issued in backward."""

    BACKWARD_PRE = "backward_pre"
    """Before this unit's gradients are computed: most overlap, two units unsharded at once."""
    BACKWARD_POST = "backward_post"
    """After they have been computed: less overlap, one unit unsharded at once."""


@dataclass(frozen=True, kw_only=True, slots=True)
class CPUOffload:
    """Where shards live between iterations."""

    offload_params: bool = False
    """True if shards of parameters and gradients are kept on the CPU, where the optimizer then runs."""
    pin_memory: bool = True
    """True if they are in pinned memory, so that copies overlap with computation."""


@dataclass(frozen=True, kw_only=True, slots=True)
class MixedPrecision:
    """
    The dtypes in which a unit computes and reduces. Shards, their gradients and optimizer state keep their own dtype.

    Each unit has its own policy. As in torch's FullyShardedDataParallel, inputs of the outermost unit are cast by
    default, and those of units inside it only on request.
    """

    param_dtype: torch.dtype | None = None
    """The dtype of unsharded parameters and of the all-gather; None for the parameters' own."""
    reduce_dtype: torch.dtype | None = None
    """The dtype of the reduction, and of what is accumulated before it; None for `param_dtype`."""
    buffer_dtype: torch.dtype | None = None
    """The dtype of floating-point buffers from the first forward on; None for their own. State dicts have their own."""
    cast_forward_inputs: bool = False
    """True if a unit casts floating-point inputs of its forward to `param_dtype`."""
    cast_root_forward_inputs: bool = True
    """True if the outermost unit does."""
    full_precision_in_eval: bool = False
    """True if a unit in eval mode computes and reduces in the parameters' own dtype, casting nothing."""

    def __post_init__(self) -> None:
        problems = []
        for name in ("param_dtype", "reduce_dtype", "buffer_dtype"):
            dtype = getattr(self, name)
            if dtype is not None and not dtype.is_floating_point:
                problems.append(f"{name} must be a floating-point dtype or None, got {dtype}")
        if problems:
            raise ConfigError(problems, where="MixedPrecision")
