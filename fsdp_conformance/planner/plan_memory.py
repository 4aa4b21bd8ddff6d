"""The most bytes that a rank holds in a training step, by what they are for."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from fsdp_conformance.planner.plan_candidate import Candidate, PlanOptions
from fsdp_conformance.planner.plan_unit import PlanUnit

#: Below the root, so many units are unsharded at once: the one that runs and the one that is prefetched.
NUM_UNSHARDED = 2


@dataclass(frozen=True, kw_only=True, slots=True)
class PlanMemory:
    """Bytes of one rank. They need not peak together, so the sum is an upper bound."""

    parameters: float
    """Shards."""
    gradients: float
    """Of the shards."""
    optimizer: float
    gathered: float
    """Unsharded parameters."""
    unreduced: float
    """Gradients of units on their way into the reduction."""
    activations: float
    cpu_offload: bool

    @property
    def on_device(self) -> float:
        """Of the device's memory."""
        passing = self.gathered + self.unreduced + self.activations
        return passing + (0.0 if self.cpu_offload else self._kept)

    @property
    def on_host(self) -> float:
        """Of the host's memory."""
        return self._kept if self.cpu_offload else 0.0

    @property
    def _kept(self) -> float:
        return self.parameters + self.gradients + self.optimizer


def plan_memory(units: Sequence[PlanUnit], candidate: Candidate, options: PlanOptions) -> PlanMemory:
    """What a rank holds, the root first among `units`."""
    shards = [-(-unit.numel // candidate.num_shards) for unit in units]
    shard_bytes = float(sum(shard * unit.itemsize for shard, unit in zip(shards, units, strict=True)))
    compute_itemsize = options.compute_dtype.itemsize
    root, *blocks = (unit.numel * compute_itemsize for unit in units)
    some = root + sum(sorted(blocks)[-NUM_UNSHARDED:])
    if candidate.reshards_after_forward:
        gathered = some
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
        unreduced=float(max([root, sum(sorted(blocks)[-NUM_UNSHARDED:])])),
        activations=float(sum(unit.activation_bytes for unit in units)),
        cpu_offload=candidate.cpu_offload,
    )
