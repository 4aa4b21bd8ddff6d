"""Order of collectives and sameness of steps: silent on a right schedule, each damage is reported."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import pytest
import torch

from fsdp_conformance.checks.order import execution_order, gathered_units, run_order, steady_schedule
from fsdp_conformance.checks.result import CheckResult
from fsdp_conformance.errors import SuiteError
from fsdp_conformance.fixtures import models, probes, reuse
from fsdp_conformance.history.collective import CollectiveRecord, Op
from fsdp_conformance.plan import Plan
from fsdp_conformance.tests.checks.schedules import collective, full_sharding, history, replicated

STAIRCASE = models.staircase()
PLAN = Plan(units=STAIRCASE.units)


def judged(records: Sequence[CollectiveRecord]) -> CheckResult:
    """R070 on two ranks."""
    return execution_order(history(records), STAIRCASE, PLAN, requirement="R070")


def test_units_run_in_this_order() -> None:
    """Outer before inner, each once, whatever the order in which the plan names them."""
    nested = probes.exact_nested()

    assert run_order(nested, Plan(units=nested.units), rank=1, world_size=2) == [
        "stages.0", "stages.0.inner", "stages.0.inner.inner", "stages.1",
    ]  # fmt: skip
    assert run_order(STAIRCASE, Plan(units=("8+4", "0")), rank=0, world_size=2) == ["0", "8+4"]


def test_finding_the_order_leaves_the_random_state_alone() -> None:
    """A forward with dropout draws numbers, which the training must not miss."""
    workload = reuse.called_twice()
    before = torch.random.get_rng_state()
    run_order(workload, Plan(units=workload.units), rank=0, world_size=2)

    assert torch.equal(before, torch.random.get_rng_state())


def test_execution_order_passes() -> None:
    """Gathers in order, scatters in reverse, the root wherever it likes."""
    records = full_sharding(STAIRCASE, PLAN)
    root_last = sorted(records, key=lambda r: r.nbytes == 216)

    assert judged(records).findings == []
    assert judged(root_last).findings == []
    assert judged(records).count.comparisons == 4


def test_padding_does_not_hide_whose_a_collective_is() -> None:
    """A sixth more bytes still are the unit's."""
    padded = [replace(r, nbytes=r.nbytes * 7 // 6 // 4 * 4) for r in full_sharding(STAIRCASE, PLAN)]

    assert judged(padded).findings == []


def test_gathers_out_of_order_are_reported() -> None:
    """The finding names both orders."""
    records = full_sharding(STAIRCASE, PLAN)
    forward = [r for r in records if r.phase == "forward"]
    result = judged([*reversed(forward), *(r for r in records if r.phase != "forward")])

    assert [finding.message for finding in result.findings] == [
        "order of all-gathers: expected 0, 2, 4, 6, 8, got 8, 6, 4, 2, 0"
    ] * 2
    assert result.findings[0].phase == "forward"


def test_scatters_in_forward_order_are_reported() -> None:
    """Gradients are ready in the reverse order."""
    records = full_sharding(STAIRCASE, PLAN)
    scatters = [r for r in records if r.op is Op.REDUCE_SCATTER]
    result = judged([*(r for r in records if r.op is not Op.REDUCE_SCATTER), *reversed(scatters)])

    assert result.findings[0].message == "order of reduce-scatters: expected 8, 6, 4, 2, 0, got 0, 2, 4, 6, 8"


def test_a_gather_of_no_unit_is_reported() -> None:
    """One collective for two units has a size that no unit has."""
    records = [
        replace(r, nbytes=2300) if r.nbytes == 1672 and r.phase == "forward" else r
        for r in full_sharding(STAIRCASE, PLAN)
        if not (r.nbytes == 1080 and r.phase == "forward")
    ]

    assert judged(records).findings[0].message == (
        "order of all-gathers: expected 0, 2, 4, 6, 8, got 0, 2, (2300 B, no unit's), 8"
    )


def test_units_of_one_size_cannot_be_told_apart() -> None:
    """The suite must not judge an order that it cannot see."""
    wide = models.wide_mlp()

    with pytest.raises(SuiteError, match="cannot tell units apart by size once padded for 2 ranks"):
        execution_order(history([]), wide, Plan(units=wide.units), requirement="R070")


# --- steps ----------------------------------------------------------------------------------------------------------


def steady(records: Sequence[CollectiveRecord], *, validation: bool = False) -> CheckResult:
    """R071 over three steps."""
    return steady_schedule(history(records), requirement="R071", validation=validation)


def test_equal_steps_pass() -> None:
    """Three equal steps; buckets of the first step may have other sizes."""
    rebuilt = [replace(r, nbytes=r.nbytes + 8) if r.step == 0 else r for r in replicated(488)]

    assert steady(full_sharding(STAIRCASE, PLAN)).findings == []
    assert steady(rebuilt).findings == []


def test_a_first_step_with_more_is_reported_unless_declared() -> None:
    """A validation of the execution order is an extra that the engine must declare."""
    records = [*full_sharding(STAIRCASE, PLAN), collective(Op.ALL_GATHER, 8, step=0)]

    assert [finding.message for finding in steady(records).findings] == [
        "collectives in the first step: expected the 18 of step 1, got 19; +1 all_gather in forward"
    ]
    assert steady(records, validation=True).findings == []
    assert steady(records, validation=True).notes == ["the first step issues 1 more collectives, as declared"]


def test_a_first_step_with_less_passes() -> None:
    """Nothing is extra."""
    records = full_sharding(STAIRCASE, PLAN)

    assert steady(records[1:]).findings == []


def test_a_growing_step_is_reported() -> None:
    """Step 2 issues what step 1 did not."""
    records = [*full_sharding(STAIRCASE, PLAN), collective(Op.ALL_REDUCE, 4, step=2, phase="step")]

    assert [finding.message for finding in steady(records).findings] == [
        "collectives: expected the 18 of step 1, got 19; +1 step all_reduce 4B float32 [0,1]"
    ]


def test_gathers_are_told_apart_by_size() -> None:
    """In the order in which they were issued, without the root's."""
    forward = [record for record in full_sharding(STAIRCASE, PLAN) if (record.step, record.phase) == (1, "forward")]

    assert gathered_units(forward, STAIRCASE, PLAN, world_size=2) == list(STAIRCASE.units)
    assert gathered_units(forward[::-1], STAIRCASE, PLAN, world_size=2) == list(STAIRCASE.units)[::-1]
    with pytest.raises(SuiteError, match="cannot tell units apart"):
        gathered_units(forward, models.wide_mlp(), Plan(units=models.wide_mlp().units), world_size=2)
