"""What a user may choose of a fully sharded module: degree, prefetch, precision, offload. Words and frozen data."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum

import torch

from fsdp_conformance.errors import ConfigError


class ShardingStrategy(Enum):
    """Which of parameters, gradients and optimizer state are sharded, and when parameters are full."""

    FULL_SHARD = "full_shard"
    """All three (ZeRO-3). Parameters are resharded after forward, and gathered again for backward."""
    SHARD_GRAD_OP = "shard_grad_op"
    """All three between steps; parameters stay gathered from forward to backward (ZeRO-2)."""
    NO_SHARD = "no_shard"
    """Nothing: parameters are replicated, gradients are all-reduced."""
    HYBRID_SHARD = "hybrid_shard"
    """FULL_SHARD in a shard group, replicated over the groups."""
    HYBRID_SHARD_ZERO2 = "hybrid_shard_zero2"
    """SHARD_GRAD_OP in a shard group, replicated over the groups."""

    @property
    def is_hybrid(self) -> bool:
        """Whether there are two groups."""
        return self in (ShardingStrategy.HYBRID_SHARD, ShardingStrategy.HYBRID_SHARD_ZERO2)

    @property
    def reshards_after_forward(self) -> bool:
        """Whether a unit below the root frees its full parameters when it leaves its forward."""
        return self in (ShardingStrategy.FULL_SHARD, ShardingStrategy.HYBRID_SHARD)


class BackwardPrefetch(Enum):
    """When the all-gather of the next unit is issued in backward."""

    BACKWARD_PRE = "backward_pre"
    """Before the gradients of this unit are computed: the most overlap, two units unsharded at once."""
    BACKWARD_POST = "backward_post"
    """After they were computed: less overlap, one unit unsharded at once."""


@dataclass(frozen=True, kw_only=True, slots=True)
class CPUOffload:
    """Where shards live between iterations."""

    offload_params: bool = False
    """Whether shards of parameters and gradients are on the CPU, where the optimizer then runs."""
    pin_memory: bool = True
    """Whether they are in pinned memory, so that copies overlap with computation."""


@dataclass(frozen=True, kw_only=True, slots=True)
class MixedPrecision:
    """
    In which dtypes a unit computes and reduces. Shards, their gradients and optimizer state keep their own.

    Each unit has its own policy. As in torch's FullyShardedDataParallel inputs of the unit that is entered first are
    cast, and those of units inside it on request only.
    """

    param_dtype: torch.dtype | None = None
    """Of unsharded parameters and of the all-gather; None: the parameters' own."""
    reduce_dtype: torch.dtype | None = None
    """Of the reduction, and of what is accumulated before it; None: `param_dtype`."""
    buffer_dtype: torch.dtype | None = None
    """Of floating-point buffers from the unit's first forward on; None: their own. State dicts restore them to that."""
    cast_forward_inputs: bool = False
    """Whether a unit casts floating-point inputs of its forward to `param_dtype`."""
    cast_root_forward_inputs: bool = True
    """Whether the unit that is entered first casts them."""
    full_precision_in_eval: bool = False
    """Whether a unit in eval mode computes, and reduces, in the parameters' own dtype, and casts nothing."""

    def __post_init__(self) -> None:
        problems = []
        for name in ("param_dtype", "reduce_dtype", "buffer_dtype"):
            dtype = getattr(self, name)
            if dtype is not None and not dtype.is_floating_point:
                problems.append(f"{name}={dtype}, but should be a floating-point dtype, or None")
        if problems:
            raise ConfigError(problems, where="MixedPrecision")
