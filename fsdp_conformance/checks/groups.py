"""
Over which ranks collectives run.

Under hybrid sharding with r replica groups, world size W and shard size s = W / r: shard groups are blocks of s
consecutive ranks, replica groups hold the ranks with equal place in their block.
"""

from __future__ import annotations

from fsdp_conformance.checks.result import CheckResult, Tally
from fsdp_conformance.checks.sizes import padded_bytes, parameter_bytes, sized_units
from fsdp_conformance.checks.traffic import REDUCING, in_step, nbytes, of, sites
from fsdp_conformance.config import Plan
from fsdp_conformance.errors import SuiteError
from fsdp_conformance.history.collective import CollectiveRecord, Op
from fsdp_conformance.history.training import StepRecord, TrainingHistory
from fsdp_conformance.workload import Workload

Group = tuple[int, ...]


def shard_group(rank: int, world_size: int, replicas: int) -> Group:
    """The block of consecutive ranks that `rank` shards with: rank 2 of 4 in 2 replicas shards with 3."""
    size = world_size // replicas
    first = rank // size * size
    return tuple(range(first, first + size))


def replica_group(rank: int, world_size: int, replicas: int) -> Group:
    """The ranks that hold the same shard: rank 2 of 4 in 2 replicas, and rank 0."""
    size = world_size // replicas
    return tuple(range(rank % size, world_size, size))


def groups_used(history: TrainingHistory, workload: Workload, plan: Plan, *, requirement: str) -> CheckResult:
    """
    Collectives of forward and backward run over the declared groups only (R069).

    Hybrid: gathers and scatters in the shard group, all-reduces in the replica group, and both are seen. Local units:
    what goes over more than one rank is too small to contain their parameters. Neither: the world.
    """
    if history.world_size % plan.replicas:
        raise SuiteError(f"replicas={plan.replicas}, but should divide {history.world_size} ranks [groups_used]")
    tally = Tally("groups", requirement, rank=history.rank)
    for step in history.steps:
        # Over one rank, too: that is how a replica group that is never reduced over shows itself.
        records = [
            record
            for record in history.collectives
            if record.step == step.step and record.phase in ("forward", "backward")
        ]
        for op in dict.fromkeys(record.op for record in records):
            _judge_groups(tally, step, of(records, op), _allowed(history, plan, op))
        if plan.replicas > 1:
            _judge_presence(tally, step, in_step(history, step.step), history, plan)
        if plan.local_units:
            _judge_local(tally, step, history, workload, plan)
    return tally.result()


def _allowed(history: TrainingHistory, plan: Plan, op: Op) -> set[Group]:
    """The groups that an op may run over on this rank. Ops that neither gather nor reduce may use any of them."""
    rank, world = history.rank, history.world_size
    shards = {shard_group(rank, world, plan.replicas)}
    reduced = {replica_group(rank, world, plan.replicas) if plan.replicas > 1 else tuple(range(world))}
    own: set[Group] = {(rank,)} if plan.local_units else set()
    gathered = shards | own
    size = plan.reshard_after_forward
    if isinstance(size, int) and not isinstance(size, bool):
        gathered.add(shard_group(rank, world, world // size))
    if op is Op.ALL_GATHER:
        return gathered
    if op is Op.REDUCE_SCATTER:
        return shards | own
    if op is Op.ALL_REDUCE:
        return reduced | own
    return {tuple(range(world))} | gathered | reduced


def _judge_groups(tally: Tally, step: StepRecord, records: list[CollectiveRecord], allowed: set[Group]) -> None:
    wrong = [record for record in records if record.group not in allowed]
    op, wanted = records[0].op, " or ".join(_text(group) for group in sorted(allowed, key=len, reverse=True))
    got = " and ".join(_text(group) for group in dict.fromkeys(record.group for record in wrong))
    tally.expect(
        not wrong,
        f"{len(wrong)} of {len(records)} {op.value} run over {got}, but should be over {wanted}",
        elements=len(records), step=step.step, phase=wrong[0].phase if wrong else None, got=got, expected=wanted,
        call=sites(wrong),
    )  # fmt: skip


def _judge_presence(
    tally: Tally, step: StepRecord, records: list[CollectiveRecord], history: TrainingHistory, plan: Plan
) -> None:
    """Gradients are reduced inside the shard group and between replicas; one of them alone leaves ranks apart."""
    rank, world = history.rank, history.world_size
    whole = tuple(range(world))
    for group, what in (
        (shard_group(rank, world, plan.replicas), "shard group"),
        (replica_group(rank, world, plan.replicas), "replica group"),
    ):
        seen = [record for record in of(records, *REDUCING) if record.group in (group, whole)]
        tally.expect(
            bool(seen) or len(group) == 1,
            f"no gradient is reduced over the {what} {_text(group)}, but every one should be",
            step=step.step, phase="reduce", got="0", expected=_text(group),
            likely=f"ranks of the {what} train apart",
        )  # fmt: skip


def _judge_local(tally: Tally, step: StepRecord, history: TrainingHistory, workload: Workload, plan: Plan) -> None:
    """By bytes: a pass over the shared parameters, padded, leaves no room for half of the local ones."""
    units = sized_units(workload, plan)
    local = parameter_bytes(units.local)
    if not local:
        raise SuiteError(f"local units own 0 B, but should own parameters [groups_used, workload {workload.name}]")
    most = (padded_bytes(units.shared, history.world_size) + local // 2) * len(step.losses)
    for phase, ops in (("forward", {Op.ALL_GATHER}), ("backward", {Op.ALL_GATHER}), ("backward", REDUCING)):
        seen = of(in_step(history, step.step, phase), *ops)
        what = "gathered" if Op.ALL_GATHER in ops else "reduced"
        tally.expect(
            nbytes(seen) <= most,
            f"{nbytes(seen)} B {what} over more than one rank, but should be at most {most} B: "
            f"without the {local} B of {', '.join(plan.local_units)}",
            elements=max(len(seen), 1), step=step.step, phase=phase, got=f"{nbytes(seen)} B", expected=f"{most} B",
            call=sites(seen), likely=f"{', '.join(plan.local_units)} is communicated over the world",
        )  # fmt: skip


def _text(group: Group) -> str:
    return f"[{','.join(map(str, group))}]"
