"""
What each unit sends under hybrid sharding: between which ranks, how often, how many bytes (R151).

Counts of a whole step are in `communication`, groups in `groups`; here every collective is matched with its unit, by
bytes, because units of one model have different sizes.
"""

from __future__ import annotations

from fsdp_conformance.checks.groups import replica_group, shard_group
from fsdp_conformance.checks.result import CheckResult, Tally
from fsdp_conformance.checks.sizes import Unit, padded_bytes, parameter_bytes, sized_units
from fsdp_conformance.checks.traffic import in_step, of, sites, steady_steps
from fsdp_conformance.config import Plan
from fsdp_conformance.errors import SuiteError
from fsdp_conformance.history.collective import CollectiveRecord, Op
from fsdp_conformance.history.training import StepRecord, TrainingHistory
from fsdp_conformance.workload import Workload


def unit_traffic(
    history: TrainingHistory, workload: Workload, plan: Plan, *, padding: float, requirement: str
) -> CheckResult:
    """
    Every trainable unit is reduce-scattered in the shard group, then its shard is all-reduced in the replica group.

    Once for each micro-batch that is reduced. A reduce-scatter sends the unit's bytes, with dim 0 of each parameter
    padded to a multiple of the shard group and `padding` of that more at most; the all-reduce that belongs to it
    carries what the reduce-scatter left on the rank, and comes after it.
    """
    world, rank = history.world_size, history.rank
    if world % plan.replicas or not 1 < plan.replicas < world:
        raise SuiteError(
            f"replicas={plan.replicas}, but should leave at least 2 replicas of at least 2 of {world} ranks "
            "[unit_traffic]"
        )
    tally = Tally("hybrid sharding by unit", requirement, rank=rank)
    units = sorted(sized_units(workload, plan).trainable, key=_least_bytes)
    shard, replica = shard_group(rank, world, plan.replicas), replica_group(rank, world, plan.replicas)
    for step in steady_steps(history):
        records = in_step(history, step.step, "forward", "backward")
        reductions = 1 if plan.defer_reduction else len(step.losses)
        expected = [unit for unit in units for _ in range(reductions)]
        scattered = [record for record in of(records, Op.REDUCE_SCATTER) if record.group == shard]
        reduced = [record for record in of(records, Op.ALL_REDUCE) if record.group == replica]
        _judge_scattered(tally, step, expected, _by_bytes(scattered), group_size=len(shard), padding=padding)
        _judge_reduced(tally, step, _by_bytes(scattered), _by_bytes(reduced), group_size=len(shard))
    return tally.result()


def _judge_scattered(
    tally: Tally, step: StepRecord, units: list[Unit], scattered: list[CollectiveRecord], *, group_size: int,
    padding: float,
) -> None:  # fmt: skip
    tally.expect(
        len(scattered) == len(units),
        f"{len(scattered)} reduce_scatter in the shard group, but should be {len(units)}: one per trainable unit",
        elements=max(len(scattered), 1), step=step.step, phase="reduce", got=str(len(scattered)),
        expected=str(len(units)), call=sites(scattered),
    )  # fmt: skip
    for unit, record in zip(units, scattered, strict=False):
        least = _least_bytes(unit)
        most = int(padded_bytes([unit], group_size, trainable_only=True) * (1 + padding))
        tally.expect(
            least <= record.nbytes <= most,
            f"reduce_scatter of {record.nbytes} B for {unit.label()}, but should be {least} to {most} B",
            step=step.step, phase="reduce", got=f"{record.nbytes} B", expected=f"{least} to {most} B",
            call=record.site,
        )  # fmt: skip


def _judge_reduced(
    tally: Tally, step: StepRecord, scattered: list[CollectiveRecord], reduced: list[CollectiveRecord], *,
    group_size: int,
) -> None:  # fmt: skip
    tally.expect(
        len(reduced) == len(scattered),
        f"{len(reduced)} all_reduce in the replica group, but should be {len(scattered)}: one per reduce_scatter",
        elements=max(len(reduced), 1), step=step.step, phase="reduce", got=str(len(reduced)),
        expected=str(len(scattered)), call=sites(reduced),
        likely="replicas train apart" if not reduced else None,
    )  # fmt: skip
    for before, after in zip(scattered, reduced, strict=False):
        shard = before.nbytes // group_size
        tally.expect(
            after.nbytes == shard,
            f"all_reduce of {after.nbytes} B after a reduce_scatter of {before.nbytes} B over {group_size} ranks, "
            f"but should be of {shard} B: the shard",
            step=step.step, phase="reduce", got=f"{after.nbytes} B", expected=f"{shard} B",
            call=after.site, likely="the full gradient is all-reduced" if after.nbytes == before.nbytes else None,
        )  # fmt: skip
        tally.expect(
            after.seq > before.seq,
            f"all_reduce {after.seq} comes before reduce_scatter {before.seq}, but should be after it",
            step=step.step, phase="reduce", got=str(after.seq), expected=f"> {before.seq}", call=after.site,
        )  # fmt: skip


def _least_bytes(unit: Unit) -> int:
    return parameter_bytes([unit], trainable_only=True)


def _by_bytes(records: list[CollectiveRecord]) -> list[CollectiveRecord]:
    """In the order of the units; of equal size, in the order in which they were issued."""
    return sorted(records, key=lambda record: (record.nbytes, record.seq))
