"""
The time of a training step, on two lanes: one computes, one communicates.

Forward gathers a unit while the one before it computes, backward gathers the next one while this one computes, and
reduces behind it; NUM_UNSHARDED units are unsharded at once. Where a device cannot do both at once, all times add up.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from fsdp_conformance.planner.collective_cost import all_gather_us, all_reduce_us, reduce_scatter_us
from fsdp_conformance.planner.device_spec import DeviceSpec
from fsdp_conformance.planner.link_spec import BYTES_PER_US_AT_1_GB_PER_S, Cluster
from fsdp_conformance.planner.plan_candidate import Candidate, PlanOptions
from fsdp_conformance.planner.plan_memory import NUM_UNSHARDED
from fsdp_conformance.planner.plan_unit import BACKWARD_PER_FORWARD, PlanUnit

#: Adam reads parameter, gradient and state, and writes parameter and state.
_STATE_PASSES = 2
_PARAMETER_PASSES = 3

_US_PER_TERA = 10**6 / 10**12


@dataclass(frozen=True, kw_only=True, slots=True)
class UnitTime:
    """Microseconds of one unit in a step."""

    forward: float
    backward: float
    gather: float
    """One all-gather, with the copy from the host before it."""
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
    def exposed(self) -> float:
        """Communication that nothing is computed beside."""
        return self.step - self.compute - self.optimizer


def compute_us(unit: PlanUnit, device: DeviceSpec, options: PlanOptions) -> tuple[float, float]:
    """Forward and backward of a unit by its operations, in microseconds."""
    rate = device.tflops(options.compute_dtype.itemsize) * options.utilisation
    forward = unit.forward_flops * _US_PER_TERA / rate
    return forward, forward * BACKWARD_PER_FORWARD


def unit_time(
    unit: PlanUnit,
    candidate: Candidate,
    cluster: Cluster,
    device: DeviceSpec,
    options: PlanOptions,
    computed_us: tuple[float, float] | None = None,
) -> UnitTime:
    """What a unit takes; `computed_us`: forward and backward as measured, in place of an estimate."""
    forward, backward = computed_us or compute_us(unit, device, options)
    shards = cluster.axis(candidate.num_shards)
    replicas = cluster.axis(candidate.num_replicas, stride=candidate.num_shards)
    full_bytes = unit.numel * options.compute_dtype.itemsize
    copied_us = 0.0
    if candidate.cpu_offload:
        copied_us = device.host_link.message_us(unit.numel / candidate.num_shards * unit.itemsize)
    if not unit.numel:
        return UnitTime(forward=forward, backward=backward, gather=0.0, reduce=0.0)
    return UnitTime(
        forward=forward,
        backward=backward,
        gather=copied_us + all_gather_us(full_bytes, shards),
        reduce=reduce_scatter_us(full_bytes, shards)
        + all_reduce_us(full_bytes / candidate.num_shards, replicas)
        + copied_us,
    )


def optimizer_us(units: Sequence[PlanUnit], candidate: Candidate, device: DeviceSpec, options: PlanOptions) -> float:
    """A step of the optimizer, which takes as long as its memory takes to be read and written."""
    bandwidth = device.host_memory_gb_per_s if candidate.cpu_offload else device.memory_gb_per_s
    nbytes = sum(
        unit.numel
        / candidate.num_shards
        * (_PARAMETER_PASSES * unit.itemsize + _STATE_PASSES * options.optimizer_bytes_per_element)
        for unit in units
    )
    return nbytes / (bandwidth * BYTES_PER_US_AT_1_GB_PER_S)


def step_time(times: Sequence[UnitTime], candidate: Candidate, optimizer: float, *, overlaps: bool) -> StepTime:
    """The step of units of these times, the root first."""
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
    Forward and backward on two lanes; most of the root's work follows the blocks in forward, as a head does.

    A gather waits until a unit is freed, a reduction for its unit's backward; either for what was issued before it.
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
            # Issued when the backward before it began, ahead of that one's reduction.
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
