"""
What a rank's accelerator had given out, as its allocator counts it: shards alone, peaks, growth, what is given back.

Bytes come with the history (`history.memory`), so that the same oracles judge any accelerator whose allocator counts.
Every figure is a difference to what was given out before the setup: what the loop itself holds there is in both.

Bounds are worked out from the workload and the plan. With W ranks in a shard group and parameters of P bytes in full:

    shard     what one rank stores of P: the rows of each parameter over W, rounded up
    largest   the largest unit below the root, in full, padded to a multiple of W rows
    root      what the root owns, in full, padded
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from fsdp_conformance.checks.result import CheckResult, Tally
from fsdp_conformance.checks.sizes import Unit, padded_bytes, parameter_bytes, sized_units
from fsdp_conformance.config import Plan, Sharding
from fsdp_conformance.errors import SuiteError
from fsdp_conformance.history.memory import MemoryMark, Point
from fsdp_conformance.history.training import TrainingHistory
from fsdp_conformance.workload import Workload

#: Losses of a step, counters and norms: a few scalars, for which an allocator may round up to its granule of 512 bytes
#: (c10/cuda/CUDACachingAllocator, kMinBlockSize).
SCALARS = 16 * 512


@dataclass(frozen=True, kw_only=True, slots=True)
class Sizes:
    """Bytes of a workload under a plan."""

    full: int
    shard: int
    largest: int
    root: int
    below_root: int
    """Full bytes of all units but the root."""
    buffers: int


@dataclass(frozen=True, kw_only=True, slots=True)
class Activations:
    """What a step of the unwrapped model takes on the device beside parameters and gradients, in bytes."""

    kept: int
    """Alive when the loss is there."""
    forward_peak: int
    """The most at once, up to the loss."""


def sizes(workload: Workload, plan: Plan, *, world_size: int) -> Sizes:
    """The sizes that bounds are made of. Hybrid sharding stores more: a shard group is smaller than the world."""
    group = 1 if plan.sharding is Sharding.NONE else world_size // plan.replicas
    units = sized_units(workload, plan).shared
    inner = [unit for unit in units if unit.fqn]
    if not inner:
        raise SuiteError(f"units below the root=0, but should be more [{workload.name}]: nothing can be freed")
    root = [unit for unit in units if not unit.fqn]
    return Sizes(
        full=parameter_bytes(units),
        shard=padded_bytes(units, group) // group,
        largest=max(_padded(unit, group) for unit in inner),
        root=padded_bytes(root, group),
        below_root=parameter_bytes(inner),
        buffers=sum(buffer.numel() * buffer.element_size() for buffer in workload.build(0).buffers()),
    )


def shards_alone(
    history: TrainingHistory, workload: Workload, plan: Plan, *, world_size: int, padding: float
) -> CheckResult:
    """After the wrap the device holds this rank's shard, with at most the declared padding, and the buffers (R033)."""
    bytes_of = sizes(workload, plan, world_size=world_size)
    held = _above_base(history, _the(history, Point.SETUP))
    bound = int(bytes_of.shard * (1 + padding)) + bytes_of.buffers + SCALARS
    tally = Tally("bytes after wrap", "R033", rank=history.rank)
    tally.expect(
        held <= bound,
        f"held={held} B after the wrap, but should be at most {bound} B: a shard of {bytes_of.shard} B, padding of "
        f"{padding:.0%}, buffers of {bytes_of.buffers} B; the whole model has {bytes_of.full} B",
        phase="init",
        likely="full parameters are kept beside the shards" if held >= bytes_of.full else None,
    )
    tally.expect(
        held >= bytes_of.full // world_size // 2 or plan.offload != "off",
        f"held={held} B after the wrap, but should be about {bytes_of.shard} B: the parameters are not on the device",
        phase="init",
    )
    return tally.result(measurements={"held": held, "shard": bytes_of.shard, "full": bytes_of.full})


def resharded_after_forward(
    history: TrainingHistory, workload: Workload, plan: Plan, activations: Activations, *, world_size: int
) -> CheckResult:
    """
    When the loss is there, units below the root hold no full parameters; declared off, all of them do (R034).

    Judged in every step, by what was given out between the end of the step before and the loss.
    """
    bytes_of = sizes(workload, plan, world_size=world_size)
    kept = plan.reshard_after_forward is False or plan.sharding is Sharding.GRAD_OPTIM
    tally = Tally("bytes at the loss", "R034", rank=history.rank)
    figures = {}
    for step, before, after in _pairs(history, Point.FORWARD):
        grown = figures[f"step {step}"] = after.allocated - before
        if kept:
            # From the setup on: gradients that are dropped may be given back as late as in the next forward.
            above = after.allocated - _the(history, Point.SETUP).allocated
            tally.expect(
                above >= bytes_of.below_root,
                f"held={above} B more than after the wrap, but should be at least {bytes_of.below_root} B: units that "
                "are not resharded after forward hold their full parameters until backward",
                step=step,
                phase="forward",
            )
        else:
            bound = bytes_of.root + activations.kept + SCALARS
            tally.expect(
                grown <= bound,
                f"grown={grown} B in forward, but should be at most {bound} B: the root's {bytes_of.root} B and "
                f"activations of {activations.kept} B; the units below it have {bytes_of.below_root} B",
                step=step,
                phase="forward",
                likely="units hold full parameters after their forward" if grown >= bytes_of.largest + bound else None,
            )
    return tally.result(measurements=figures)


def nothing_full_after_backward(
    history: TrainingHistory, workload: Workload, plan: Plan, *, world_size: int, padding: float
) -> CheckResult:
    """When backward returns, a rank has gained its shard of the gradients and nothing else (R035)."""
    bytes_of = sizes(workload, plan, world_size=world_size)
    bound = int(bytes_of.shard * (1 + padding)) + SCALARS
    tally = Tally("bytes after backward", "R035", rank=history.rank)
    figures = {}
    for step, before, after in _pairs(history, Point.BACKWARD):
        grown = figures[f"step {step}"] = after.allocated - before
        tally.expect(
            grown <= bound,
            f"grown={grown} B from the end of the step before to the end of backward, but should be at most {bound} B: "
            f"a shard of the gradients has {bytes_of.shard} B, the largest unit {bytes_of.largest} B in full",
            step=step,
            phase="backward",
        )
    return tally.result(measurements=figures)


def peaks(
    history: TrainingHistory, workload: Workload, plan: Plan, activations: Activations, *, world_size: int
) -> CheckResult:
    """
    Peaks above what is held between steps (R038), where parameters are resharded after forward:

        forward    3 x largest + root + activations         two gathered units and a copy, or a prefetched one
        backward   shard + 4 x largest + root + activations two gathered units, gradients of one and their copy

    and where they are kept:

        forward    full + 2 x largest + activations         buffers of two gathers beside what was copied out of them
        backward   full + shard + 1.5 x largest + activations

    Activations of backward are those of the forward and as much again for their gradients.
    """
    bytes_of = sizes(workload, plan, world_size=world_size)
    kept = plan.reshard_after_forward is False or plan.sharding is Sharding.GRAD_OPTIM
    largest, root, full = bytes_of.largest, bytes_of.root, bytes_of.below_root + bytes_of.root
    bounds = {
        Point.FORWARD: (full + 2 * largest if kept else 3 * largest + root) + activations.forward_peak + SCALARS,
        Point.BACKWARD: (full + 3 * largest // 2 if kept else 4 * largest + root)
        + bytes_of.shard
        + 2 * activations.forward_peak
        + SCALARS,
    }
    tally = Tally("peak bytes", "R038", rank=history.rank)
    figures: dict[str, int] = {}
    for point, bound in bounds.items():
        for step, before, after in _pairs(history, point):
            peak = after.peak - before
            figures[f"{point.value}, step {step}"] = peak
            tally.expect(
                peak <= bound,
                f"peak={peak} B above what is held between steps, but should be at most {bound} B: the largest unit "
                f"has {largest} B in full, the root {root} B, a shard {bytes_of.shard} B, activations "
                f"{activations.forward_peak} B at most",
                step=step,
                phase="forward" if point is Point.FORWARD else "backward",
            )
        figures[f"{point.value}, bound"] = bound
    return tally.result(measurements=figures)


def no_growth(history: TrainingHistory, *, first: int = 1) -> CheckResult:
    """From step `first` on as many bytes are held after each step (R039). Before it optimizers make their state."""
    held = {mark.step: mark.allocated for mark in _marks(history, Point.STEP) if (mark.step or 0) >= first}
    if len(held) < 2:
        raise SuiteError(f"steps={len(held)} from step {first} on, but should be at least 2 [no_growth]")
    expected = held[first]
    tally = Tally("bytes between steps", "R039", rank=history.rank)
    for step, allocated in held.items():
        tally.expect(
            allocated == expected,
            f"held={allocated} B after the step, but should be {expected} B as after step {first}: "
            f"{allocated - expected:+d} B",
            step=step,
            phase="step",
        )
    return tally.result(measurements={f"step {step}": allocated for step, allocated in held.items()})


def gradients_given_back(history: TrainingHistory, workload: Workload, plan: Plan, *, world_size: int) -> CheckResult:
    """From the second step on, step and zero_grad give back what the shards of the gradients take (R040)."""
    shard = sizes(workload, plan, world_size=world_size).shard
    after = {mark.step: mark.allocated for mark in _marks(history, Point.STEP)}
    tally = Tally("gradients given back", "R040", rank=history.rank)
    for mark in _marks(history, Point.BACKWARD):
        if not mark.step:
            # The first step makes the optimizer's state.
            continue
        freed = mark.allocated - after[mark.step]
        tally.expect(
            freed >= shard - SCALARS,
            f"freed={freed} B by the step and zero_grad, but should be at least {shard} B, the shards of the gradients",
            step=mark.step,
            phase="step",
        )
    return tally.result()


def given_back(history: TrainingHistory, allocated: int) -> CheckResult:
    """`allocated` bytes, counted when the model was dropped, are what was given out before it was made (R040)."""
    base = _the(history, Point.BEFORE_SETUP).allocated
    held = allocated - base
    tally = Tally("bytes given back", "R040", rank=history.rank)
    tally.expect(
        held <= 0,
        f"held={held} B after the model was dropped, but should be 0: something refers to it still",
        phase="close",
    )
    return tally.result(measurements={"held": held})


def same_bytes(history: TrainingHistory, other: TrainingHistory, requirement: str, *, what: str) -> CheckResult:
    """Between steps and after each backward as many bytes are held as in another run, which did without `what`."""
    tally = Tally("bytes with and without", requirement, rank=history.rank)
    figures: dict[str, int] = {}
    for point in (Point.SETUP, Point.BACKWARD, Point.STEP):
        for mine, theirs in zip(_marks(history, point), _marks(other, point), strict=True):
            held, expected = _above_base(history, mine), _above_base(other, theirs)
            figures[f"{point.value}, step {mine.step}"] = held
            tally.expect(
                held <= expected + SCALARS,
                f"held={held} B {point.value}, but should be at most {expected} B as without {what}",
                step=mine.step,
                phase="init" if point is Point.SETUP else point.value,
            )
    return tally.result(measurements=figures)


def marks_by_point(history: TrainingHistory) -> Mapping[Point, list[MemoryMark]]:
    """The marks of a history, for reports and tests."""
    found: dict[Point, list[MemoryMark]] = {}
    for mark in history.memory:
        found.setdefault(mark.point, []).append(mark)
    return found


def _marks(history: TrainingHistory, point: Point) -> list[MemoryMark]:
    found = [mark for mark in history.memory if mark.point is point]
    if not found:
        raise SuiteError(
            f"marks=0 of {point.value!r}, but should be more [rank {history.rank}]: bytes are counted on accelerators "
            "alone, so the case should ask for one"
        )
    return found


def _the(history: TrainingHistory, point: Point) -> MemoryMark:
    return _marks(history, point)[0]


def _above_base(history: TrainingHistory, mark: MemoryMark) -> int:
    return mark.allocated - _the(history, Point.BEFORE_SETUP).allocated


def _pairs(history: TrainingHistory, point: Point) -> list[tuple[int, int, MemoryMark]]:
    """For each step: what was held when it began, and its last mark of `point` (the peak is that of all of them)."""
    begins = {0: _the(history, Point.SETUP).allocated}
    begins |= {(mark.step or 0) + 1: mark.allocated for mark in _marks(history, Point.STEP)}
    latest: dict[int, MemoryMark] = {}
    for mark in _marks(history, point):
        step = mark.step or 0
        peak = max(mark.peak, latest[step].peak) if step in latest else mark.peak
        latest[step] = MemoryMark(point=point, step=step, allocated=mark.allocated, peak=peak)
    return [(step, begins[step], mark) for step, mark in sorted(latest.items())]


def _padded(unit: Unit, group: int) -> int:
    return padded_bytes([unit], group)
