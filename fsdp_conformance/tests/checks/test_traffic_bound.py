"""The upper bound of a step's traffic: silent on what the passes need, and each excess is reported."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import pytest

from fsdp_conformance.checks import traffic_bound
from fsdp_conformance.checks.traffic_bound import Needs
from fsdp_conformance.history.collective import CollectiveRecord, Op
from fsdp_conformance.plan import Sharding
from fsdp_conformance.tests.checks.schedules import PLAN, STAIRCASE, STAIRCASE_BYTES, collective, full_sharding, history
from fsdp_conformance.workload.units import owning_units, parameter_bytes


def _findings(
    records: Sequence[CollectiveRecord], *, passes: int = 2, reductions: int = 1, counts: bool = False
) -> list[str]:
    result = traffic_bound.at_most(
        history(records), STAIRCASE, PLAN, lambda step: Needs(passes=passes, reductions=reductions),
        padding=0.0, counts=counts, requirement="R068",
    )  # fmt: skip
    return sorted({finding.message.partition(":")[0] for finding in result.findings})


def test_a_plain_schedule_is_within() -> None:
    """A forward, a backward and a reduction."""
    assert _findings(full_sharding(STAIRCASE, PLAN)) == []


@pytest.mark.parametrize(
    ("op", "phase", "what"),
    [
        (Op.ALL_GATHER, "forward", ["gathered in the step"]),
        (Op.ALL_GATHER, "eval", ["gathered in the step"]),
        (Op.BROADCAST, "backward", ["gathered in the step"]),
        (Op.REDUCE_SCATTER, "backward", ["reduce-scattered in the step"]),
        (Op.ALL_GATHER, "step", ["gathered for the update", "gathered in the step"]),
        (Op.ALL_TO_ALL, "forward", ["gathered in the step"]),
        (Op.ALL_TO_ALL, "backward", ["gathered and reduced in the step"]),
        (Op.ALL_REDUCE, "step", ["all-reduced in the step"]),
        (Op.ALL_REDUCE, "eval", ["all-reduced in the step", "reduced by evaluations"]),
    ],
)
def test_more_than_the_passes_need_is_reported(op: Op, phase: str, what: list[str]) -> None:
    """Whichever call carries it, in whichever phase."""
    extra = collective(op, 2 * STAIRCASE_BYTES, phase=phase)

    assert _findings([*full_sharding(STAIRCASE, PLAN), extra]) == what


def test_a_small_unit_that_is_sent_once_more() -> None:
    """It shows in the number of collectives, of an engine that has one for each unit, and in no number of bytes."""
    records = full_sharding(STAIRCASE, PLAN)
    reduced = collective(Op.REDUCE_SCATTER, 4, phase="backward")
    gathered = collective(Op.ALL_GATHER, 4, phase="forward")

    assert _findings([*records, reduced, gathered]) == []
    assert _findings([*records, reduced], counts=True) == ["reduce-scatters in the step"]
    assert _findings([*records, gathered], counts=True) == ["all-gathers in the step"]
    assert _findings(records, counts=True) == []
    assert _findings([*records, reduced, gathered], passes=3, reductions=2, counts=True) == []


def test_gradients_may_be_exchanged_and_added() -> None:
    """An all-to-all in backward in place of each reduce-scatter is within the bounds of both."""
    exchanged = [
        replace(record, op=Op.ALL_TO_ALL) if record.op is Op.REDUCE_SCATTER else record
        for record in full_sharding(STAIRCASE, PLAN)
    ]

    assert Op.ALL_TO_ALL in {record.op for record in exchanged}
    assert _findings(exchanged) == []


def test_a_second_reduction_over_the_replicas_is_reported() -> None:
    """Under hybrid sharding a shard is all-reduced once for each reduction that includes the replicas."""
    plan = replace(PLAN, sharding=Sharding.HYBRID, replicas=2)
    scattered = collective(Op.REDUCE_SCATTER, 400, phase="backward")
    summed = [collective(Op.ALL_REDUCE, parameter_bytes(owning_units(STAIRCASE, plan).shared) // 2, phase="backward")]

    def messages(times: int) -> list[str]:
        result = traffic_bound.at_most(
            history([scattered, *summed * times], world_size=4), STAIRCASE, plan,
            lambda step: Needs(passes=2, reductions=3, over_replicas=1), padding=0.0, requirement="R068",
        )  # fmt: skip
        return [finding.message.partition(":")[0] for finding in result.findings]

    assert messages(1) == []
    assert messages(3) == ["all-reduced in the step"]


def test_an_evaluation_gathers_once() -> None:
    """Passes that training does not need are no excuse; the first unit of the next forward may come early."""
    one = [record for record in full_sharding(STAIRCASE, PLAN) if record.op is Op.ALL_GATHER and record.step == 0]
    one = [replace(record, phase="eval") for record in one[: len(one) // 2]]
    ahead = [replace(one[0], nbytes=16)]

    def messages(records: list[CollectiveRecord], evaluations: int | None) -> list[str]:
        result = traffic_bound.at_most(
            history(records), STAIRCASE, PLAN, lambda step: Needs(passes=50, reductions=1, evaluations=evaluations),
            padding=0.0, requirement="R068",
        )  # fmt: skip
        return [finding.message.partition(":")[0] for finding in result.findings]

    assert messages([*one, *ahead], 1) == []
    assert messages([*one, *one], 2) == messages([*one, *one], None) == []
    assert messages([*one, *one, *one], 1) == messages(one, 0) == ["gathered by evaluations"]


def test_the_dtype_of_the_plan_counts() -> None:
    """Gathering in float32 takes twice as much as a plan that computes in bfloat16 needs."""
    plan = replace(PLAN, param_dtype="bfloat16")
    gathered = [record for record in full_sharding(STAIRCASE, PLAN) if record.op is Op.ALL_GATHER]

    result = traffic_bound.at_most(
        history(gathered), STAIRCASE, plan, lambda step: Needs(passes=2, reductions=1), padding=0.0,
        requirement="R068",
    )  # fmt: skip
    assert {finding.message.partition(":")[0] for finding in result.findings} == {"gathered in the step"}


def test_small_messages_are_allowed() -> None:
    """Norms, flags and shapes are not traffic."""
    assert _findings([*full_sharding(STAIRCASE, PLAN), collective(Op.ALL_REDUCE, 8, phase="step")]) == []


def test_more_passes_allow_more() -> None:
    """Traffic that is too much for one pass is right for many."""
    extra = collective(Op.ALL_GATHER, 2 * STAIRCASE_BYTES, phase="forward")

    assert _findings([*full_sharding(STAIRCASE, PLAN), extra], passes=50) == []
