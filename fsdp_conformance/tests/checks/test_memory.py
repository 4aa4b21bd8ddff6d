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
