"""
How to shard a model over a cluster: every way is priced, and the cheapest that fits into the memory is chosen.

    units = plan_units(model, inputs, blocks_of_lists(model), compute_dtype=torch.bfloat16)  # on meta
    decision = decide(units, cluster, device, PlanOptions(), memory_bytes=80 * GIB)
    print(decision_text(decision))

A simulation from data: nothing is trained and no rank is started. `plan_text` has the words.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from fsdp_conformance.errors import ConfigError
from fsdp_conformance.planner.device_spec import DeviceSpec
from fsdp_conformance.planner.link_spec import Cluster
from fsdp_conformance.planner.plan_candidate import Candidate, PlanOptions, candidates
from fsdp_conformance.planner.plan_memory import PlanMemory, plan_memory
from fsdp_conformance.planner.plan_step import StepTime, UnitTime, optimizer_us, step_time, unit_time
from fsdp_conformance.planner.plan_unit import PlanUnit


@dataclass(frozen=True, slots=True)
class Estimate:
    """What one way costs."""

    candidate: Candidate
    time: StepTime
    memory: PlanMemory
    units: tuple[UnitTime, ...]

    def fits(self, memory_bytes: float) -> bool:
        """Whether a device of so many bytes holds it."""
        return self.memory.on_device <= memory_bytes


@dataclass(frozen=True, slots=True)
class Decision:
    """All estimates, the fastest first, and the choice."""

    units: tuple[PlanUnit, ...]
    options: PlanOptions
    estimates: tuple[Estimate, ...]
    memory_bytes: float

    @property
    def chosen(self) -> Estimate | None:
        """The fastest that fits; None if none does."""
        return next((estimate for estimate in self.estimates if estimate.fits(self.memory_bytes)), None)

    @property
    def smallest(self) -> Estimate:
        """The one that needs least of the device's memory."""
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
) -> Decision:
    """
    Price every candidate for units of which the root is the first.

    `computed_us`: forward and backward of each unit as measured. Of two that take equally long the one that needs less
    memory comes first. Raises ConfigError for times of other units, and for a memory of nothing.
    """
    problems = []
    if computed_us is not None and len(computed_us) != len(units):
        problems.append(f"{len(computed_us)} computed times, but should be {len(units)}, one for each unit")
    if not memory_bytes > 0:
        problems.append(f"memory_bytes={memory_bytes}, but should be positive")
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
    return Decision(tuple(units), options, tuple(estimates), memory_bytes)
