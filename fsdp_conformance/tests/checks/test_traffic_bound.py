"""The upper bound of a step's traffic: silent on what the passes need, and each excess is reported."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from fsdp_conformance.checks import traffic_bound
from fsdp_conformance.history.collective import CollectiveRecord, Op
from fsdp_conformance.tests.checks.schedules import PLAN, STAIRCASE, collective, full_sharding, history


def _findings(records: Sequence[CollectiveRecord], *, passes: int = 2, reductions: int = 1) -> list[str]:
    result = traffic_bound.at_most(
        history(records), STAIRCASE, PLAN, passes=lambda step: passes, reductions=lambda step: reductions,
        world_size=2, padding=0.0, requirement="R068",
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
        (Op.REDUCE_SCATTER, "backward", ["reduce-scattered in the step", "reduced in the step"]),
        (Op.ALL_REDUCE, "step", ["reduced in the step"]),
    ],
)
def test_more_than_the_passes_need_is_reported(op: Op, phase: str, what: list[str]) -> None:
    """Whichever call carries it, in whichever phase."""
    extra = collective(op, 10 * traffic_bound.SMALL, phase=phase)

    assert _findings([*full_sharding(STAIRCASE, PLAN), extra]) == what


def test_small_messages_are_allowed() -> None:
    """Norms, flags and shapes are not traffic."""
    assert _findings([*full_sharding(STAIRCASE, PLAN), collective(Op.ALL_REDUCE, 8, phase="step")]) == []


def test_more_passes_allow_more() -> None:
    """Traffic that is too much for one pass is right for many."""
    extra = collective(Op.ALL_GATHER, 10 * traffic_bound.SMALL, phase="forward")

    assert _findings([*full_sharding(STAIRCASE, PLAN), extra], passes=50) == []
