"""
How to shard a model over a cluster: prices every way and chooses the fastest that fits into memory.

    units = plan_units(model, inputs, blocks_of_lists(model), compute_dtype=torch.bfloat16)  # on meta
    decision = decide(units, cluster, device, PlanOptions(), memory_bytes=80 * GIB)
    print(decision_text(decision))

This is a simulation: nothing is trained and no rank is started.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from fsdp_conformance.engine.sharding_strategy import ShardingStrategy
from fsdp_conformance.errors import ConfigError
from fsdp_conformance.planner.device_spec import DeviceSpec
from fsdp_conformance.planner.link_spec import Cluster
from fsdp_conformance.planner.plan_model import PlanUnit
from fsdp_conformance.planner.plan_step import (
    Candidate,
    PlanMemory,
    PlanOptions,
    StepTime,
    UnitTime,
    optimizer_us,
    plan_memory,
    step_time,
    unit_time,
)


@dataclass(frozen=True, slots=True)
class Estimate:
    """The cost of one candidate."""

    candidate: Candidate
    time: StepTime
    memory: PlanMemory
    units: tuple[UnitTime, ...]

    def fits(self, memory_bytes: float) -> bool:
        """True if it fits into this much device memory."""
        return self.memory.on_device <= memory_bytes


@dataclass(frozen=True, slots=True)
class Decision:
    """All estimates, the fastest first, and the choice among them."""

    units: tuple[PlanUnit, ...]
    options: PlanOptions
    estimates: tuple[Estimate, ...]
    memory_bytes: float
    communication_error: float = 0.0
    """How far the times of collectives may be off, as a fraction of them."""

    @property
    def chosen(self) -> Estimate | None:
        """The fastest estimate that fits; None if none does."""
        return next((estimate for estimate in self.estimates if estimate.fits(self.memory_bytes)), None)

    def differ(self, one: Estimate, other: Estimate) -> bool:
        """
        True if the estimates can be told apart: their steps differ by more than their collectives may be off.

        A kind of collective is off by the same factor in both, so only its difference between them is uncertain.
        Computation counts as known.
        """
        gather_us = one.time.gather - other.time.gather
        reduce_us = one.time.reduce - other.time.reduce
        noise_us = self.communication_error * math.hypot(gather_us, reduce_us)
        return abs(one.time.step - other.time.step) > noise_us

    @property
    def as_good(self) -> tuple[Estimate, ...]:
        """Estimates that fit, and that cannot be told apart from the chosen one."""
        chosen = self.chosen
        return tuple(
            estimate
            for estimate in self.estimates
            if chosen is not None
            and estimate is not chosen
            and estimate.fits(self.memory_bytes)
            and not self.differ(chosen, estimate)
        )

    def to_json(self) -> dict[str, Any]:
        """A JSON-ready mapping: all candidates in microseconds and bytes, and which of them is chosen."""
        candidates = [
            {
                **asdict(estimate.candidate),
                "strategy": estimate.candidate.strategy.value,
                "time_us": {**asdict(estimate.time), "exposed": estimate.time.exposed},
                "memory_bytes": {"device": estimate.memory.on_device, "host": estimate.memory.on_host},
                "fits": estimate.fits(self.memory_bytes),
            }
            for estimate in self.estimates
        ]
        chosen = self.chosen
        return {
            "chosen": None if chosen is None else self.estimates.index(chosen),
            "as_good": [self.estimates.index(estimate) for estimate in self.as_good],
            "communication_error": self.communication_error,
            "candidates": candidates,
        }

    @property
    def smallest(self) -> Estimate:
        """The estimate that needs the least device memory."""
        return min(self.estimates, key=lambda estimate: estimate.memory.on_device)


def decide(
    units: Sequence[PlanUnit],
    cluster: Cluster,
    device: DeviceSpec,
    options: PlanOptions,
    *,
    memory_bytes: float,
    computed_us: Sequence[tuple[float, float]] | None = None,
    among: Iterable[Candidate] | None = None,
    communication_error: float = 0.0,
) -> Decision:
    """
    Price every candidate. The first unit is the root.

    `computed_us`: measured times of each unit's forward and backward. `among`: other candidates than all.
    `communication_error`: how far the times of collectives may be off, as a fraction of them, such as the
    `relative_error` of a fit. Of two that take equally long, the one that needs less memory comes first. Raises
    ConfigError if there are not as many measured times as units, and if there is no memory.
    """
    problems = []
    if computed_us is not None and len(computed_us) != len(units):
        problems.append(f"computed_us must have {len(units)} entries, one for each unit, got {len(computed_us)}")
    if not communication_error >= 0:
        problems.append(f"communication_error must be at least 0, got {communication_error}")
    if not memory_bytes > 0:
        problems.append(f"memory_bytes must be positive, got {memory_bytes}")
    if problems:
        raise ConfigError(problems, where="decide")
    estimates = []
    for candidate in candidates(cluster.world_size) if among is None else among:
        times = tuple(
            unit_time(unit, candidate, cluster, device, options, None if computed_us is None else computed_us[index])
            for index, unit in enumerate(units)
        )
        optimizer = optimizer_us(units, candidate, device, options)
        step = step_time(times, candidate, optimizer, overlaps=device.overlaps)
        estimates.append(Estimate(candidate, step, plan_memory(units, candidate, options), times))
    estimates.sort(key=lambda estimate: (estimate.time.step, estimate.memory.on_device))
    return Decision(tuple(units), options, tuple(estimates), memory_bytes, communication_error)


def candidates(world_size: int) -> Iterator[Candidate]:
    """Full shard, shard-grad-op, both hybrids of every factor, and replicas; each with and without CPU offload."""
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
