"""
Bytes allocated on a rank's accelerator, as its allocator counts them: shards, peaks, growth, what is freed.

The history holds the counts (`history.memory`), so the same oracles judge any accelerator whose allocator counts.
Every figure is relative to the bytes allocated before setup, so whatever the loop itself holds cancels out.

Bounds are derived from the workload and the plan. With W ranks in a shard group and parameters of P bytes in full:

    shard     what one rank stores of P: the rows of each parameter over W, rounded up
    largest   the largest unit below the root, in full, padded to a multiple of W rows
    root      the root's own parameters, in full, padded
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from fsdp_conformance.checks.result import CheckResult, Tally
from fsdp_conformance.diagnosis import amounts
from fsdp_conformance.errors import SuiteError
from fsdp_conformance.history.memory import MemoryMark, Point
from fsdp_conformance.history.training import TrainingHistory
from fsdp_conformance.history.transfer import carry
from fsdp_conformance.plan import Plan, Sharding
from fsdp_conformance.workload.definition import Workload
from fsdp_conformance.workload.units import owning_units, padded_bytes, parameter_bytes

#: Losses of a step, counters and norms: a few scalars, each of which an allocator may round up to its granule of
#: 512 bytes (c10/cuda/CUDACachingAllocator, kMinBlockSize).
SCALARS = 16 * 512

#: What allocators, threads, transports and Python take on the host in a training, beside what the engine holds there:
#: measured on the bundled engines, after another training in the same process, at most 2 MB. Beside the simulated
#: accelerator it is 5.5 MB: gloo's threads hold copies of what they have sent last, and the checker its records.
ON_HOST = 3 << 20
BESIDE_DEVICE = 2 * ON_HOST

#: How many steps are enough for a cache to be full, and the length of a period in which a leak must grow.
PERIOD = 3

#: The root among `Sizes.units`.
_ROOT = "the root"


@dataclass(frozen=True, kw_only=True, slots=True)
class Sizes:
    """Bytes of a workload under a plan."""

    full: int
    shard: int
    largest: int
    root: int
    below_root: int
    """Full bytes of all units except the root."""
    gathered: int
    """The bytes of all units, each padded to a multiple of the group's rows."""
    buffers: int
    units: dict[str, int]
    """Full bytes of each unit, padded, by its name in words."""


@carry
@dataclass(frozen=True, kw_only=True, slots=True)
class Activations:
    """Bytes that a step of the unwrapped model takes on the device, beyond parameters and gradients."""

    kept: int
    """Alive once the loss is computed."""
    forward_peak: int
    """The peak up to the loss."""


def sizes(workload: Workload, plan: Plan, *, world_size: int) -> Sizes:
    """
    The sizes that bounds are computed from. Hybrid sharding stores more: a shard group is smaller than the world.

    Raises SuiteError if there is no unit below the root.
    """
    group = 1 if plan.sharding is Sharding.NONE else world_size // plan.replicas
    units = owning_units(workload, plan).shared
    inner = [unit for unit in units if unit.fqn]
    if not inner:
        raise SuiteError(f"units below the root: expected at least 1, got 0 [{workload.name}]: nothing can be freed")
    root = [unit for unit in units if not unit.fqn]
    return Sizes(
        full=parameter_bytes(units),
        shard=padded_bytes(units, group) // group,
        largest=max(padded_bytes([unit], group) for unit in inner),
        root=padded_bytes(root, group),
        below_root=parameter_bytes(inner),
        gathered=padded_bytes(units, group),
        units={unit.label(): padded_bytes([unit], group) for unit in units},
        buffers=sum(buffer.numel() * buffer.element_size() for buffer in workload.build(0).buffers()),
    )


def shards_alone(
    history: TrainingHistory,
    workload: Workload,
    plan: Plan,
    *,
    world_size: int,
    padding: float,
    buffers: int = 0,
    total: Mapping[str, int] | None = None,
) -> CheckResult:
    """
    After wrapping, the device holds this rank's shard, with at most the declared padding, and the buffers (R033).

    Where the plan shards the optimizer state alone (ZeRO-1), it holds the parameters, and at most as much again, which
    is what buckets for their gradients take. Where it shards the gradients as well (ZeRO-2), it holds the parameters,
    and at most the shard that its optimizer steps. `buffers` and `total` are those of `held_throughout`.
    """
    bytes_of = sizes(workload, plan, world_size=world_size)
    held = _above_base(history, _first(history, Point.SETUP))
    allowed = allowances(history, workload, plan, world_size=world_size, padding=padding, buffers=buffers)
    bound = allowed[Point.SETUP].bytes + SCALARS
    together = (total or {}).get(_name("device", _first(history, Point.SETUP)), held)
    tally = Tally("bytes after wrap", "R033", rank=history.rank)
    tally.compare(
        held <= bound or (total is not None and together <= world_size * bound), "held after wrapping",
        expected=f"at most {bound} B", got=f"{held} B", phase="init",
        details=f"a shard has {bytes_of.shard} B plus {padding:.0%} padding, buffers {bytes_of.buffers} B, the whole "
        f"model {bytes_of.full} B",
        likely="full parameters are kept beside the shards" if held >= bytes_of.full else None,
    )  # fmt: skip
    tally.compare(
        max(held, together // world_size) >= bytes_of.full // world_size // 2 or plan.offload != "off",
        "held after wrapping",
        expected=f"about {bytes_of.shard} B", got=f"{held} B", details="the parameters are not on the device",
        phase="init",
    )  # fmt: skip
    return tally.result(measurements={"held": held, "shard": bytes_of.shard, "full": bytes_of.full})


def resharded_after_forward(
    history: TrainingHistory, workload: Workload, plan: Plan, activations: Activations, *, world_size: int
) -> CheckResult:
    """
    Once the loss is computed, units below the root hold no full parameters; without resharding all of them do (R034).

    Judged in every step, by the bytes allocated between the end of the previous step and the loss.
    """
    bytes_of = sizes(workload, plan, world_size=world_size)
    stays_whole = plan.reshard_after_forward is False or plan.sharding is Sharding.GRAD_OPTIM
    tally = Tally("bytes at the loss", "R034", rank=history.rank)
    figures = {}
    for step, before, after in _pairs(history, Point.FORWARD):
        grown = figures[f"step {step}"] = after.allocated - before
        if stays_whole:
            # Relative to setup: gradients that are dropped may be freed as late as in the next forward.
            above = after.allocated - _first(history, Point.SETUP).allocated
            tally.compare(
                above >= bytes_of.below_root, "growth since wrapping", expected=f"at least {bytes_of.below_root} B",
                got=f"{above} B", step=step, phase="forward",
                details="units that are not resharded after forward hold their full parameters until backward",
            )  # fmt: skip
        else:
            bound = bytes_of.root + activations.kept + SCALARS
            tally.compare(
                grown <= bound, "growth in forward", expected=f"at most {bound} B", got=f"{grown} B", step=step,
                phase="forward",
                details=f"the root has {bytes_of.root} B, activations {activations.kept} B, the units below the root "
                f"{bytes_of.below_root} B",
                likely=_whole_after_forward(grown, bound, bytes_of, activations),
            )  # fmt: skip
    return tally.result(measurements=figures)


def backward_growth(history: TrainingHistory) -> dict[str, int]:
    """The bytes that a rank has gained on the device from the previous step to the end of backward, by step."""
    return {f"step {step}": after.allocated - before for step, before, after in _pairs(history, Point.BACKWARD)}


def nothing_full_after_backward(
    history: TrainingHistory,
    workload: Workload,
    plan: Plan,
    *,
    world_size: int,
    padding: float,
    buffers: int = 0,
    total: Mapping[str, int] | None = None,
) -> CheckResult:
    """
    When backward returns, a rank has gained its shard of the gradients and nothing else (R035).

    Where the plan shards the optimizer state alone (ZeRO-1), it has gained the gradients. `total` is `backward_growth`
    of all ranks together: an engine may give whole gradients to ranks, however unevenly. `buffers` are the units that
    it declares to keep buffers for, which it may allocate when they are first needed.
    """
    bytes_of = sizes(workload, plan, world_size=world_size)
    gradients = bytes_of.full if plan.sharding is Sharding.OPTIM else bytes_of.shard
    bound = int(gradients * (1 + padding)) + buffers * bytes_of.largest + SCALARS
    tally = Tally("bytes after backward", "R035", rank=history.rank)
    figures = backward_growth(history)
    for step, grown in enumerate(figures.values()):
        tally.compare(
            grown <= bound or (total is not None and total[f"step {step}"] <= world_size * bound),
            "growth from the previous step to the end of backward", expected=f"at most {bound} B",
            got=f"{grown} B", step=step, phase="backward",
            details=f"a shard of the gradients has {bytes_of.shard} B, the largest unit {bytes_of.largest} B in full",
            likely=_whole_after_backward(grown, gradients, bytes_of) if grown > bound else None,
        )  # fmt: skip
    return tally.result(measurements=figures)


def peaks(
    history: TrainingHistory,
    workload: Workload,
    plan: Plan,
    activations: Activations,
    *,
    world_size: int,
    padding: float,
    transport_copies: int = 0,
) -> CheckResult:
    """
    Peaks above the bytes allocated before setup (R038), where parameters are resharded after forward:

        forward    sharded + 3 x largest + root + activations   two gathered units and a copy, or a prefetched one
        backward   2 x sharded + 4 x largest + root             two gathered units, gradients of one and their copy

    and where they are kept, in both:

        sharded + full + 2 x largest + activations              the buffers of a gather, or a unit's gradients twice

    From the second step on, the optimizer's state is held as well. What is held after wrapping counts as sharded, as
    far as R033 allows it. `transport_copies` is how many copies of a unit's gradients the transport makes on the device
    to reduce them, which are not the engine's: one for gloo on an accelerator, which clones them, none for NCCL.
    """
    bytes_of = sizes(workload, plan, world_size=world_size)
    stays_whole = plan.reshard_after_forward is False or plan.sharding is Sharding.GRAD_OPTIM
    largest, root, full = bytes_of.largest, bytes_of.root, bytes_of.gathered
    sharded = _sharded_bytes(history, bytes_of, padding)
    state = sharded * history.full_bytes["optim"] // history.full_bytes["params"]
    if stays_whole:
        bounds = dict.fromkeys((Point.FORWARD, Point.BACKWARD), sharded + full + 2 * largest + activations.forward_peak)
    else:
        bounds = {
            Point.FORWARD: sharded + 3 * largest + root + activations.forward_peak,
            Point.BACKWARD: 2 * sharded + 4 * largest + root,
        }
    bounds[Point.BACKWARD] += transport_copies * largest
    base = _first(history, Point.BEFORE_SETUP).allocated
    tally = Tally("peak bytes", "R038", rank=history.rank)
    figures: dict[str, int] = {}
    for point, bound in bounds.items():
        for step, _, after in _pairs(history, point):
            peak, most = after.peak - base, bound + (state if step else 0) + SCALARS
            figures[f"{point.value}, step {step}"], figures[f"{point.value}, step {step}, bound"] = peak, most
            tally.compare(
                peak <= most, "peak above the bytes before setup", expected=f"at most {most} B",
                got=f"{peak} B", step=step, phase="forward" if point is Point.FORWARD else "backward",
                details=f"the largest unit has {largest} B in full, the root {root} B, what is sharded {sharded} B, "
                f"activations at most {activations.forward_peak} B, optimizer state {state if step else 0} B",
                likely=_more_units(peak - most, bytes_of),
            )  # fmt: skip
    return tally.result(measurements=figures)


def units_gathered(
    history: TrainingHistory,
    workload: Workload,
    plan: Plan,
    activations: Activations,
    counted: Sequence[tuple[str, int, int]],
    *,
    world_size: int,
    most: int,
    padding: float,
    transport_copies: int = 0,
) -> CheckResult:
    """
    Bytes leave room for at most `most` gathered units while one computes (R042).

    `counted` holds the moment ("forward" or "backward"), the step, and the bytes allocated then. Beside the gathered
    units there may be the buffer of a gather, in backward also a unit's gradients twice, their shards, and the
    transport's copies, as in `peaks`.
    """
    bytes_of = sizes(workload, plan, world_size=world_size)
    sharded = _sharded_bytes(history, bytes_of, padding)
    state = sharded * history.full_bytes["optim"] // history.full_bytes["params"]
    base = _first(history, Point.BEFORE_SETUP).allocated
    tally = Tally("bytes of gathered units", "R042", rank=history.rank)
    for moment, step, allocated in counted:
        held = sharded + (state if step else 0) + bytes_of.root + activations.forward_peak + SCALARS
        units = most + 1
        if moment == "backward":
            held, units = held + sharded, units + 2 + transport_copies
        bound = held + units * bytes_of.largest
        tally.compare(
            allocated - base <= bound, "allocated while a unit computes", expected=f"at most {bound} B",
            got=f"{allocated - base} B", step=step, phase=moment,
            details=f"{held} B beside {most} gathered units of at most {bytes_of.largest} B and buffers",
            likely="more units are gathered than declared",
        )  # fmt: skip
    return tally.result()


def _sharded_bytes(history: TrainingHistory, bytes_of: Sizes, padding: float) -> int:
    """The bytes held after wrapping, or those that R033 allows if they are fewer."""
    allowed = int(bytes_of.shard * (1 + padding)) + bytes_of.buffers
    return min(_above_base(history, _first(history, Point.SETUP)), allowed)


def no_growth(history: TrainingHistory, *, first: int = 1) -> CheckResult:
    """
    From step `first` on, each step ends with equally many bytes (R039). Earlier, optimizers create their state.

    Raises SuiteError if there are fewer than two such steps.
    """
    held = {mark.step or 0: mark.allocated for mark in _marks(history, Point.STEP) if (mark.step or 0) >= first}
    if len(held) < 2:
        raise SuiteError(f"steps from step {first} on: expected at least 2, got {len(held)} [no_growth]")
    expected = held[first]
    tally = Tally("bytes between steps", "R039", rank=history.rank)
    for step, allocated in held.items():
        tally.compare(
            allocated == expected, "held after the step", expected=f"{expected} B", got=f"{allocated} B",
            details=f"{allocated - expected:+d} B since step {first}", step=step, phase="step",
            likely=amounts.growth(held) if allocated != expected else None,
        )  # fmt: skip
    return tally.result(measurements={f"step {step}": allocated for step, allocated in held.items()})


@dataclass(frozen=True, kw_only=True, slots=True)
class Allowance:
    """The bytes that a rank may hold at a point of the training loop, and why."""

    bytes: int
    why: str


def allowances(
    history: TrainingHistory, workload: Workload, plan: Plan, *, world_size: int, padding: float, buffers: int
) -> dict[Point, Allowance]:
    """
    The bytes that one rank may hold after wrapping, after each backward and after each step.

    They follow from the model and the plan: shards of parameters, and from the first backward on of gradients and of
    the optimizer's state, each with the declared padding, before that as far as the adapter shows them; master copies
    of its shards that it shows; the model's buffers; and `buffers` units in full, which the engine declares to keep.
    Where only the optimizer's state is sharded (ZeRO-1), parameters and gradients are whole, and so are buckets for
    gradients.
    """
    of = sizes(workload, plan, world_size=world_size)
    state = of.shard * history.full_bytes["optim"] // history.full_bytes["params"]
    master = min(history.held_bytes.get("master", 0), int(of.shard * (1 + padding)))
    params = {Sharding.OPTIM: 2 * of.full, Sharding.GRAD_OPTIM: of.full + of.shard}.get(plan.sharding, of.shard)
    grads = of.full if plan.sharding is Sharding.OPTIM else of.shard
    kept = master + of.buffers + buffers * of.largest
    others = f"{padding:.0%} padding, and {kept} B of the model's buffers and of what the adapter declares to keep"
    shown = history.wrapped_bytes
    early = min(shown.get("grads", 0), grads) + min(shown.get("optim", 0), state)
    wrapped = Allowance(
        bytes=int((params + early) * (1 + padding)) + kept,
        why=f"parameters {params} B, gradients and optimizer state shown already {early} B, {others}",
    )
    trained = Allowance(
        bytes=int((params + grads + state) * (1 + padding)) + kept,
        why=f"parameters {params} B, gradients {grads} B, optimizer state {state} B, {others}",
    )
    return {Point.SETUP: wrapped, Point.BACKWARD: trained, Point.STEP: trained}


def held_figures(history: TrainingHistory) -> dict[str, int]:
    """Bytes above those before setup on the device and on the host, by place and moment."""
    return {name: held for _, _, name, held in _held(history)}


def held_throughout(
    history: TrainingHistory,
    workload: Workload,
    plan: Plan,
    *,
    world_size: int,
    padding: float,
    buffers: int,
    total: Mapping[str, int],
) -> CheckResult:
    """
    From wrap to the last step, a rank holds no more than the plan allows, on device and host (R033, R035, R039).

    Everything counts that was allocated since before setup, whoever refers to it. The device's allocator counts on the
    device, and the kernel on the host, pinned memory or not. The host may hold as much as the device if it is the
    device, or if parameters are offloaded to it, then with room for gradients from the start. Otherwise it may hold one
    copy of the shards, on its way from or to the device.

    `total` are `held_figures` of all ranks together: an engine may give whole parameters to ranks, however unevenly.
    """
    allowed = allowances(history, workload, plan, world_size=world_size, padding=padding, buffers=buffers)
    of = sizes(workload, plan, world_size=world_size)
    staged = Allowance(bytes=int(of.shard * (1 + padding)), why=f"a copy of the {of.shard} B of its shards")
    on_host = dict.fromkeys(allowed, staged) if plan.device != "cpu" else allowed
    if plan.device != "cpu" and plan.offload != "off":
        wrapped = allowed[Point.SETUP]
        on_host = {**allowed, Point.SETUP: Allowance(bytes=wrapped.bytes + staged.bytes, why=f"{wrapped.why}, twice")}
    overhead = ON_HOST if plan.device == "cpu" else BESIDE_DEVICE
    tally = Tally("bytes held throughout", "R033", rank=history.rank)
    figures = held_figures(history)
    marks_by_place: dict[tuple[str, Point], list[tuple[bool, MemoryMark, int]]] = {}
    bounds: dict[tuple[str, Point], Allowance] = {}
    for place, mark, name, held in _held(history):
        allowance = (allowed if place == "device" else on_host)[mark.point]
        bound = allowance.bytes + (SCALARS if place == "device" else overhead)
        bounds[place, mark.point] = replace(allowance, bytes=bound)
        is_right = held <= bound or total.get(name, held) <= world_size * bound
        marks_by_place.setdefault((place, mark.point), []).append((is_right, mark, held))
    for (place, point), marks in marks_by_place.items():
        bound, why = bounds[place, point].bytes, bounds[place, point].why
        figures[f"{place}, {point.value}, at most"] = bound
        wrong = [(mark, held) for is_right, mark, held in marks if not is_right]
        first, held = wrong[0] if wrong else marks[-1][1:]
        tally.compare(
            not wrong, f"held on the {place} after {'wrapping' if point is Point.SETUP else point.value}",
            expected=f"at most {bound} B", got=f"{held} B at {_when(first)}",
            details=f"too much {len(wrong)} of {len(marks)} times; {why}; the whole model has {of.full} B",
            requirement=_OF_POINT[point], step=first.step, phase="init" if point is Point.SETUP else point.value,
            elements=len(marks),
            likely=_copies(held - bound, of.full),
        )  # fmt: skip
    return tally.result(measurements=figures)


def no_leak(history: TrainingHistory, workload: Workload, plan: Plan, *, world_size: int) -> CheckResult:
    """
    Memory on the host, of this process and of those that it has started, does not keep growing (R039).

    A cache stops growing once it is full, and a leak does not. So the bytes are compared after every third step, and
    growth in each of these periods, by a quarter of a shard or more, is a leak. Raises SuiteError if there are too few
    steps for three periods.
    """
    shard = sizes(workload, plan, world_size=world_size).shard
    least = max(shard // 4, ON_HOST // 3)
    tally = Tally("growth on the host", "R039", rank=history.rank)
    marks = _marks(history, Point.STEP)[::PERIOD]
    if len(marks) < 4:
        raise SuiteError(f"steps must be at least {3 * PERIOD + 1}, got {len(_marks(history, Point.STEP))} [no_leak]")
    for who, counts in (
        ("the rank's process", [mark.host or 0 for mark in marks]),
        ("the processes that it has started", [mark.helpers for mark in marks]),
    ):
        grown = [after - before for before, after in itertools.pairwise(counts)]
        tally.compare(
            min(grown) < least, f"growth on the host of {who}",
            expected=f"less than {least} B in one of {len(grown)} periods of {PERIOD} steps at least",
            got=f"{', '.join(map(str, grown))} B", details=f"a shard of the parameters has {shard} B",
            step=marks[-1].step, phase="step",
            likely="something is kept on the host in every step, or in every second or third one",
        )  # fmt: skip
    return tally.result()


#: The requirement on the bytes held at a point.
_OF_POINT = {Point.SETUP: "R033", Point.BACKWARD: "R035", Point.STEP: "R039"}


def _held(history: TrainingHistory) -> Iterator[tuple[str, MemoryMark, str, int]]:
    """Place, mark, name, and the bytes above those before setup, for each mark that bounds are about."""
    first = _first(history, Point.BEFORE_SETUP)
    # On the CPU, no allocator counts bytes.
    has_device = any(mark.allocated for mark in history.memory)
    for mark in history.memory:
        if mark.point in _OF_POINT:
            if has_device:
                yield "device", mark, _name("device", mark), mark.allocated - first.allocated
            if mark.host is not None and first.host is not None:
                yield "host", mark, _name("host", mark), mark.host - first.host


def _name(place: str, mark: MemoryMark) -> str:
    return f"{place}, {_when(mark)}"


def _when(mark: MemoryMark) -> str:
    return mark.point.value if mark.step is None else f"{mark.point.value} of step {mark.step}"


def _copies(excess: int, full: int) -> str | None:
    """The likely cause if the excess is at least one copy of the model, else None."""
    copies = round(excess / full, 1)
    return (
        f"as many bytes as {copies} copies of the model are held beside what the plan leaves" if copies >= 1 else None
    )


def gradients_freed(history: TrainingHistory, workload: Workload, plan: Plan, *, world_size: int) -> CheckResult:
    """From the second step on, step and zero_grad free the gradient shards (R040)."""
    shard = sizes(workload, plan, world_size=world_size).shard
    after = {mark.step: mark.allocated for mark in _marks(history, Point.STEP)}
    tally = Tally("gradients given back", "R040", rank=history.rank)
    for mark in _marks(history, Point.BACKWARD):
        if not mark.step:
            # The first step creates the optimizer's state.
            continue
        freed = mark.allocated - after[mark.step]
        tally.compare(
            freed >= shard - SCALARS, "freed by step and zero_grad", expected=f"at least {shard} B", got=f"{freed} B",
            details="the gradient shards", step=mark.step, phase="step",
        )  # fmt: skip
    return tally.result()


def bytes_before(history: TrainingHistory) -> int:
    """Bytes that were allocated before the model was built."""
    return _first(history, Point.BEFORE_SETUP).allocated


def all_freed(history: TrainingHistory, allocated: int) -> CheckResult:
    """`allocated` bytes, counted after the model was dropped, are at most those before it was built (R040)."""
    held = allocated - bytes_before(history)
    tally = Tally("bytes given back", "R040", rank=history.rank)
    tally.compare(
        held <= 0, "held after the model was dropped", expected="0 B", got=f"{held} B",
        details="something still refers to it", phase="close", likely=_left_over(history, held) if held > 0 else None,
    )  # fmt: skip
    return tally.result(measurements={"held": held})


def same_bytes(history: TrainingHistory, other: TrainingHistory, requirement: str, *, what: str) -> CheckResult:
    """After setup, each backward and each step, as many bytes are held as in another run without `what`."""
    tally = Tally("bytes with and without", requirement, rank=history.rank)
    figures: dict[str, int] = {}
    for point in (Point.SETUP, Point.BACKWARD, Point.STEP):
        for mine, theirs in zip(_marks(history, point), _marks(other, point), strict=True):
            held, expected = _above_base(history, mine), _above_base(other, theirs)
            figures[f"{point.value}, step {mine.step}"] = held
            tally.compare(
                held <= expected + SCALARS, f"held after {point.value}", expected=f"at most {expected} B",
                got=f"{held} B", details=f"as without {what}", step=mine.step,
                phase="init" if point is Point.SETUP else point.value,
            )  # fmt: skip
    return tally.result(measurements=figures)


def shards_without_copies(
    history: TrainingHistory, workload: Workload, plan: Plan, *, world_size: int, padding: float, requirement: str
) -> CheckResult:
    """
    After setup and after each backward, the shards are held in their own dtype alone (R085).

    After backward these are the shards of parameters and gradients, and from the second step on of optimizer state.
    """
    bytes_of = sizes(workload, plan, world_size=world_size)
    sharded = _sharded_bytes(history, bytes_of, padding)
    state = sharded * history.full_bytes["optim"] // history.full_bytes["params"]
    tally = Tally("bytes of shards", requirement, rank=history.rank)
    for point, step, bound in (
        (Point.SETUP, None, int(bytes_of.shard * (1 + padding)) + bytes_of.buffers),
        *(
            (Point.BACKWARD, mark.step, 2 * sharded + (state if mark.step else 0))
            for mark in _marks(history, Point.BACKWARD)
        ),
    ):
        mark = next(mark for mark in _marks(history, point) if mark.step == step)
        held = _above_base(history, mark)
        tally.compare(
            held <= bound + SCALARS, f"held after {point.value}", expected=f"at most {bound} B", got=f"{held} B",
            details=f"a shard of the parameters has {sharded} B", step=step,
            phase="init" if point is Point.SETUP else point.value,
            likely="copies in low precision outlive the reshard" if held >= bound + sharded // 2 else None,
        )  # fmt: skip
    return tally.result()


def _whole_after_forward(grown: int, bound: int, bytes_of: Sizes, activations: Activations) -> str | None:
    if grown < bytes_of.largest + bound:
        return None
    below = {name: size for name, size in bytes_of.units.items() if name != _ROOT}
    which = amounts.units_held(grown - bytes_of.root - activations.kept, below, slack=SCALARS)
    return "units hold full parameters after their forward" + (f": as many bytes as {which} in full" if which else "")


def _whole_after_backward(grown: int, own: int, bytes_of: Sizes) -> str | None:
    """
    The likely cause: units in full, beside the shards or in their place; else None.

    A unit's parameters have as many bytes as its gradients.
    """
    for excess in (grown - own, grown):
        which = amounts.units_held(excess, bytes_of.units, slack=SCALARS)
        if which is None and abs(excess - bytes_of.full) <= SCALARS:
            which = f"all {len(bytes_of.units)} units"
        if which is not None:
            what = "full gradients are kept after backward, or full parameters are"
            return f"{what}: {grown} B, of which {excess} B are as many as {which} in full"
    return None


def _more_units(excess: int, bytes_of: Sizes) -> str | None:
    """
    The likely cause if the excess is as large as a unit, else None.

    The bound has room for the largest units, so a whole unit above it is one unit too many.
    """
    more = excess // bytes_of.largest
    if not 1 <= more < len(bytes_of.units):
        return None
    return f"more units are held in full at once: {excess} B above the bound are {more} times the largest unit, or more"


def _left_over(history: TrainingHistory, held: int) -> str | None:
    """The likely cause: all that the model held after its last step is left, or a part. Gradients are gone by then."""
    if abs(held - _above_base(history, _marks(history, Point.STEP)[-1])) <= SCALARS:
        return f"the whole model stays: {held} B are as many as it held after its last step"
    names = {"params": "the parameters", "optim": "the optimizer's state"}
    parts = {names[kind]: size for kind, size in history.held_bytes.items() if kind in names and size}
    return amounts.left_over(held, parts, slack=SCALARS)


def _marks(history: TrainingHistory, point: Point) -> list[MemoryMark]:
    marks = [mark for mark in history.memory if mark.point is point]
    if not marks:
        raise SuiteError(
            f"no bytes were recorded at {point.value!r} [rank {history.rank}]. Only accelerators count bytes, so the "
            "case must ask for one."
        )
    return marks


def _first(history: TrainingHistory, point: Point) -> MemoryMark:
    return _marks(history, point)[0]


def _above_base(history: TrainingHistory, mark: MemoryMark) -> int:
    return mark.allocated - _first(history, Point.BEFORE_SETUP).allocated


def _pairs(history: TrainingHistory, point: Point) -> list[tuple[int, int, MemoryMark]]:
    """For each step: the bytes held at its start, and its last mark of `point` with the peak of all its marks."""
    begins = {0: _first(history, Point.SETUP).allocated}
    begins |= {(mark.step or 0) + 1: mark.allocated for mark in _marks(history, Point.STEP)}
    latest: dict[int, MemoryMark] = {}
    for mark in _marks(history, point):
        step = mark.step or 0
        peak = max(mark.peak, latest[step].peak) if step in latest else mark.peak
        latest[step] = MemoryMark(point=point, step=step, allocated=mark.allocated, peak=peak)
    return [(step, begins[step], mark) for step, mark in sorted(latest.items())]
