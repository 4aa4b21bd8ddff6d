"""The ways to shard a training step that the planner compares, and the options that all of them share."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch

from fsdp_conformance.engine.sharding_strategy import ShardingStrategy
from fsdp_conformance.errors import ConfigError


@dataclass(frozen=True, slots=True)
class Candidate:
    """One way."""

    strategy: ShardingStrategy
    num_shards: int
    """Ranks of a shard group, which are consecutive."""
    num_replicas: int
    """Shard groups."""
    cpu_offload: bool = False
    """Whether shards, their gradients and the optimizer are on the host."""

    @property
    def reshards_after_forward(self) -> bool:
        """Whether parameters are gathered twice a step."""
        return self.strategy.reshards_after_forward and self.num_shards > 1


@dataclass(frozen=True, kw_only=True, slots=True)
class PlanOptions:
    """What does not depend on the sharding."""

    compute_dtype: torch.dtype = torch.bfloat16
    """Units compute, are gathered and are reduced in it."""
    optimizer_bytes_per_element: int = 8
    """State of the optimizer: two float32 moments of Adam."""
    utilisation: float = 0.4
    """
    The part of the device's operations per second that a unit reaches, in (0, 1].

    Source of the default: 38 to 43 % for Llama 3 405B on H100 (arXiv 2407.21783, table 4).
    """

    def __post_init__(self) -> None:
        problems = []
        if not self.compute_dtype.is_floating_point:
            problems.append(f"compute_dtype={self.compute_dtype}, but should be a floating-point dtype")
        if self.optimizer_bytes_per_element < 0:
            problems.append(f"optimizer_bytes_per_element={self.optimizer_bytes_per_element}, but should be at least 0")
        if not 0 < self.utilisation <= 1:
            problems.append(f"utilisation={self.utilisation}, but should be above 0 and at most 1")
        if problems:
            raise ConfigError(problems, where="PlanOptions")


def candidates(world_size: int) -> Iterator[Candidate]:
    """Full shard, shard-grad-op, both hybrids of each factor, and replicas; each with and without CPU offload."""
    for cpu_offload in (False, True):
        for strategy in ShardingStrategy:
            for num_shards in _shard_sizes(strategy, world_size):
                yield Candidate(strategy, num_shards, world_size // num_shards, cpu_offload)


def _shard_sizes(strategy: ShardingStrategy, world_size: int) -> list[int]:
    if strategy is ShardingStrategy.NO_SHARD:
        return [1]
    if strategy.is_hybrid:
        return [size for size in range(2, world_size) if world_size % size == 0]
    return [world_size] if world_size > 1 else []
