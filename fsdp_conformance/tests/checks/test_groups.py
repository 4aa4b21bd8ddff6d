"""Groups of collectives: the declared ones pass, any other is reported."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import pytest

from fsdp_conformance.checks.groups import groups_used, replica_group, reshard_group_used, shard_group, world_alone
from fsdp_conformance.checks.result import CheckResult
from fsdp_conformance.errors import SuiteError
from fsdp_conformance.fixtures import experts
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


def test_shard_groups_are_blocks_and_replica_groups_are_strides() -> None:
    """Rank 4 of 6 in 2 replicas shards with 3 and 5 and reduces with 1; in 3 replicas with 5, and with 0 and 2."""
    assert shard_group(4, 6, 2) == (3, 4, 5)
    assert replica_group(4, 6, 2) == (1, 4)
    assert shard_group(4, 6, 3) == (4, 5)
    assert replica_group(4, 6, 3) == (0, 2, 4)


def grouped(records: Sequence[CollectiveRecord], plan: Plan, **fields: int) -> CheckResult:
    """R069 on the staircase."""
    return groups_used(history(records, **fields), STAIRCASE, plan, requirement="R069")


def test_hybrid_groups() -> None:
    """Gathers in the shard group and all-reduces in the replica group pass; over the world they are reported."""
    plan = plan_of(STAIRCASE, Sharding.HYBRID, replicas=2)
    right = full_sharding(STAIRCASE, plan, group=(2, 3), replicas=(0, 2))
    world = (0, 1, 2, 3)
    everywhere = [replace(r, group=world) if r.op is Op.ALL_GATHER else r for r in right]

    assert grouped(right, plan, world_size=4, rank=2).findings == []
    assert messages(grouped(everywhere, plan, world_size=4, rank=2)) == [
        "ranks of all_gather: expected [2,3], got [0,1,2,3]; 12 of 12 collectives"
    ]


def test_the_world_alone() -> None:
    """Three ranks over the world pass; two of them, or nothing at all, are reported; one rank alone has no traffic."""
    right = full_sharding(STAIRCASE, PLAN, group=(0, 1, 2))
    aside = [*right, collective(Op.ALL_REDUCE, 4, step=1, group=(0, 1))]
    alone = [*right, collective(Op.ALL_REDUCE, 4, step=1, group=(0,))]

    assert world_alone(history(right, world_size=3), requirement="R069").findings == []
    assert world_alone(history(alone, world_size=3), requirement="R069").findings == []
    assert messages(world_alone(history(aside, world_size=3), requirement="R069")) == [
        "ranks of all_reduce: expected [0,1,2], got [0,1]; 1 of 1 collectives"
    ]
    assert messages(world_alone(history([], world_size=3), requirement="R069")) == [
        "collectives over [0,1,2]: expected at least 1, got 0"
    ]


def test_the_group_that_parameters_are_resharded_to() -> None:
    """Backward gathers over the group of two; over the world it is reported, and no such group is our own mistake."""
    plan = plan_of(STAIRCASE, Sharding.DEFAULT, reshard_after_forward=2)
    world = full_sharding(STAIRCASE, plan, group=(0, 1, 2, 3))
    right = [replace(r, group=(2, 3)) if (r.phase, r.op) == ("backward", Op.ALL_GATHER) else r for r in world]

    def judged(records: Sequence[CollectiveRecord], requested: Plan = plan) -> CheckResult:
        return reshard_group_used(history(records, world_size=4, rank=2), STAIRCASE, requested, requirement="R005")

    assert judged(right).findings == []
    assert messages(judged(world)) == [
        "gathered in backward over [2,3]: expected at least 3020 B, got 0 B; 7072 B over all groups"
    ]
    with pytest.raises(SuiteError, match="reshard_after_forward must divide 4 ranks, got None"):
        judged(right, PLAN)


def test_replicas_that_are_never_reduced_are_reported() -> None:
    """A shard group of one rank whose engine reduces over it alone leaves the replicas apart."""
    plan = plan_of(STAIRCASE, Sharding.HYBRID, replicas=2)

    assert messages(grouped(replicated(BYTES, group=(0,)), plan)) == [
        "ranks of all_reduce: expected [0,1], got [0]; 1 of 1 collectives",
        "gradients reduced over the replica group [0,1]: expected all, got none",
    ]
    assert grouped(replicated(BYTES), plan).findings == []


def test_without_sub_groups_only_the_world() -> None:
    """A sub-group that was not requested is reported."""
    part = [replace(r, group=(0, 1)) for r in full_sharding(STAIRCASE, PLAN, group=(0, 1, 2, 3))]

    assert grouped(full_sharding(STAIRCASE, PLAN), PLAN).findings == []
    assert len(grouped(part, PLAN, world_size=4).findings) == 6


def test_resharding_to_a_smaller_group_gathers_there() -> None:
    """With an int the second gather may run over the block of that many ranks, and over no other one."""
    plan = plan_of(STAIRCASE, reshard_after_forward=2)
    records = full_sharding(STAIRCASE, plan, group=(0, 1, 2, 3))
    smaller = [replace(r, group=(2, 3)) if (r.phase, r.op) == ("backward", Op.ALL_GATHER) else r for r in records]

    assert grouped(smaller, plan, world_size=4, rank=3).findings == []
    assert len(grouped(smaller, plan, world_size=4, rank=0).findings) == 3


def test_an_expert_over_the_world_is_reported() -> None:
    """The shared units of 2048 bytes pass; with the expert's 1152 there is too much in every pass."""
    workload = experts.mixture_of_experts()
    plan = plan_of(workload, Sharding.DEFAULT)
    right = full_sharding(workload, plan)
    own = [collective(Op.ALL_REDUCE, 1152, step=step, phase="backward", group=(0,)) for step in range(3)]
    wrong = [*right, *(replace(r, op=op, group=(0, 1)) for r in own for op in (Op.ALL_GATHER, Op.REDUCE_SCATTER))]

    def judged(records: Sequence[CollectiveRecord]) -> CheckResult:
        return groups_used(history(records), workload, plan, requirement="R069")

    assert judged([*right, *own]).findings == []
    assert messages(judged(wrong)) == [
        f"{verb} over more than one rank: expected at most 2672 B, got 3248 B; "
        "the 1152 B of module.2 should stay on their rank"
        for verb in ("gathered", "reduced")
    ]
