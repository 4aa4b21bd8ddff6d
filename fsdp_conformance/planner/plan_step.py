"""
The cost of a sharded training step: its time, and the peak memory of a rank.

Time runs on two lanes: one computes, one communicates. Forward gathers a unit while the one before it computes.
Backward gathers the next unit while this one computes, and reduces after it. At most NUM_UNSHARDED units are unsharded
at once. On a device that cannot overlap the two, all times add up.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from fsdp_conformance.engine.sharding_strategy import ShardingStrategy
from fsdp_conformance.errors import ConfigError
from fsdp_conformance.planner.device_spec import DeviceSpec
from fsdp_conformance.planner.link_spec import BYTES_PER_US_AT_1_GB_PER_S, Cluster
from fsdp_conformance.planner.plan_model import PlanUnit

#: How many units below the root are unsharded at once: the one that runs and the one that is prefetched.
NUM_UNSHARDED = 2

#: Operations of a backward per operation of its forward: one product each for the gradients of inputs and parameters.
BACKWARD_PER_FORWARD = 2.0

#: Adam reads parameter, gradient and state, and writes parameter and state.
_STATE_PASSES = 2
_PARAMETER_PASSES = 3

_US_PER_TERA = 10**6 / 10**12


@dataclass(frozen=True, slots=True)
class Candidate:
    """One way to shard."""

    strategy: ShardingStrategy
    num_shards: int
    """Ranks of a shard group, which are consecutive."""
    num_replicas: int
    """Shard groups."""
    cpu_offload: bool = False
    """True if shards, their gradients and the optimizer are on the host."""

    @property
    def reshards_after_forward(self) -> bool:
        """True if parameters are gathered twice per step."""
        return self.strategy.reshards_after_forward and self.num_shards > 1


@dataclass(frozen=True, kw_only=True, slots=True)
class PlanOptions:
    """Options that all candidates share."""

    compute_dtype: torch.dtype = torch.bfloat16
    """The dtype in which units compute and are gathered and reduced."""
    optimizer_bytes_per_element: int = 8
    """State of the optimizer. The default is that of Adam: two moments in float32."""
    utilisation: float = 0.4
    """
    The fraction of the device's peak operations per second that a unit reaches, in (0, 1].

    Source of the default: 38 to 43 % for Llama 3 405B on H100 (arXiv 2407.21783, table 4).
    """

    def __post_init__(self) -> None:
        problems = []
        if not self.compute_dtype.is_floating_point:
            problems.append(f"compute_dtype must be a floating-point dtype, got {self.compute_dtype}")
        if self.optimizer_bytes_per_element < 0:
            problems.append(f"optimizer_bytes_per_element must be at least 0, got {self.optimizer_bytes_per_element}")
        if not 0 < self.utilisation <= 1:
            problems.append(f"utilisation must be above 0 and at most 1, got {self.utilisation}")
        if problems:
            raise ConfigError(problems, where="PlanOptions")

    @classmethod
    def of(cls, *, compute_dtype: str, utilisation: float) -> PlanOptions:
        """Options from the name of a dtype, for callers that do not import torch."""
        return cls(compute_dtype=getattr(torch, compute_dtype), utilisation=utilisation)


# --- time ------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True, slots=True)
class UnitTime:
    """Microseconds of one unit in a step."""

    forward: float
    backward: float
    gather: float
    """One all-gather, including the copy from the host before it."""
    reduce: float
    """Reduce-scatter over the shards, all-reduce over the replicas, and the copy to the host after them."""


@dataclass(frozen=True, kw_only=True, slots=True)
class StepTime:
    """Microseconds of a step."""

    step: float
    compute: float
    """Forward and backward."""
    gather: float
    reduce: float
    optimizer: float

    @property
    def communication(self) -> float:
        """All collectives, whether or not they overlap with computation."""
        return self.gather + self.reduce

    @property
    def exposed(self) -> float:
        """Communication that does not overlap with computation."""
        return self.step - self.compute - self.optimizer


def unit_time(
    unit: PlanUnit,
    candidate: Candidate,
    cluster: Cluster,
    device: DeviceSpec,
    options: PlanOptions,
    computed_us: tuple[float, float] | None = None,
) -> UnitTime:
    """The time of a unit. `computed_us`: measured times of forward and backward, instead of an estimate."""
    if computed_us is None:
        rate = device.tflops(options.compute_dtype.itemsize) * options.utilisation
        forward = unit.forward_flops * _US_PER_TERA / rate
        backward = forward * BACKWARD_PER_FORWARD
    else:
        forward, backward = computed_us
    if not unit.numel:
        return UnitTime(forward=forward, backward=backward, gather=0.0, reduce=0.0)
    shards = cluster.axis(candidate.num_shards)
    replicas = cluster.axis(candidate.num_replicas, stride=candidate.num_shards)
    full_bytes = unit.numel * options.compute_dtype.itemsize
    copied_us = 0.0
    if candidate.cpu_offload:
        copied_us = device.host_link.message_us(unit.numel / candidate.num_shards * unit.itemsize)
    return UnitTime(
        forward=forward,
        backward=backward,
        gather=copied_us + shards.all_gather_us(full_bytes),
        reduce=shards.reduce_scatter_us(full_bytes)
        + replicas.all_reduce_us(full_bytes / candidate.num_shards)
        + copied_us,
    )


def optimizer_us(units: Sequence[PlanUnit], candidate: Candidate, device: DeviceSpec, options: PlanOptions) -> float:
    """The time of an optimizer step, which is bound by memory bandwidth."""
    bandwidth = device.host_memory_gb_per_s if candidate.cpu_offload else device.memory_gb_per_s
    nbytes = sum(
        unit.numel
        / candidate.num_shards
        * (_PARAMETER_PASSES * unit.itemsize + _STATE_PASSES * options.optimizer_bytes_per_element)
        for unit in units
    )
    return nbytes / (bandwidth * BYTES_PER_US_AT_1_GB_PER_S)


def step_time(times: Sequence[UnitTime], candidate: Candidate, optimizer: float, *, overlaps: bool) -> StepTime:
    """The time of a step from those of its units, the root first."""
    compute = sum(time.forward + time.backward for time in times)
    # The root stays gathered from forward to backward.
    num_gathers = 2 if candidate.reshards_after_forward else 1
    gather = times[0].gather + num_gathers * sum(time.gather for time in times[1:])
    reduce = sum(time.reduce for time in times)
    step = compute + gather + reduce
    if overlaps:
        step = _overlapped_us(times[0], times[1:], gathers_twice=num_gathers == 2)
    return StepTime(step=step + optimizer, compute=compute, gather=gather, reduce=reduce, optimizer=optimizer)


def _overlapped_us(root: UnitTime, blocks: Sequence[UnitTime], *, gathers_twice: bool) -> float:
    """
    Forward and backward on two lanes. In forward, most of the root's work comes after the blocks, as a head does.

    A gather waits until a unit is freed, and a reduction waits for its unit's backward; both wait for earlier
    communication.
    """
    link = computed = root.gather
    ends = [computed] * NUM_UNSHARDED
    for block in blocks:
        link = max(link, ends[-NUM_UNSHARDED] if gathers_twice else link) + block.gather
        computed = max(computed, link) + block.forward
        ends.append(computed)
    computed += root.forward + root.backward
    began = computed - root.backward
    for index in reversed(range(len(blocks))):
        block = blocks[index]
        if gathers_twice:
            # Issued when the previous backward began, ahead of its reduction.
            link = max(link, began) + block.gather
            computed = max(computed, link)
        if index + 1 < len(blocks):
            link = max(link, ends[-1]) + blocks[index + 1].reduce
        began = computed
        computed += block.backward
        ends.append(computed)
    if blocks:
        link = max(link, computed) + blocks[0].reduce
    return max(link, computed) + root.reduce


# --- memory ----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True, slots=True)
class PlanMemory:
    """Bytes of one rank. They need not all peak at the same time, so their sum is an upper bound."""

    parameters: float
    """Shards."""
    gradients: float
    """Gradients of the shards."""
    optimizer: float
    gathered: float
    """Unsharded parameters."""
    unreduced: float
    """Gradients of units that are waiting to be reduced."""
    activations: float
    cpu_offload: bool

    @property
    def on_device(self) -> float:
        """Bytes of device memory."""
        passing = self.gathered + self.unreduced + self.activations
        return passing + (0.0 if self.cpu_offload else self._kept)

    @property
    def on_host(self) -> float:
        """Bytes of host memory."""
        return self._kept if self.cpu_offload else 0.0

    @property
    def _kept(self) -> float:
        return self.parameters + self.gradients + self.optimizer


def plan_memory(units: Sequence[PlanUnit], candidate: Candidate, options: PlanOptions) -> PlanMemory:
    """The peak memory of a rank. The first unit is the root."""
    shards = [-(-unit.numel // candidate.num_shards) for unit in units]
    shard_bytes = float(sum(shard * unit.itemsize for shard, unit in zip(shards, units, strict=True)))
    compute_itemsize = options.compute_dtype.itemsize
    root, *blocks = (unit.numel * compute_itemsize for unit in units)
    largest_blocks = sum(sorted(blocks)[-NUM_UNSHARDED:])
    if candidate.reshards_after_forward:
        gathered = root + largest_blocks
    elif candidate.num_shards > 1 or candidate.cpu_offload or any(unit.itemsize != compute_itemsize for unit in units):
        gathered = root + sum(blocks)
    else:
        # The shard is the parameter.
        gathered = 0
    return PlanMemory(
        parameters=shard_bytes,
        gradients=shard_bytes,
        optimizer=float(sum(shards) * options.optimizer_bytes_per_element),
        gathered=float(gathered),
        unreduced=float(max(root, largest_blocks)),
        activations=float(sum(unit.activation_bytes for unit in units)),
        cpu_offload=candidate.cpu_offload,
    )
