"""The byte oracles: a correct engine's figures pass, and whatever is held too long shows in the bytes."""

from __future__ import annotations

from typing import Any

import pytest

from fsdp_conformance.checks import memory
from fsdp_conformance.checks.memory import SCALARS, Activations
from fsdp_conformance.checks.result import CheckResult
from fsdp_conformance.errors import SuiteError
from fsdp_conformance.fixtures import deep
from fsdp_conformance.history.memory import MemoryMark, Point
from fsdp_conformance.history.training import TrainingHistory
from fsdp_conformance.plan import Plan, Sharding

WORKLOAD = deep.deep_4()
#: 97 x 97 and 97 floats; over two ranks 49 rows of each.
UNIT, UNIT_SHARD = (97 * 97 + 97) * 4, (49 * 97 + 49) * 4
#: 3 x 97 and 3; two rows.
ROOT, ROOT_SHARD = (3 * 97 + 3) * 4, (2 * 97 + 2) * 4
FULL, SHARD = 4 * UNIT + ROOT, 4 * UNIT_SHARD + ROOT_SHARD
PADDED_UNIT, PADDED_ROOT = 2 * UNIT_SHARD, 2 * ROOT_SHARD
ACTIVATIONS = Activations(kept=5000, forward_peak=6000)
#: What is on the device before the setup: batches.
BASE = 700
STATE = SHARD


def plan(**changes: Any) -> Plan:
    """The workload's own units."""
    return Plan(**{"units": WORKLOAD.units, "device": "sim", **changes})


def run(**changes: int) -> TrainingHistory:
    """
    Two steps of a right engine, resharded after forward. Changes name figures: "held", "forward", "forward_peak",
    "backward", "backward_peak", "step_0", "step_1".
    """
    held = changes.get("held", SHARD)
    figures = {
        "forward": PADDED_ROOT + ACTIVATIONS.kept,
        "forward_peak": 2 * PADDED_UNIT + PADDED_ROOT + ACTIVATIONS.forward_peak,
        "backward": SHARD,
        "backward_peak": SHARD + 3 * PADDED_UNIT + PADDED_ROOT + ACTIVATIONS.kept,
        "step_0": STATE,
        "step_1": STATE,
        **changes,
    }
    marks: list[tuple[Point, int | None, int, int]] = [
        (Point.BEFORE_SETUP, None, 0, 0),
        (Point.SETUP, None, held, held),
    ]
    before = held
    for step in (0, 1):
        after = held + figures[f"step_{step}"]
        marks += [
            (Point.FORWARD, step, before + figures["forward"], before + figures["forward_peak"]),
            (Point.BACKWARD, step, before + figures["backward"], before + figures["backward_peak"]),
            (Point.STEP, step, after, after),
        ]
        before = after
    history = TrainingHistory(source="mine", rank=0, world_size=2)
    history.full_bytes = {"params": FULL, "grads": FULL, "optim": FULL}
    history.memory = [
        MemoryMark(point=point, step=step, allocated=BASE + allocated, peak=BASE + peak)
        for point, step, allocated, peak in marks
    ]
    return history


def holds(result: CheckResult) -> bool:
    """True if there are no findings, from at least one comparison."""
    assert result.count.comparisons > 0
    return not result.findings


def test_sizes_are_those_of_the_model() -> None:
    """Shards are rounded up by row, a unit's full size is padded to whole rows of every rank."""
    sizes = memory.sizes(WORKLOAD, plan(), world_size=2)

    assert (sizes.full, sizes.shard, sizes.largest, sizes.root) == (FULL, SHARD, PADDED_UNIT, PADDED_ROOT)
    assert (sizes.below_root, sizes.gathered) == (4 * UNIT, 4 * PADDED_UNIT + PADDED_ROOT)
    hybrid = memory.sizes(WORKLOAD, plan(sharding=Sharding.HYBRID, replicas=2), world_size=4)
    assert hybrid.shard == SHARD


@pytest.mark.parametrize(
    ("held", "right"),
    [(SHARD, True), (int(SHARD * 1.1), True), (SHARD + FULL, False), (FULL, False), (0, False)],
    ids=["a shard", "padding as declared", "an extra copy", "the whole", "nothing"],
)
def test_shards_alone(held: int, right: bool) -> None:
    """A shard and the declared padding; more is a copy, nothing is not on the device at all."""
    result = memory.shards_alone(run(held=held), WORKLOAD, plan(), world_size=2, padding=0.15)

    assert holds(result) == right


@pytest.mark.parametrize(
    ("held", "grown", "right"), [(2 * FULL, FULL, True), (2 * FULL + SCALARS + 1, FULL, False), (FULL, 2 * FULL, False)]
)
def test_where_the_optimizer_state_alone_is_sharded(held: int, grown: int, right: bool) -> None:
    """ZeRO-1 holds parameters and gradients in full, but neither twice; a bucket for gradients may be there early."""
    zero1 = plan(sharding=Sharding.OPTIM)
    history = run(held=held, backward=grown)
    results = [
        check(history, WORKLOAD, zero1, world_size=2, padding=0.0)
        for check in (memory.shards_alone, memory.nothing_full_after_backward)
    ]

    assert all(holds(result) for result in results) is right
    assert not holds(memory.shards_alone(history, WORKLOAD, plan(), world_size=2, padding=0.0))


@pytest.mark.parametrize(
    ("held", "grown", "right"),
    [
        (FULL + SHARD, SHARD, True),
        (SHARD, SHARD, True),
        (FULL + SHARD + SCALARS + 1, SHARD, False),
        (FULL, SHARD + SCALARS + 1, False),
    ],
    ids=["parameters in full", "all sharded", "more than a shard as well", "more than a shard of the gradients"],
)
def test_where_the_gradients_are_sharded_and_the_parameters_are_not(held: int, grown: int, right: bool) -> None:
    """ZeRO-2 holds the parameters in full, the shard that its optimizer steps, and a shard of the gradients."""
    zero2 = plan(sharding=Sharding.GRAD_OPTIM)
    history = run(held=held, backward=grown)
    results = [
        check(history, WORKLOAD, zero2, world_size=2, padding=0.0)
        for check in (memory.shards_alone, memory.nothing_full_after_backward)
    ]

    assert all(holds(result) for result in results) is right


def test_offloaded_shards_are_not_on_the_device() -> None:
    """It is right to hold nothing there."""
    result = memory.shards_alone(run(held=0), WORKLOAD, plan(offload="cpu"), world_size=2, padding=0.15)

    assert holds(result)


@pytest.mark.parametrize("reshard", [True, False])
def test_what_is_held_at_the_loss(reshard: bool) -> None:
    """Resharded: the root and activations. Kept: every unit. Each is wrong for the other."""
    sharding = Sharding.FULL if reshard else Sharding.GRAD_OPTIM
    unresharded = run(forward=PADDED_ROOT + 4 * PADDED_UNIT + ACTIVATIONS.kept)
    for history, right in ((run(), reshard), (unresharded, not reshard)):
        result = memory.resharded_after_forward(history, WORKLOAD, plan(sharding=sharding), ACTIVATIONS, world_size=2)
        assert holds(result) == right


@pytest.mark.parametrize(
    ("grown", "right"), [(SHARD, True), (SHARD + SCALARS, True), (SHARD + UNIT, False), (FULL, False)]
)
def test_what_is_held_after_backward(grown: int, right: bool) -> None:
    """A shard of the gradients; one unit in full is too much."""
    result = memory.nothing_full_after_backward(run(backward=grown), WORKLOAD, plan(), world_size=2, padding=0.1)

    assert holds(result) == right


@pytest.mark.parametrize("point", ["forward_peak", "backward_peak"])
def test_peaks_are_bounded(point: str) -> None:
    """Two units more than a right engine has are too many."""
    right, figure = run(), {"forward_peak": 4 * PADDED_UNIT, "backward_peak": SHARD + 5 * PADDED_UNIT}[point]
    wrong = run(**{point: figure + PADDED_ROOT + 2 * ACTIVATIONS.forward_peak + SCALARS})

    assert holds(peaks(right))
    assert {finding.phase for finding in peaks(wrong).findings} == {point.removesuffix("_peak")}
    # Where everything is kept, that is within bounds.
    assert holds(peaks(right, sharding=Sharding.GRAD_OPTIM))


def test_copies_of_the_transport_are_not_the_engines() -> None:
    """They raise the bound in backward only, by a unit each."""
    most = SHARD + 4 * PADDED_UNIT + PADDED_ROOT + SCALARS  # beside the shards that are always held
    history = run(backward_peak=most + PADDED_UNIT)

    assert [holds(peaks(history, transport_copies=copies)) for copies in (0, 1)] == [False, True]
    assert not holds(peaks(run(forward_peak=most + 2 * PADDED_UNIT), transport_copies=1))


def peaks(history: TrainingHistory, *, transport_copies: int = 0, **changes: Any) -> CheckResult:
    """R038 with 15 % padding; full sharding unless `changes` of the plan say otherwise."""
    full_plan = plan(**{"sharding": Sharding.FULL, **changes})
    return memory.peaks(
        history, WORKLOAD, full_plan, ACTIVATIONS, world_size=2, padding=0.15, transport_copies=transport_copies
    )


def test_peaks_count_what_is_always_held() -> None:
    """A copy that is held from the setup on is in the peak, although it is in the bytes between steps, too."""
    assert not holds(peaks(run(held=SHARD + FULL)))
    assert not holds(peaks(run(held=SHARD + FULL), sharding=Sharding.GRAD_OPTIM))


def test_peaks_where_everything_is_kept() -> None:
    """All units and two more of the largest are within bounds; three more are not."""
    for spare, right in ((2, True), (3, False)):
        most = (4 + spare) * PADDED_UNIT + PADDED_ROOT + ACTIVATIONS.forward_peak + SCALARS
        assert holds(peaks(run(forward_peak=most, backward_peak=most), sharding=Sharding.GRAD_OPTIM)) == right


@pytest.mark.parametrize(("moment", "spare"), [("forward", 1), ("backward", 3)])
def test_units_gathered_show_in_the_bytes(moment: str, spare: int) -> None:
    """The declared number of units plus the buffers may be held; one unit more is too many."""
    others = SHARD + (SHARD if moment == "backward" else 0) + PADDED_ROOT + ACTIVATIONS.forward_peak + SCALARS
    for units, right in ((2 + spare, True), (3 + spare, False)):
        counted = [(moment, step, BASE + others + step * STATE + units * PADDED_UNIT) for step in (0, 1)]
        result = memory.units_gathered(
            run(), WORKLOAD, plan(), ACTIVATIONS, counted, world_size=2, most=2, padding=0.15
        )
        assert holds(result) == right


@pytest.mark.parametrize(
    ("changes", "phases"),
    [
        ({}, set()),
        ({"held": SHARD + SHARD // 2, "backward": SHARD}, {"init", "backward"}),
        ({"backward": SHARD + SHARD // 2}, {"backward"}),
    ],
    ids=["shards", "copies from the start", "copies after backward"],
)
def test_copies_of_shards(changes: dict[str, int], phases: set[str]) -> None:
    """Half of a shard's bytes more is a copy in low precision."""
    result = memory.shards_without_copies(
        run(**changes), WORKLOAD, plan(), world_size=2, padding=0.15, requirement="R085"
    )

    assert result.count.comparisons == 3
    assert {finding.phase for finding in result.findings} == phases


def test_growth_is_seen_to_the_last_byte() -> None:
    """Bytes after a step are compared with those after the second; the first makes the optimizer's state."""
    assert holds(memory.no_growth(run(), first=0))
    result = memory.no_growth(run(step_1=STATE + 1), first=0)
    assert [finding.step for finding in result.findings] == [1]
    assert "+1 B" in result.findings[0].message
    with pytest.raises(SuiteError, match="steps from step 1 on: expected at least 2, got 1"):
        memory.no_growth(run(), first=1)


def test_what_was_not_given_back() -> None:
    """One byte above what was there before the setup is too many."""
    assert holds(memory.all_freed(run(), BASE))
    assert "expected 0 B, got 1 B" in memory.all_freed(run(), BASE + 1).findings[0].message


def test_the_same_bytes_with_and_without() -> None:
    """At setup, after backward and between steps; less is as good."""
    assert holds(memory.same_bytes(run(), run(), "R085", what="it"))
    assert holds(memory.same_bytes(run(), run(backward=SHARD + UNIT), "R085", what="it"))
    (finding, _) = memory.same_bytes(run(backward=SHARD + UNIT), run(), "R085", what="it").findings
    assert (finding.requirement, finding.phase, finding.step) == ("R085", "backward", 0)


def test_a_history_without_bytes_cannot_be_judged() -> None:
    """On the CPU nothing is counted: the case should have asked for an accelerator."""
    history = TrainingHistory(source="mine", rank=0, world_size=2)

    with pytest.raises(SuiteError, match="no bytes were recorded at 'setup'"):
        memory.shards_alone(history, WORKLOAD, plan(), world_size=2, padding=0.0)


LARGE = deep.deep_16_large()
#: 16 units of 512 x 512 and 512 floats, and a head.
LARGE_FULL = (16 * (512 * 512 + 512) + 3 * 512 + 3) * 4
LARGE_UNIT = (512 * 512 + 512) * 4
LARGE_SHARD = LARGE_FULL // 2 + 3 * 512 * 4
KEPT_STEPS = 3 * memory.PERIOD + 1


def weighed(
    *,
    device: tuple[int, ...] | int = 0,
    host: tuple[int, ...] | int = 0,
    helpers: tuple[int, ...] = (),
    wrapped: int = 0,
) -> TrainingHistory:
    """
    A training on the simulated accelerator of an engine that holds its shards there, and nothing on the host.

    `device` and `host` are bytes held besides from the end of each step on, the last number for all further steps;
    `wrapped` are bytes held on the host from wrap on.
    """

    def at(extra: tuple[int, ...] | int, step: int) -> int:
        values = extra if isinstance(extra, tuple) else (extra,)
        return values[min(step, len(values) - 1)]

    marks: list[tuple[Point, int | None, int, int, int]] = [
        (Point.BEFORE_SETUP, None, 0, 0, 0),
        (Point.SETUP, None, LARGE_SHARD, wrapped, 0),
    ]
    before = (0, 0)
    for step in range(KEPT_STEPS):
        marks.append((Point.BACKWARD, step, (2 + (step > 0)) * LARGE_SHARD + before[0], wrapped + before[1], 0))
        before = at(device, step), at(host, step)
        marks.append((Point.STEP, step, 2 * LARGE_SHARD + before[0], wrapped + before[1], at(helpers or 0, step)))
    history = TrainingHistory(source="mine", rank=0, world_size=2)
    history.full_bytes = {"params": LARGE_FULL, "grads": LARGE_FULL, "optim": LARGE_FULL}
    history.memory = [
        MemoryMark(
            point=point, step=step, allocated=BASE + allocated, peak=0, host=5 * BASE + on_host, helpers=of_helpers
        )
        for point, step, allocated, on_host, of_helpers in marks
    ]
    return history


def throughout(history: TrainingHistory, *, buffers: int = 0, **changes: Any) -> CheckResult:
    """The check of what is held throughout, with the other rank holding as much, or as `total` says."""
    total = changes.pop("total", {name: 2 * held for name, held in memory.held_figures(history).items()})
    made = Plan(**{"units": LARGE.units, "device": "sim", **changes})
    return memory.held_throughout(history, LARGE, made, world_size=2, padding=0.15, buffers=buffers, total=total)


def kinds(result: CheckResult) -> set[tuple[str, str]]:
    """The requirement of each finding, and the place that it names."""
    return {(each.requirement, "device" if "on the device" in each.message else "host") for each in result.findings}


def test_a_right_engine_holds_its_shards_throughout() -> None:
    """Also with a copy of its shards on the host, which travels from or to the device."""
    assert holds(throughout(weighed()))
    assert holds(throughout(weighed(wrapped=LARGE_SHARD)))


@pytest.mark.parametrize("copies", [1, 10])
def test_copies_since_the_first_step(copies: int) -> None:
    """They are found on the device and on the host, although no step adds anything after the first one."""
    extra = copies * LARGE_FULL

    assert kinds(throughout(weighed(device=extra))) >= {("R035", "device")}
    assert kinds(throughout(weighed(host=extra))) == {("R035", "host"), ("R039", "host")}
    (finding, *_) = throughout(weighed(device=10 * LARGE_FULL)).findings
    assert "backward of step 1" in finding.message
    assert "copies of the model" in str(finding.likely)


def test_a_copy_from_wrap_on() -> None:
    """It is found before the first step."""
    assert ("R033", "host") in kinds(throughout(weighed(wrapped=LARGE_FULL)))


def test_kept_buffers_are_declared() -> None:
    """Two buffers as large as a unit are too much after wrapping, unless the adapter declares them."""
    history = weighed(device=(0, 6 * LARGE_UNIT))

    assert kinds(throughout(history)) == {("R035", "device")}
    assert holds(throughout(history, buffers=4))


def test_shares_may_be_uneven() -> None:
    """One rank may hold more if all together hold the model once."""
    history = weighed(device=8 * LARGE_UNIT)
    together = {name: 2 * held - 16 * LARGE_UNIT for name, held in memory.held_figures(history).items()}

    assert not holds(throughout(history))
    assert holds(throughout(history, total=together))


def test_offload_keeps_shards_and_gradients_on_the_host() -> None:
    """There the host holds what the device does elsewhere."""
    assert holds(throughout(weighed(wrapped=2 * LARGE_SHARD), offload="cpu_pinned"))
    assert not holds(throughout(weighed(wrapped=2 * LARGE_SHARD)))


def leak(history: TrainingHistory) -> CheckResult:
    """The check of growth on the host."""
    return memory.no_leak(history, LARGE, Plan(units=LARGE.units, device="sim"), world_size=2)


@pytest.mark.parametrize("every", [1, 2, 3])
@pytest.mark.parametrize("who", ["host", "helpers"])
def test_what_grows_for_ever_is_a_leak(who: str, every: int) -> None:
    """Also if only every second or third step adds to it, and whichever process holds it."""
    grown = tuple(step // every * LARGE_SHARD // 2 for step in range(KEPT_STEPS))

    result = leak(weighed(**{who: grown}))  # type: ignore[arg-type]

    assert [finding.requirement for finding in result.findings] == ["R039"]


def test_what_has_been_filled_is_no_leak() -> None:
    """A cache grows at first, and figures vary."""
    assert holds(leak(weighed(host=tuple(min(step, 5) * LARGE_SHARD for step in range(KEPT_STEPS)))))
    assert holds(leak(weighed(host=tuple(step % 2 * LARGE_SHARD for step in range(KEPT_STEPS)))))


def test_too_few_steps_show_no_leak() -> None:
    """The case is wrong then."""
    history = weighed()
    history.memory = history.memory[:-4]

    with pytest.raises(SuiteError, match="steps must be at least 10, got 8"):
        leak(history)
