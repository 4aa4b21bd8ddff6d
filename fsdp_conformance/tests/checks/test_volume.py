"""Bytes on the wire: the ideal passes, declared padding passes, more does not."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from fsdp_conformance.checks.communication import total_volume, wire_volume
from fsdp_conformance.checks.result import CheckResult
from fsdp_conformance.fixtures import probes
from fsdp_conformance.history.collective import CollectiveRecord, Op
from fsdp_conformance.tests.checks.schedules import (
    PLAN,
    STAIRCASE,
    full_sharding,
    history,
    messages,
    plan_of,
)


def volume(records: Sequence[CollectiveRecord], padding: float = 0.0) -> CheckResult:
    """R068 on two ranks; 6256 bytes are ideal and, with even rows, the most without padding."""
    return wire_volume(history(records), STAIRCASE, PLAN, world_size=2, padding=padding, requirement="R068")


def test_ideal_volume_passes_and_is_measured() -> None:
    """Each pass carries the parameters' bytes once."""
    result = volume(full_sharding(STAIRCASE, PLAN))

    assert result.findings == []
    assert result.measurements["wire volume over ideal"] == {"forward": 1.0, "backward": 1.0, "reduce": 1.0}


def test_uneven_rows_may_be_padded() -> None:
    """13, 7 and 3 rows over 2 ranks are gathered as 14, 8 and 4 without any declared padding."""
    workload = probes.exact_mlp()
    plan = plan_of(workload)
    result = wire_volume(
        history(full_sharding(workload, plan)), workload, plan, world_size=2, padding=0.0, requirement="R068"
    )

    assert result.findings == []
    assert result.measurements["wire volume over ideal"]["forward"] > 1


def test_padding_beyond_the_declared_one_is_reported() -> None:
    """10 % more is within 15 % and beyond 5 %."""
    padded = [replace(r, nbytes=r.nbytes * 11 // 10) for r in full_sharding(STAIRCASE, PLAN)]

    assert volume(padded, 0.15).findings == []
    assert messages(volume(padded, 0.05)) == [
        "received by all-gathers in forward: expected 6256 to 6568 B, got 6880 B",
        "received by all-gathers in backward: expected at most 6568 B, got 6880 B",
        "sent by reduce-scatters: expected 6256 to 6568 B, got 6880 B",
    ]


def test_all_reduce_and_slice_is_reported() -> None:
    """Nothing is scattered, and other ops carry the gradients."""
    records = [replace(r, op=Op.ALL_REDUCE) if r.op is Op.REDUCE_SCATTER else r for r in full_sharding(STAIRCASE, PLAN)]

    assert messages(volume(records, 0.15)) == [
        "sent by reduce-scatters: expected 6256 to 7194 B, got 0 B",
        "carried by other collectives: expected at most 938 B, got 6256 B",
    ]


def test_parameters_that_are_not_gathered_are_reported() -> None:
    """A forward that gathers less than all parameters did not shard all of them."""
    records = [r for r in full_sharding(STAIRCASE, PLAN) if not (r.phase == "forward" and r.nbytes == 2392)]

    assert messages(volume(records)) == ["received by all-gathers in forward: expected 6256 B, got 3864 B"]


def test_bytes_are_those_of_the_dtypes() -> None:
    """Parameters in bfloat16 have half the bytes; gradients have those of the reduction, by default the same."""
    plan = replace(PLAN, param_dtype="bfloat16")
    halved = [replace(r, nbytes=r.nbytes // 2) for r in full_sharding(STAIRCASE, PLAN)]

    def judged(records: Sequence[CollectiveRecord], reduce_dtype: str | None) -> list[str]:
        cast_plan = replace(plan, reduce_dtype=reduce_dtype)
        return messages(
            wire_volume(history(records), STAIRCASE, cast_plan, world_size=2, padding=0.0, requirement="R068")
        )

    assert judged(halved, None) == []
    assert judged(halved, "float32") == ["sent by reduce-scatters: expected 6256 B, got 3128 B"]
    assert judged(full_sharding(STAIRCASE, PLAN), "float32") == [
        "received by all-gathers in forward: expected 3128 B, got 6256 B",
        "received by all-gathers in backward: expected at most 3128 B, got 6256 B",
    ]


def total(records: Sequence[CollectiveRecord], padding: float = 0.0) -> CheckResult:
    """R068 for any engine, on two ranks: at most three passes of 6256 bytes."""
    return total_volume(history(records), STAIRCASE, PLAN, world_size=2, padding=padding, requirement="R068")


def test_three_passes_are_enough_for_any_engine() -> None:
    """Two passes of parameters and one of gradients, by whatever collectives; an all-reduce is two passes."""
    right = full_sharding(STAIRCASE, PLAN)
    exchanged = [replace(r, op=Op.ALL_TO_ALL) if r.op is Op.REDUCE_SCATTER else r for r in right]
    reduced = [replace(r, op=Op.ALL_REDUCE) if r.op is Op.REDUCE_SCATTER else r for r in right]

    assert total(right).findings == []
    assert total(exchanged).findings == []
    assert messages(total(reduced, 0.15)) == [
        "sent in the step: expected at most 21583 B, got 25024 B; the parameters have 6256 B, padding at most 15%"
    ]


def test_padding_counts_in_all() -> None:
    """10 % more is within 15 % and beyond 5 %."""
    padded = [replace(r, nbytes=r.nbytes * 11 // 10) for r in full_sharding(STAIRCASE, PLAN)]

    assert total(padded, 0.15).findings == []
    assert len(total(padded, 0.05).findings) == 2
