"""
An upper bound of a step's traffic that holds for any schedule: what the passes of the step can need, and no more.

Exact counts (`communication`) hold for plain schedules only. With evaluations, recomputation and deferred micro-batches
in one step, a bound remains: every pass gathers each unit at most once, and every backward reduces it at most once.
"""

from __future__ import annotations

from collections.abc import Callable

from fsdp_conformance.checks.result import CheckResult, Tally
from fsdp_conformance.checks.traffic import GATHERING, in_step, nbytes, of, sites
from fsdp_conformance.history.collective import Op
from fsdp_conformance.history.training import TrainingHistory
from fsdp_conformance.plan import Plan
from fsdp_conformance.workload.definition import Workload
from fsdp_conformance.workload.units import owning_units, padded_bytes

#: Bytes of flags, counters, norms and shapes that an engine may exchange in a step.
SMALL = 4096

#: Labels of the collectives of a step and its evaluations. A checkpoint has its own traffic.
_PHASES = ("forward", "backward", "step", "eval")


def at_most(
    history: TrainingHistory,
    workload: Workload,
    plan: Plan,
    *,
    passes: Callable[[int], int],
    reductions: Callable[[int], int],
    world_size: int,
    padding: float,
    requirement: str,
) -> CheckResult:
    """
    In no step more bytes are gathered than `passes` need, nor more reduced than `reductions` need.

    Both are functions of the step. One pass over the parameters is their bytes, each padded to a multiple of the shard
    group, plus the declared padding. An all-reduce is a reduction and a gather.
    """
    tally = Tally("traffic bound", requirement, rank=history.rank)
    units = owning_units(workload, plan).shared
    group = max(1, world_size // plan.replicas)
    one_pass = padded_bytes(units, group) * (1 + padding)
    trained = padded_bytes(units, group, trainable_only=True) * (1 + padding)
    for record in history.steps:
        calls = in_step(history, record.step, *_PHASES)
        # A rank that sends to itself has a peer that receives.
        gathered = [call for call in of(calls, *GATHERING) if call.op is not Op.RECV]
        # Under hybrid sharding the same gradients are reduced over the replicas as well.
        reduced = of(calls, Op.REDUCE_SCATTER, Op.REDUCE)
        summed = of(calls, Op.ALL_REDUCE)
        for what, seen, most in (
            ("gathered in the step", gathered, one_pass * passes(record.step) + SMALL),
            ("reduced in the step", [*reduced, *summed], 2 * trained * reductions(record.step) + SMALL),
            ("reduce-scattered in the step", reduced, trained * reductions(record.step) + SMALL),
        ):
            got = nbytes(seen)
            tally.compare(
                got <= most, what, expected=f"at most {int(most)} B", got=f"{got} B",
                details=f"{passes(record.step)} passes over {int(one_pass)} B, {reductions(record.step)} reductions",
                elements=max(len(seen), 1), step=record.step, call=sites(seen) if got > most else None,
            )  # fmt: skip
    return tally.result()
