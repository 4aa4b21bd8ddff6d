"""
An upper bound of a step's traffic that holds for any schedule: what the passes of the step can need, and no more.

Exact counts (`communication`) hold for plain schedules only. With evaluations, recomputation and deferred micro-batches
in one step, a bound remains: every pass gathers each unit at most once, and every backward reduces it at most once.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from functools import partial

from fsdp_conformance.checks.communication import compute_dtype, reduce_dtype
from fsdp_conformance.checks.result import CheckResult, Tally
from fsdp_conformance.checks.traffic import GATHERING, in_step, nbytes, of, sites
from fsdp_conformance.history.collective import Op
from fsdp_conformance.history.training import TrainingHistory
from fsdp_conformance.plan import Plan
from fsdp_conformance.workload.definition import Workload
from fsdp_conformance.workload.units import OwnedParameter, Unit, owning_units, padded_bytes

#: Bytes of flags and counters that each unit may add to each pass or reduction; and as many for the step.
SMALL = 16

#: Labels of the collectives of a step and its evaluations. A checkpoint has its own traffic.
_PHASES = ("forward", "backward", "step", "eval")


def at_most(
    history: TrainingHistory,
    workload: Workload,
    plan: Plan,
    *,
    passes: Callable[[int], int],
    reductions: Callable[[int], int],
    over_replicas: Callable[[int], int] | None = None,
    frozen: Callable[[int], Collection[str] | None] = lambda step: None,
    padding: float,
    alignment: int = 0,
    requirement: str,
) -> CheckResult:
    """
    In no step more bytes are gathered than `passes` need, nor more reduced than `reductions` need, nor any in eval.

    All are functions of the step, also `over_replicas`, the reductions that include the replicas of hybrid sharding
    (None: all), and `frozen`, the names of parameters that do not train in the step (None: as the model says). One pass
    over the parameters is their bytes in the dtype of computation, each padded to a multiple of the shard group, plus
    the declared padding, and each parameter aligned to `alignment` bytes. A reduction is one pass over the units that
    train, in the dtype of the reduction. Over replicas, a shard is reduced.
    """
    tally = Tally("traffic bound", requirement, rank=history.rank)
    units = owning_units(workload, plan).shared
    group = max(1, history.world_size // plan.replicas)
    one_pass = padded_bytes(units, group, dtype=partial(compute_dtype, plan)) * (1 + padding)
    gaps = sum(_gaps(unit, plan, alignment) for unit in units)
    for record in history.steps:
        step = record.step
        names = frozen(step)
        training = [unit for unit in units if any(_trains(parameter, names) for parameter in unit.parameters)]
        trained = padded_bytes(training, group, dtype=partial(reduce_dtype, plan)) * (1 + padding)
        calls = in_step(history, step, *_PHASES)
        # A rank that sends to itself has a peer that receives.
        gathered = [call for call in of(calls, *GATHERING) if call.op is not Op.RECV]
        scattered, summed = of(calls, Op.REDUCE_SCATTER, Op.REDUCE), of(calls, Op.ALL_REDUCE)
        most_summed = trained * reductions(step)
        if scattered and plan.replicas > 1:
            most_summed = trained / group * (over_replicas or reductions)(step)
        in_eval = [call for call in [*scattered, *summed] if call.phase == "eval"]
        for what, seen, ideal, times in (
            ("gathered in the step", gathered, one_pass * passes(step), passes(step)),
            ("reduce-scattered in the step", scattered, trained * reductions(step), reductions(step)),
            ("all-reduced in the step", summed, most_summed, reductions(step)),
            ("reduced by evaluations", in_eval, 0, 0),
        ):
            got, most = nbytes(seen), int(ideal) + SMALL * len(units) * (times + 1) + gaps * times
            tally.compare(
                got <= most, what, expected=f"at most {most} B", got=f"{got} B",
                details=f"{passes(step)} passes over {int(one_pass)} B, {reductions(step)} reductions of "
                f"{int(trained)} B",
                elements=max(len(seen), 1), step=step, call=sites(seen) if got > most else None,
            )  # fmt: skip
    return tally.result()


def _gaps(unit: Unit, plan: Plan, alignment: int) -> int:
    """The most bytes that aligning the parameters of a unit adds. Elements are aligned in the dtype of computation."""
    computed, reduced = compute_dtype(plan, unit.fqn), reduce_dtype(plan, unit.fqn)
    total = 0
    for parameter in unit.parameters:
        elements = alignment // (parameter.itemsize if computed is None else computed.itemsize)
        total += max(0, elements - 1) * (parameter.itemsize if reduced is None else reduced.itemsize)
    return total


def _trains(parameter: OwnedParameter, frozen: Collection[str] | None) -> bool:
    return parameter.trainable if frozen is None else parameter.fqn not in frozen
