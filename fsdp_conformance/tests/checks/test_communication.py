"""Counts and digests of collectives: silent on a right schedule, and each damage is reported."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import pytest
import torch

from fsdp_conformance.checks import communication
from fsdp_conformance.checks.equality import schedule_digests
from fsdp_conformance.checks.result import CheckResult
from fsdp_conformance.errors import SuiteError
from fsdp_conformance.history.collective import CollectiveRecord, Op
from fsdp_conformance.plan import Plan, Sharding
from fsdp_conformance.tests.checks.schedules import (
    PLAN,
    STAIRCASE,
    collective,
    full_sharding,
    history,
    messages,
    plan_of,
    replicated,
)
from fsdp_conformance.tests.checks.schedules import (
    STAIRCASE_BYTES as BYTES,
)


def counts(records: Sequence[CollectiveRecord], plan: Plan = PLAN) -> CheckResult:
    """R062 on two ranks."""
    return communication.collective_counts(history(records), STAIRCASE, plan, requirement="R062")


def test_full_sharding_is_six_gathers_twice_and_six_scatters() -> None:
    """Six units own parameters: nothing is found, and two steps of five comparisons are counted."""
    result = counts(full_sharding(STAIRCASE, PLAN))

    assert result.findings == []
    assert result.count.comparisons == 10


def test_the_root_may_stay_gathered() -> None:
    """n - 1 all-gathers in backward are as right as n; n - 2 are not."""
    records = full_sharding(STAIRCASE, PLAN)
    without_root = [r for r in records if not (r.phase == "backward" and r.op is Op.ALL_GATHER and r.nbytes == 216)]
    without_two = [r for r in without_root if not (r.phase == "backward" and r.op is Op.ALL_GATHER and r.nbytes == 280)]

    assert counts(without_root).findings == []
    assert messages(counts(without_two)) == ["all_gather in backward: expected 5 to 6, got 4"]


def test_list_form_and_single_form_count_alike() -> None:
    """An all-gather of a list of tensors is one collective."""
    records = [replace(r, num_tensors=2, name="allgather") for r in full_sharding(STAIRCASE, PLAN)]

    assert counts(records).findings == []


@pytest.mark.parametrize(
    ("extra", "expected"),
    [
        (collective(Op.ALL_GATHER, 280), "all_gather in forward: expected 6, got 7"),
        (collective(Op.ALL_GATHER, 280, phase="step"), "all_gather in step: expected 0, got 1"),
        (collective(Op.REDUCE_SCATTER, 280, phase="backward"), "reduce_scatter: expected 6, got 7"),
        (
            collective(Op.ALL_REDUCE, 4, phase="backward"),
            "other collectives: expected 0, got 1; backward all_reduce 4B float32 [0,1]",
        ),
        (
            collective(Op.BROADCAST, 216),
            "other collectives: expected 0, got 1; forward broadcast 216B float32 [0,1]",
        ),
    ],
)
def test_an_extra_collective_is_reported(extra: CollectiveRecord, expected: str) -> None:
    """One more of any op is named, in every step but the first."""
    records = [*full_sharding(STAIRCASE, PLAN), *(replace(extra, step=step) for step in range(3))]
    result = counts(records)

    assert messages(result) == [expected]
    assert [finding.step for finding in result.findings] == [1, 2]
    assert result.findings[0].requirement == "R062"


def test_some_units_deferred() -> None:
    """Over three micro-batches a deferred unit is scattered once, the five others three times each."""
    plan = replace(PLAN, defer_reduction=True, deferred_units=("",))
    records = full_sharding(STAIRCASE, PLAN, micro_batches=3)
    scatters = [r for r in records if r.op is Op.REDUCE_SCATTER and r.nbytes == 216]
    once = [r for r in records if r not in scatters] + scatters[::3]

    def judged_messages(given: Sequence[CollectiveRecord], judged: Plan) -> list[str]:
        run = history(given, micro_batches=3)
        return messages(communication.collective_counts(run, STAIRCASE, judged, requirement="R095"))

    assert judged_messages(once, plan) == []
    assert judged_messages(records, plan) == ["reduce_scatter: expected 16, got 18"]
    assert judged_messages(once, replace(plan, deferred_units=())) == ["reduce_scatter: expected 6, got 16"]


def test_kept_between_micro_batches() -> None:
    """Parameters that are kept are gathered once a step; it takes sharding that keeps them in a micro-batch, too."""
    plan = plan_of(STAIRCASE, Sharding.GRAD_OPTIM, reshard_after_backward=False)
    records = full_sharding(STAIRCASE, plan, micro_batches=2, stay_gathered=True)
    gathers = [r for r in records if r.op is Op.ALL_GATHER]
    first = [r for step in range(3) for r in [g for g in gathers if g.step == step][:6]]
    once = [r for r in records if r.op is not Op.ALL_GATHER] + first

    def judged_messages(given: Sequence[CollectiveRecord], judged: Plan = plan) -> list[str]:
        run = history(given, micro_batches=2)
        return messages(communication.collective_counts(run, STAIRCASE, judged, requirement="R096"))

    assert judged_messages(once) == []
    assert judged_messages(records) == ["all_gather in forward: expected 6, got 12"]
    with pytest.raises(SuiteError, match="reshard_after_backward: expected None"):
        judged_messages(once, plan_of(STAIRCASE, reshard_after_backward=False))


def test_reduced_once() -> None:
    """Each gradient once is right, and none where it cannot be seen; twice, and more than one micro-batch, are not."""
    records = full_sharding(STAIRCASE, PLAN)
    scatters = [r for r in records if r.op is Op.REDUCE_SCATTER]

    def judged_messages(given: Sequence[CollectiveRecord], **options: int) -> list[str]:
        run = history(given, **options)
        return messages(communication.reduced_once(run, STAIRCASE, PLAN, requirement="R135"))

    most = int(1.5 * BYTES)
    assert judged_messages(records) == []
    assert judged_messages([*records, *scatters]) == [
        f"gradients reduced: expected at most {most} B, got {2 * BYTES} B; each should be reduced once"
    ]
    assert judged_messages([r for r in records if r not in scatters]) == []
    with pytest.raises(SuiteError, match="micro-batches: expected 1, got 2"):
        judged_messages(records, micro_batches=2)


def test_no_more_collectives_than_without() -> None:
    """Fewer of an op are as good; one more is reported in each step that has it."""
    records = full_sharding(STAIRCASE, PLAN)
    more = [*records, collective(Op.ALL_REDUCE, 4, step=1)]

    def judged_messages(mine: Sequence[CollectiveRecord], others: Sequence[CollectiveRecord]) -> list[str]:
        return messages(
            communication.no_more_collectives(history(mine), history(others), "empty units", requirement="R022")
        )

    assert judged_messages(records, records) == judged_messages(records, more) == []
    assert judged_messages(more, records) == ["all_reduce with empty units: expected 0, got 1; as many as without them"]


def test_the_first_step_is_not_counted() -> None:
    """One-time checks of the first iteration belong to another requirement."""
    records = [*full_sharding(STAIRCASE, PLAN), collective(Op.ALL_GATHER, 280, step=0)]

    assert counts(records).findings == []


def test_one_step_is_too_few() -> None:
    """A history of one step cannot be judged."""
    with pytest.raises(SuiteError, match="steps: expected at least 2, got 1"):
        communication.collective_counts(history([], steps=1), STAIRCASE, PLAN, requirement="R062")


def test_a_missing_scatter_is_reported() -> None:
    """All-reduce and slice in place of a reduce-scatter shows as two findings."""
    records = [
        replace(r, op=Op.ALL_REDUCE) if r.op is Op.REDUCE_SCATTER and r.nbytes == 280 else r
        for r in full_sharding(STAIRCASE, PLAN)
    ]

    assert messages(counts(records)) == [
        "reduce_scatter: expected 6, got 5",
        "other collectives: expected 0, got 1; backward all_reduce 280B float32 [0,1]",
    ]


def test_the_norm_of_clipping_is_no_extra() -> None:
    """An all-reduce in the step is allowed where the engine returned a norm, and only there."""
    records = [
        *full_sharding(STAIRCASE, PLAN), *(collective(Op.ALL_REDUCE, 4, step=s, phase="step") for s in range(3))
    ]  # fmt: skip
    clipped = history(records)
    for step in clipped.steps:
        step.grad_norm = torch.tensor(1.0)

    assert communication.collective_counts(clipped, STAIRCASE, PLAN, requirement="R062").findings == []
    assert len(counts(records).findings) == 2


def test_gradient_sharding_gathers_in_forward_alone() -> None:
    """ZeRO-2 keeps parameters: an all-gather in backward is reported."""
    plan = plan_of(STAIRCASE, Sharding.GRAD_OPTIM)
    stay_gathered = full_sharding(STAIRCASE, plan, stay_gathered=True)

    assert counts(stay_gathered, plan).findings == []
    assert messages(counts(full_sharding(STAIRCASE, plan), plan)) == ["all_gather in backward: expected 0, got 6"]


def test_no_sharding_is_all_reduce_of_everything() -> None:
    """Without sharding one bucket is right; a gather is not, nor half of the gradients, nor a scatter."""
    plan = plan_of(STAIRCASE, Sharding.NONE)

    assert counts(replicated(BYTES), plan).findings == []
    assert messages(counts(replicated(BYTES // 2), plan)) == [
        f"gradients all-reduced: expected at least {BYTES} B, got {BYTES // 2} B"
    ]
    assert messages(counts(full_sharding(STAIRCASE, plan, stay_gathered=True), plan))[:2] == [
        "all_gather: expected 0, got 6",
        "reduce_scatter: expected 0, got 6",
    ]


def test_hybrid_sharding_all_reduces_each_unit_once() -> None:
    """Two replicas of two ranks add exactly n all-reduces."""
    plan = plan_of(STAIRCASE, Sharding.HYBRID, replicas=2)
    records = full_sharding(STAIRCASE, plan, group=(0, 1), replicas=(0, 2))
    right = history(records, world_size=4)
    silent = history([r for r in records if r.op is not Op.ALL_REDUCE], world_size=4)

    assert communication.collective_counts(right, STAIRCASE, plan, requirement="R062").findings == []
    assert messages(communication.collective_counts(silent, STAIRCASE, plan, requirement="R062")) == [
        "all_reduce: expected 6, got 0"
    ]


def test_a_degree_without_a_promise_is_the_suites_mistake() -> None:
    """The engine's own default has no counts to hold it to."""
    with pytest.raises(SuiteError, match="sharding: expected full, grad_optim, hybrid or none, got default"):
        counts([], plan_of(STAIRCASE, Sharding.DEFAULT))


# --- deferred reduction -----------------------------------------------------------------------------------------------


def deferred(records: Sequence[CollectiveRecord], plan: Plan) -> CheckResult:
    """R065 over two micro-batches."""
    return communication.deferred_counts(history(records, micro_batches=2), STAIRCASE, plan, requirement="R065")


def test_deferred_micro_batches_reduce_nothing() -> None:
    """The step reduces once: as many bytes as without accumulation, after the last forward."""
    plan = plan_of(STAIRCASE, Sharding.DEFAULT, defer_reduction=True)

    assert deferred(full_sharding(STAIRCASE, plan, micro_batches=2), plan).findings == []
    assert deferred(replicated(BYTES), plan).findings == []


def test_reducing_every_micro_batch_is_reported() -> None:
    """An engine that ignores the deferral reduces twice the bytes, half of them too early."""
    plan = plan_of(STAIRCASE, Sharding.DEFAULT, defer_reduction=True)
    eager = full_sharding(STAIRCASE, plan_of(STAIRCASE), micro_batches=2)

    assert messages(deferred(eager, plan)) == [
        "gradients reduced over 2 micro-batches: expected 6256 to 9384 B, got 12512 B; each should be reduced once",
        "gradient reductions before the last micro-batch's forward: expected 0, got 6; 12 in the step",
    ]
    assert len(deferred(replicated(2 * BYTES), plan).findings) == 2


def test_reducing_nothing_at_all_is_reported() -> None:
    """Deferral of the last micro-batch, too, leaves the ranks apart."""
    plan = plan_of(STAIRCASE, Sharding.DEFAULT, defer_reduction=True)
    silent = [r for r in full_sharding(STAIRCASE, plan, micro_batches=2) if r.op is not Op.REDUCE_SCATTER]

    assert messages(deferred(silent, plan)) == [
        "gradients reduced over 2 micro-batches: expected 6256 to 9384 B, got 0 B; each should be reduced once"
    ]


def test_reducing_the_first_micro_batch_alone_is_reported() -> None:
    """It sends the right number of bytes at the wrong time."""
    plan = plan_of(STAIRCASE, Sharding.DEFAULT, defer_reduction=True)
    right = history(full_sharding(STAIRCASE, plan, micro_batches=2), micro_batches=2).collectives
    per_step = len(right) // 3
    early = [
        replace(r, seq=0) for step in range(3)
        for r in sorted(right[step * per_step : (step + 1) * per_step], key=lambda r: r.op is not Op.REDUCE_SCATTER)
    ]  # fmt: skip

    assert messages(deferred(early, plan)) == [
        "gradient reductions before the last micro-batch's forward: expected 0, got 6; 6 in the step"
    ]


def test_gradient_sharding_gathers_once_under_deferral() -> None:
    """ZeRO-2 keeps parameters over a deferred backward: a second pass of gathers is reported."""
    plan = plan_of(STAIRCASE, Sharding.GRAD_OPTIM, defer_reduction=True)
    twice = full_sharding(STAIRCASE, plan, micro_batches=2, stay_gathered=True)
    first = {id(r) for step in range(3) for r in [r for r in twice if r.step == step and r.phase == "forward"][:6]}
    once = [r for r in twice if r.phase != "forward" or id(r) in first]

    assert deferred(once, plan).findings == []
    assert messages(deferred(twice, plan)) == [
        (
            "parameters gathered over 2 micro-batches: expected at most 9384 B, got 12512 B; "
            "parameters stay gathered after a deferred backward"
        )
    ]


# --- digests ----------------------------------------------------------------------------------------------------------


def test_equal_schedules_have_equal_digests() -> None:
    """The site, the method and the ranks of the group make no difference."""
    ours = history(full_sharding(STAIRCASE, PLAN, group=(0, 1)))
    theirs = history([replace(r, site="x.py:1 in y", name="z", group=(2, 3)) for r in ours.collectives])

    assert list(schedule_digests(ours)) == [f"schedule step {step}" for step in range(3)]
    assert schedule_digests(ours) == schedule_digests(theirs)


@pytest.mark.parametrize(
    "change",
    [
        {"op": Op.ALL_REDUCE},
        {"reduce_op": "MAX"},
        {"nbytes": 284},
        {"dtype": "bfloat16"},
        {"phase": "step"},
        {"group": (0, 1, 2)},
    ],
)
def test_another_schedule_has_another_digest(change: dict[str, object]) -> None:
    """Op, reduction, bytes, dtype, phase and group size of each collective count; only its step's digest changes."""
    ours = history(full_sharding(STAIRCASE, PLAN))
    other = history(ours.collectives)
    index = next(index for index, record in enumerate(other.collectives) if record.step == 1)
    other.collectives[index] = replace(other.collectives[index], **change)  # type: ignore[arg-type]
    one, two = schedule_digests(ours), schedule_digests(other)

    assert [label for label in one if one[label] != two[label]] == ["schedule step 1"]


def test_evaluation_counts() -> None:
    """Ranks that disagree about it hang as well."""
    ours = history(full_sharding(STAIRCASE, PLAN))
    other = history([*ours.collectives, collective(Op.ALL_GATHER, 280, step=1, phase="eval")])
    one, two = schedule_digests(ours), schedule_digests(other)

    assert [label for label in one if one[label] != two[label]] == ["schedule step 1"]


def test_sends_and_receives_do_not_count() -> None:
    """Where one rank sends, another one receives."""
    sends, receives = (
        history([*full_sharding(STAIRCASE, PLAN), collective(op, 4, step=1, phase="step")]) for op in (Op.SEND, Op.RECV)
    )

    assert schedule_digests(sends) == schedule_digests(receives)


def test_the_order_counts() -> None:
    """The same collectives in another order are another sequence."""
    ours = history(full_sharding(STAIRCASE, PLAN))
    swapped = history([*ours.collectives[1::-1], *ours.collectives[2:]])

    assert schedule_digests(ours) != schedule_digests(swapped)


def test_reductions_have_a_dtype_of_the_plan() -> None:
    """Steps may reduce nothing, and a flag or two have any dtype; where units differ, each of their dtypes is right."""
    plan = replace(PLAN, param_dtype="bfloat16", reduce_dtype="float32")
    records = full_sharding(STAIRCASE, PLAN)
    low = [replace(record, dtype="bfloat16") if record.op is Op.REDUCE_SCATTER else record for record in records]
    flag = replace(low[-1], op=Op.ALL_REDUCE, nbytes=16, dtype="float64")

    def likely(records: list[CollectiveRecord], plan: Plan) -> set[str | None]:
        result = communication.reduced_as_planned(history(records), STAIRCASE, plan, requirement="R084")
        return {finding.likely for finding in result.findings}

    assert likely([], plan) == likely(records, plan) == likely([*records, flag], plan) == set()
    assert likely(low, plan) == {"gradients are reduced in bfloat16, not in float32"}
    assert likely(low, replace(plan, reduce_dtype=None)) == set()


@pytest.mark.parametrize("nbytes", [4, 64])
def test_a_norm_may_have_another_dtype_than_the_gradients(nbytes: int) -> None:
    """A single float32 number that is reduced in the step is a norm; more of them are gradients in the wrong dtype."""
    records = [replace(record, dtype="bfloat16") for record in replicated(1024)]
    records += [replace(record, phase="step", nbytes=nbytes, dtype="float32") for record in replicated(1024)]
    result = communication.reductions_in(history(records), "bfloat16", requirement="R083")

    assert bool(result.findings) == (nbytes == 64)
    assert result.count.comparisons == 3
