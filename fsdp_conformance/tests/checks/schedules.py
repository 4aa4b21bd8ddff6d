"""
Histories made by hand for tests of communication checks: the schedule of a right engine, to be damaged.

The staircase workload has units of 280, 616, 1080, 1672 and 2392 bytes and a root of 216, in all 6256: even over 2.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

import torch

from fsdp_conformance.checks.result import CheckResult
from fsdp_conformance.fixtures import models
from fsdp_conformance.history.collective import CollectiveRecord, Op
from fsdp_conformance.history.training import StepRecord, TrainingHistory
from fsdp_conformance.plan import Plan, Sharding
from fsdp_conformance.workload.definition import Workload
from fsdp_conformance.workload.units import Unit, owning_units

STAIRCASE = models.staircase()
STAIRCASE_BYTES = 6256


def plan_of(workload: Workload, sharding: Sharding = Sharding.FULL, **changes: object) -> Plan:
    """The workload's own wrapping."""
    fields: dict[str, object] = {
        "units": workload.units, "local_units": workload.local_units, "sharding": sharding, **changes,
    }  # fmt: skip
    return Plan(**fields)  # type: ignore[arg-type]


PLAN = plan_of(STAIRCASE)


def messages(result: CheckResult) -> list[str]:
    """The messages of the findings, each one once even if several steps repeat it."""
    return list(dict.fromkeys(finding.message for finding in result.findings))


def collective(
    op: Op, nbytes: int, *, step: int | None = 0, phase: str = "forward", group: tuple[int, ...] = (0, 1)
) -> CollectiveRecord:
    """A float32 collective; `history` numbers it."""
    return CollectiveRecord(
        seq=0, op=op, name=op.value, group=group, nbytes=nbytes, dtype="float32", step=step, phase=phase,
        site="engine.py:7 in run",
    )  # fmt: skip


def history(
    records: Iterable[CollectiveRecord],
    *,
    steps: int = 3,
    micro_batches: int = 1,
    rank: int = 0,
    world_size: int = 2,
) -> TrainingHistory:
    """A run of `steps` steps that issued `records`, put in order of their steps."""
    in_order = sorted(records, key=lambda record: -1 if record.step is None else record.step)
    return TrainingHistory(
        source="by hand",
        rank=rank,
        world_size=world_size,
        steps=[StepRecord(step=step, losses=[torch.tensor(1.0)] * micro_batches) for step in range(steps)],
        collectives=[replace(record, seq=seq) for seq, record in enumerate(in_order)],
    )


def full_sharding(
    workload: Workload,
    plan: Plan,
    *,
    group: tuple[int, ...] = (0, 1),
    replicas: tuple[int, ...] = (),
    micro_batches: int = 1,
    steps: int = 3,
    stay_gathered: bool = False,
) -> list[CollectiveRecord]:
    """
    The collectives of an engine that gathers the root first and then the units in order, and scatters in reverse.

    The last micro-batch alone is reduced if the plan defers reduction. `stay_gathered`: no gathers in backward. Reduced
    shards are all-reduced over `replicas` if there are any.
    """
    units = owning_units(workload, plan).shared
    root, inner = [unit for unit in units if not unit.fqn], [unit for unit in units if unit.fqn]
    records = []
    for step in range(steps):
        for micro in range(micro_batches):
            records += [_of_unit(Op.ALL_GATHER, unit, step, "forward", group) for unit in (*root, *inner)]
            for unit in (*reversed(inner), *root):
                if not stay_gathered:
                    records.append(_of_unit(Op.ALL_GATHER, unit, step, "backward", group))
                if unit.trainable and not (plan.defer_reduction and micro < micro_batches - 1):
                    scattered = _of_unit(Op.REDUCE_SCATTER, unit, step, "backward", group)
                    records.append(scattered)
                    if replicas:
                        shard = scattered.nbytes // len(group)
                        records.append(collective(Op.ALL_REDUCE, shard, step=step, phase="backward", group=replicas))
    return records


def replicated(nbytes: int, *, steps: int = 3, group: tuple[int, ...] = (0, 1)) -> list[CollectiveRecord]:
    """One all-reduce of all gradients per step."""
    return [collective(Op.ALL_REDUCE, nbytes, step=step, phase="backward", group=group) for step in range(steps)]


def _of_unit(op: Op, unit: Unit, step: int, phase: str, group: tuple[int, ...]) -> CollectiveRecord:
    return collective(op, unit.padded_numel(len(group)) * 4, step=step, phase=phase, group=group)
