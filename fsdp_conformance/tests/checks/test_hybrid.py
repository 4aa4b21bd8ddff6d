"""Hybrid sharding by unit: silent on a right schedule, and each damage is reported."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import replace

import pytest

from fsdp_conformance.checks.groups import unit_traffic
from fsdp_conformance.checks.result import CheckResult
from fsdp_conformance.errors import SuiteError
from fsdp_conformance.history.collective import CollectiveRecord, Op
from fsdp_conformance.plan import Plan, Sharding
from fsdp_conformance.tests.checks.schedules import STAIRCASE, full_sharding, history, messages, plan_of

PLAN = plan_of(STAIRCASE, Sharding.HYBRID, replicas=2)
RIGHT = full_sharding(STAIRCASE, PLAN, group=(0, 1), replicas=(0, 2))


def judged(records: Sequence[CollectiveRecord], plan: Plan = PLAN, *, micro_batches: int = 1) -> CheckResult:
    """R151 on rank 0 of two replicas of two."""
    seen = history(records, world_size=4, micro_batches=micro_batches)
    return unit_traffic(seen, STAIRCASE, plan, padding=0.0, requirement="R151")


def changed(op: Op, change: Callable[[CollectiveRecord], CollectiveRecord]) -> list[CollectiveRecord]:
    return [change(record) if record.op is op else record for record in RIGHT]


def test_each_unit_is_scattered_and_then_all_reduced() -> None:
    """Two steps of two counts, and of six units with bytes, bytes and order."""
    result = judged(RIGHT)

    assert result.findings == []
    assert result.count.comparisons == 2 * (2 + 3 * 6)


def test_deferred_micro_batches_reduce_nothing() -> None:
    """Each unit is reduced once in a step, however many micro-batches it has."""
    plan = replace(PLAN, defer_reduction=True, micro_batches=2)
    deferred = full_sharding(STAIRCASE, plan, group=(0, 1), replicas=(0, 2), micro_batches=2)
    eager = full_sharding(STAIRCASE, PLAN, group=(0, 1), replicas=(0, 2), micro_batches=2)

    assert judged(deferred, plan, micro_batches=2).findings == []
    assert judged(eager, micro_batches=2).findings == []
    assert messages(judged(eager, plan, micro_batches=2))[0] == (
        "reduce_scatter in the shard group: expected 6, got 12; one per trainable unit"
    )


def test_no_all_reduce() -> None:
    """The replicas never meet."""
    result = judged([record for record in RIGHT if record.op is not Op.ALL_REDUCE])

    assert messages(result) == ["all_reduce in the replica group: expected 6, got 0; one per reduce_scatter"]
    assert result.findings[0].likely == "replicas train independently"


@pytest.mark.parametrize(("op", "group"), [(Op.REDUCE_SCATTER, (0, 1, 2, 3)), (Op.ALL_REDUCE, (0, 1))])
def test_the_wrong_group(op: Op, group: tuple[int, ...]) -> None:
    """Collectives in another group do not count."""
    message = messages(judged(changed(op, lambda record: replace(record, group=group))))[0]

    assert re.fullmatch(f"{op.value} in the (shard|replica) group: expected 6, got 0; .*", message)


def test_the_full_gradient() -> None:
    """All-reducing more than the shard wastes what sharding saved; the smallest unit has 216 bytes over 2 ranks."""
    result = judged(changed(Op.ALL_REDUCE, lambda record: replace(record, nbytes=2 * record.nbytes)))

    assert messages(result)[0] == (
        "all_reduce: expected 108 B, got 216 B; the shard that a reduce_scatter of 216 B leaves on each of 2 ranks"
    )
    assert result.findings[0].likely == "the full gradient is all-reduced"


def test_bytes_of_a_unit() -> None:
    """64 B more than the gradient of a unit of 280 B, without any declared padding."""
    result = judged(
        changed(Op.REDUCE_SCATTER, lambda record: replace(record, nbytes=record.nbytes + 64 * (record.nbytes == 280)))
    )

    assert messages(result)[0] == "reduce_scatter of 0: expected 280 B, got 344 B"


def test_all_reduce_before_reduce_scatter() -> None:
    """A shard that is not there yet cannot be averaged over replicas."""
    early = [
        *(record for record in RIGHT if record.op is Op.ALL_REDUCE),
        *(record for record in RIGHT if record.op is not Op.ALL_REDUCE),
    ]

    assert any(
        message.startswith("position of the all_reduce: expected after reduce_scatter")
        for message in messages(judged(early))
    )


@pytest.mark.parametrize("replicas", [1, 3, 4])
def test_meshes_that_are_not_hybrid(replicas: int) -> None:
    """One replica, replicas that do not divide the world, or shard groups of one are the suite's mistake."""
    sharding = Sharding.HYBRID if replicas > 1 else Sharding.FULL

    with pytest.raises(
        SuiteError, match=f"replicas must split .* into at least 2 groups of at least 2, got {replicas}"
    ):
        judged(RIGHT, replace(PLAN, sharding=sharding, replicas=replicas))
