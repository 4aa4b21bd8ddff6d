"""
Over which ranks collectives run, and what each unit sends to which of them under hybrid sharding.

With r replica groups, world size W and shard size s = W / r, shard groups are blocks of s consecutive ranks, and a
replica group holds the ranks at the same position in their blocks.
"""

from __future__ import annotations

from collections.abc import Iterable

from fsdp_conformance.checks.result import CheckResult, Tally
from fsdp_conformance.checks.traffic import (
    EXCHANGING,
    REDUCING,
    expect_bytes,
    expect_count,
    in_step,
    nbytes,
    of,
    sites,
    steady_steps,
)
from fsdp_conformance.errors import SuiteError
from fsdp_conformance.history.collective import CollectiveRecord, Op
from fsdp_conformance.history.training import StepRecord, TrainingHistory
from fsdp_conformance.plan import Plan
from fsdp_conformance.workload.definition import Workload
from fsdp_conformance.workload.units import Unit, owning_units, padded_bytes, parameter_bytes

Group = tuple[int, ...]


def shard_group(rank: int, world_size: int, replicas: int) -> Group:
    """The block of consecutive ranks that `rank` shards with: of 4 ranks in 2 replicas, 2 and 3 share a block."""
    size = world_size // replicas
    first = rank // size * size
    return tuple(range(first, first + size))


def replica_group(rank: int, world_size: int, replicas: int) -> Group:
    """The ranks that hold the same shard: of 4 ranks in 2 replicas, 0 and 2 do."""
    size = world_size // replicas
    return tuple(range(rank % size, world_size, size))


def groups_used(history: TrainingHistory, workload: Workload, plan: Plan, *, requirement: str) -> CheckResult:
    """
    Collectives of forward and backward run over the declared groups only (R069).

    Hybrid: gathers and scatters in the shard group, all-reduces in the replica group, and both occur. Local units: what
    goes over more than one rank is too small to include their parameters. Otherwise: the world. Raises SuiteError if
    replicas do not divide the world, or local units own no parameters.
    """
    if history.world_size % plan.replicas:
        raise SuiteError(f"replicas must divide {history.world_size} ranks, got {plan.replicas} [groups_used]")
    tally = Tally("groups", requirement, rank=history.rank)
    for step in history.steps:
        # Including those over one rank: that is how a replica group that is never reduced over shows.
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


def world_alone(history: TrainingHistory, *, requirement: str) -> CheckResult:
    """In a step, every collective of more than one rank runs over the world, and there are some (R069)."""
    tally = Tally("groups", requirement, rank=history.rank)
    world = tuple(range(history.world_size))
    for step in history.steps:
        records = in_step(history, step.step)
        for op in dict.fromkeys(record.op for record in records):
            _judge_groups(tally, step, of(records, op), {world})
        tally.compare(
            bool(records), f"collectives over {_text(world)}", expected="at least 1", got=len(records), step=step.step,
            likely="ranks train independently",
        )  # fmt: skip
    return tally.result()


def reshard_group_used(history: TrainingHistory, workload: Workload, plan: Plan, *, requirement: str) -> CheckResult:
    """
    Backward gathers the units below the root over the group that parameters are resharded to after forward (R005).

    Half of their bytes decide, because an engine may keep the last unit of the forward gathered. Raises SuiteError if
    the plan names no group whose size divides the world.
    """
    size = plan.reshard_after_forward
    if not size or isinstance(size, bool) or history.world_size % size:
        raise SuiteError(
            f"reshard_after_forward must divide {history.world_size} ranks, got {size} [reshard_group_used]"
        )
    tally = Tally("reshard group", requirement, rank=history.rank)
    group = shard_group(history.rank, history.world_size, history.world_size // size)
    below_root = [unit for unit in owning_units(workload, plan).shared if unit.fqn]
    for step in steady_steps(history):
        gathered = of(in_step(history, step.step, "backward"), Op.ALL_GATHER)
        inside = [record for record in gathered if record.group == group]
        expect_bytes(
            tally, f"gathered in backward over {_text(group)}", inside,
            least=parameter_bytes(below_root) // 2, details=f"{nbytes(gathered)} B over all groups", step=step.step,
            phase="backward", likely="the requested group is not used",
        )  # fmt: skip
    return tally.result()


def unit_traffic(
    history: TrainingHistory, workload: Workload, plan: Plan, *, padding: float, requirement: str
) -> CheckResult:
    """
    Each trainable unit is reduce-scattered in the shard group, then its shard is all-reduced across replicas (R151).

    This happens once per micro-batch that is reduced. A reduce-scatter sends the unit's bytes, with dim 0 of each
    parameter padded to a multiple of the shard group and at most `padding` more; its all-reduce follows and carries
    what the reduce-scatter left on the rank. Collectives are matched with units by bytes, because the units of a model
    differ in size. Raises SuiteError if the plan is not hybrid.
    """
    world, rank = history.world_size, history.rank
    if world % plan.replicas or not 1 < plan.replicas < world:
        raise SuiteError(
            f"replicas must split {world} ranks into at least 2 groups of at least 2, got {plan.replicas} "
            "[unit_traffic]"
        )
    tally = Tally("hybrid sharding by unit", requirement, rank=rank)
    units = sorted(owning_units(workload, plan).trainable, key=_least_bytes)
    shard, replica = shard_group(rank, world, plan.replicas), replica_group(rank, world, plan.replicas)
    for step in steady_steps(history):
        records = in_step(history, step.step, "forward", "backward")
        reductions = 1 if plan.defer_reduction else len(step.losses)
        expected = [unit for unit in units for _ in range(reductions)]
        scattered = _by_bytes(record for record in of(records, Op.REDUCE_SCATTER) if record.group == shard)
        reduced = _by_bytes(record for record in of(records, Op.ALL_REDUCE) if record.group == replica)
        _judge_scattered(tally, step, expected, scattered, group_size=len(shard), padding=padding)
        _judge_reduced(tally, step, scattered, reduced, group_size=len(shard))
    return tally.result()


def _allowed(history: TrainingHistory, plan: Plan, op: Op) -> set[Group]:
    """The groups that an op may run over on this rank. Ops that neither gather nor reduce may use any of them."""
    rank, world = history.rank, history.world_size
    shards = {shard_group(rank, world, plan.replicas)}
    reduced = {replica_group(rank, world, plan.replicas) if plan.replicas > 1 else tuple(range(world))}
    alone: set[Group] = {(rank,)} if plan.local_units else set()
    gathered = shards | alone
    size = plan.reshard_after_forward
    if isinstance(size, int) and not isinstance(size, bool):
        gathered.add(shard_group(rank, world, world // size))
    if op is Op.ALL_GATHER:
        return gathered
    if op is Op.REDUCE_SCATTER:
        return shards | alone
    if op is Op.ALL_REDUCE:
        return reduced | alone
    return {tuple(range(world))} | gathered | reduced


def _judge_groups(tally: Tally, step: StepRecord, records: list[CollectiveRecord], allowed: set[Group]) -> None:
    wrong = [record for record in records if record.group not in allowed]
    tally.compare(
        not wrong, f"ranks of {records[0].op.value}",
        expected=" or ".join(_text(group) for group in sorted(allowed, key=len, reverse=True)),
        got=" and ".join(_text(group) for group in dict.fromkeys(record.group for record in wrong)),
        details=f"{len(wrong)} of {len(records)} collectives",
        elements=len(records), step=step.step, phase=wrong[0].phase if wrong else None, call=sites(wrong),
    )  # fmt: skip


def _judge_presence(
    tally: Tally, step: StepRecord, records: list[CollectiveRecord], history: TrainingHistory, plan: Plan
) -> None:
    """Gradients are reduced inside the shard group and across replicas; with one of them alone, ranks diverge."""
    rank, world = history.rank, history.world_size
    whole = tuple(range(world))
    for group, what in (
        (shard_group(rank, world, plan.replicas), "shard group"),
        (replica_group(rank, world, plan.replicas), "replica group"),
    ):
        reductions = [record for record in of(records, *REDUCING, *EXCHANGING) if record.group in (group, whole)]
        tally.compare(
            bool(reductions) or len(group) == 1, f"gradients reduced over the {what} {_text(group)}",
            expected="all", got="none", step=step.step, phase="reduce",
            likely=f"ranks of the {what} train independently",
        )  # fmt: skip


def _judge_local(tally: Tally, step: StepRecord, history: TrainingHistory, workload: Workload, plan: Plan) -> None:
    """Judge local units by bytes: a padded pass over shared parameters leaves no room for half of the local ones."""
    units = owning_units(workload, plan)
    local, names = parameter_bytes(units.local), ", ".join(plan.local_units)
    if not local:
        raise SuiteError(f"local units must own parameters, got 0 B [groups_used, workload {workload.name}]")
    most = (padded_bytes(units.shared, history.world_size) + local // 2) * len(step.losses)
    for phase, ops in (
        ("forward", {Op.ALL_GATHER}),
        ("backward", {Op.ALL_GATHER}),
        ("backward", REDUCING | EXCHANGING),
    ):
        verb = "gathered" if Op.ALL_GATHER in ops else "reduced"
        expect_bytes(
            tally, f"{verb} over more than one rank", of(in_step(history, step.step, phase), *ops), most=most,
            details=f"the {local} B of {names} should stay on their rank", step=step.step, phase=phase,
            likely=f"{names} is communicated over the world",
        )  # fmt: skip


def _judge_scattered(
    tally: Tally, step: StepRecord, units: list[Unit], scattered: list[CollectiveRecord], *, group_size: int,
    padding: float,
) -> None:  # fmt: skip
    expect_count(
        tally, "reduce_scatter in the shard group", scattered, least=len(units), most=len(units),
        details="one per trainable unit", step=step.step, phase="reduce",
    )  # fmt: skip
    for unit, record in zip(units, scattered, strict=False):
        most = int(padded_bytes([unit], group_size, trainable_only=True) * (1 + padding))
        expect_bytes(
            tally, f"reduce_scatter of {unit.label()}", [record], least=_least_bytes(unit), most=most, step=step.step,
            phase="reduce",
        )  # fmt: skip


def _judge_reduced(
    tally: Tally, step: StepRecord, scattered: list[CollectiveRecord], reduced: list[CollectiveRecord], *,
    group_size: int,
) -> None:  # fmt: skip
    expect_count(
        tally, "all_reduce in the replica group", reduced, least=len(scattered), most=len(scattered),
        details="one per reduce_scatter", step=step.step, phase="reduce",
        likely="replicas train independently" if not reduced else None,
    )  # fmt: skip
    for before, after in zip(scattered, reduced, strict=False):
        shard = before.nbytes // group_size
        tally.compare(
            after.nbytes == shard, "all_reduce", expected=f"{shard} B", got=f"{after.nbytes} B",
            details=f"the shard that a reduce_scatter of {before.nbytes} B leaves on each of {group_size} ranks",
            step=step.step, phase="reduce", call=after.site,
            likely="the full gradient is all-reduced" if after.nbytes == before.nbytes else None,
        )  # fmt: skip
        tally.compare(
            after.seq > before.seq, "position of the all_reduce", expected=f"after reduce_scatter #{before.seq}",
            got=f"#{after.seq}", step=step.step, phase="reduce", call=after.site,
        )  # fmt: skip


def _least_bytes(unit: Unit) -> int:
    return parameter_bytes([unit], trainable_only=True)


def _by_bytes(records: Iterable[CollectiveRecord]) -> list[CollectiveRecord]:
    """The records sorted by size, as units are; of equal size, in the order in which they were issued."""
    return sorted(records, key=lambda record: (record.nbytes, record.seq))


def _text(group: Group) -> str:
    return f"[{','.join(map(str, group))}]"
