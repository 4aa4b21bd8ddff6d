"""A unit that is not gathered again was left unsharded."""

from __future__ import annotations

from dataclasses import replace

from fsdp_conformance.checks.resharding import gathered_again, holds_whole_parameters
from fsdp_conformance.history.collective import CollectiveRecord, Op
from fsdp_conformance.history.training import TrainingHistory
from fsdp_conformance.tests.checks.schedules import PLAN, STAIRCASE, full_sharding, history, messages


def test_units_that_are_gathered_again_pass() -> None:
    """This is the schedule of full sharding."""
    result = gathered_again(history(full_sharding(STAIRCASE, PLAN)), STAIRCASE, PLAN, requirement="R111")

    assert result.findings == []
    assert result.count.comparisons > 0


def test_gathers_after_the_step_before_count() -> None:
    """An engine may gather the next forward's parameters as soon as they are updated."""

    def earlier(record: CollectiveRecord) -> CollectiveRecord:
        if record.op is Op.ALL_GATHER and record.phase == "forward" and record.step:
            return replace(record, step=record.step - 1, phase="step")
        return record

    moved = [earlier(record) for record in full_sharding(STAIRCASE, PLAN)]

    assert gathered_again(history(moved), STAIRCASE, PLAN, requirement="R111").findings == []


def test_a_unit_that_is_not_gathered_again_is_reported() -> None:
    """The finding is in the first step after the unit was left unsharded."""
    records = full_sharding(STAIRCASE, PLAN)
    left_out = next(r for r in records if (r.op, r.phase, r.step) == (Op.ALL_GATHER, "forward", 1))
    run = history([record for record in records if record is not left_out])

    result = gathered_again(run, STAIRCASE, PLAN, requirement="R111")

    assert [(finding.requirement, finding.step, finding.phase) for finding in result.findings] == [
        ("R111", 1, "reshard")
    ]
    assert "the parameters that are not gathered were left unsharded by the step before" in messages(result)[0]


def test_whole_parameters_are_no_shards() -> None:
    """Replicated engines hold all bytes between steps."""
    run = TrainingHistory(source="mine", rank=0, world_size=2, full_bytes={"params": 100})

    assert not holds_whole_parameters(replace(run, held_bytes={"params": 50}))
    assert holds_whole_parameters(replace(run, held_bytes={"params": 100}))
    assert not holds_whole_parameters(run)
