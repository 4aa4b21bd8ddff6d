"""
An upper bound of a step's traffic that holds for any schedule: what the passes of the step can need, and no more.

Exact counts (`communication`) hold for plain schedules only. With evaluations, recomputation and deferred micro-batches
in one step, a bound remains: every pass gathers each unit at most once, and every backward reduces it at most once.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import dataclass
from functools import partial

from fsdp_conformance.checks.communication import compute_dtype, reduce_dtype
from fsdp_conformance.checks.result import CheckResult, Tally
from fsdp_conformance.checks.traffic import GATHERING, in_step, nbytes, of, sites
from fsdp_conformance.history.collective import Op
from fsdp_conformance.history.training import TrainingHistory
from fsdp_conformance.plan import Plan, Sharding
from fsdp_conformance.workload.definition import Workload
from fsdp_conformance.workload.units import OwnedParameter, Unit, owning_units, padded_bytes

#: Bytes of flags and counters that each unit may add to each pass or reduction; and as many for the step.
SMALL = 16

#: Labels of the collectives of a step and its evaluations. A checkpoint has its own traffic.
_PHASES = ("forward", "backward", "step", "eval")


@dataclass(frozen=True, kw_only=True, slots=True)
class Needs:
    """The traffic that a step needs at most."""

    passes: int
    """The number of times that each unit is gathered."""
    reductions: int
    """The number of times that each unit that trains is reduced."""
    over_replicas: int | None = None
    """The number of reductions that include the replicas of hybrid sharding; None if all do."""
    evaluations: int | None = None
    """The number of passes that are evaluations; None if it is unknown."""
    frozen: Collection[str] | None = None
    """The names of parameters that do not train; None: as the model says."""


def at_most(
    history: TrainingHistory,
    workload: Workload,
    plan: Plan,
    needs: Callable[[int], Needs],
    *,
    padding: float,
    alignment: int = 0,
    counts: bool = False,
    requirement: str,
) -> CheckResult:
    """
    No step gathers or reduces more bytes than it needs: clipping and the optimizer gather at most one pass, each
    evaluation gathers one, and nothing is reduced in eval. `needs` is called with a step.

    One pass over the parameters is their bytes in the dtype of computation, each padded to a multiple of the shard
    group, plus the declared padding, and each parameter aligned to `alignment` bytes. A reduction is one pass over the
    units that train, in the dtype of the reduction. Over replicas, a shard is reduced.

    `counts`: the engine gathers and reduces each unit by one collective, or one for each dtype that it is stored in, so
    these are counted, too. A small unit that is sent once more than needed shows in no number of bytes.
    """
    tally = Tally("traffic bound", requirement, rank=history.rank)
    units = owning_units(workload, plan).shared
    group = max(1, history.world_size // plan.replicas)
    one_pass = padded_bytes(units, group, dtype=partial(compute_dtype, plan)) * (1 + padding)
    gaps = sum(_gaps(unit, plan, alignment) for unit in units)
    # An evaluation may gather the first unit of the next forward ahead.
    ahead = max((padded_bytes([unit], group, dtype=partial(compute_dtype, plan)) for unit in units), default=0)
    for record in history.steps:
        step, needed = record.step, needs(record.step)
        passes, reductions = needed.passes, needed.reductions
        training = [unit for unit in units if any(_trains(parameter, needed.frozen) for parameter in unit.parameters)]
        trained = padded_bytes(training, group, dtype=partial(reduce_dtype, plan)) * (1 + padding)
        calls = in_step(history, step, *_PHASES)
        # A rank that sends to itself has a peer that receives.
        received = [call for call in of(calls, *GATHERING) if call.op is not Op.RECV]
        # In backward, an all-to-all may bring parameters, or gradients that are then added.
        exchanged = [call for call in received if call.op is Op.ALL_TO_ALL and call.phase == "backward"]
        gathered = [call for call in received if call not in exchanged]
        scattered, summed = of(calls, Op.REDUCE_SCATTER, Op.REDUCE), of(calls, Op.ALL_REDUCE)
        most_summed = trained * reductions
        if scattered and plan.replicas > 1:
            most_summed = trained / group * (reductions if needed.over_replicas is None else needed.over_replicas)
        # An engine without the whole optimizer on each rank gathers what others have updated, once.
        for_update = [call for call in gathered if call.phase == "step"]
        in_eval = [call for call in [*scattered, *summed] if call.phase == "eval"]
        whole = plan.sharding not in (Sharding.NONE, Sharding.OPTIM) and bool(summed) and not scattered
        bounds = [
            ("gathered in the step", gathered, one_pass * passes, passes),
            ("gathered for the update", for_update, one_pass, 1),
            ("reduce-scattered in the step", scattered, trained * reductions, reductions),
            ("all-reduced in the step", summed, most_summed, reductions),
            ("reduced by evaluations", in_eval, 0, 0),
        ]
        if needed.evaluations is not None:
            for_eval = [call for call in gathered if call.phase == "eval"]
            most_for_eval = one_pass * needed.evaluations + ahead * bool(needed.evaluations)
            bounds.append(("gathered by evaluations", for_eval, most_for_eval, needed.evaluations))
        if exchanged:
            both = one_pass * passes + trained * reductions
            bounds.append(
                ("gathered and reduced in the step", [*gathered, *scattered, *exchanged], both, passes + reductions)
            )
        for what, bound_calls, ideal, times in bounds:
            got, most = nbytes(bound_calls), int(ideal) + SMALL * len(units) * (times + 1) + gaps * times
            tally.compare(
                got <= most, what, expected=f"at most {most} B", got=f"{got} B",
                details=f"{passes} passes over {int(one_pass)} B, {reductions} reductions of {int(trained)} B",
                elements=max(len(bound_calls), 1), step=step, call=sites(bound_calls) if got > most else None,
                likely="gradients are all-reduced as a whole, although each rank needs only its shard"
                if whole and bound_calls is summed else None,
            )  # fmt: skip
        if counts:
            by_passes = [call for call in gathered if call.phase != "step"]
            more = "a unit is reduced more than once for a backward"
            more += ", or frozen parameters are reduced" if len(training) < len(units) else ""
            for op, issued, most, likely in (
                ("all-gathers", by_passes, passes * _collectives(units) + bool(needed.evaluations), None),
                ("reduce-scatters", scattered, reductions * _collectives(training), more),
            ):
                is_more = len(issued) > most
                tally.compare(
                    not is_more, f"{op} in the step", expected=f"at most {most}", got=str(len(issued)),
                    details=f"{passes} passes over {len(units)} units, {reductions} reductions of {len(training)}",
                    elements=max(len(issued), 1), step=step, call=sites(issued) if is_more else None,
                    likely=likely if is_more else None,
                )  # fmt: skip
    return tally.result()


def _collectives(units: Collection[Unit]) -> int:
    """The number of collectives that gather or reduce these units: one for each dtype that a unit is stored in."""
    return sum(len({parameter.itemsize for parameter in unit.parameters}) for unit in units)


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
