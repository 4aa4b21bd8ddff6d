"""
Which collectives a step issues: counts by op and phase, and digests of the sequence.

Counts are derived from the workload's units; volumes are in `volume`, groups in `groups`, the order in `order`. All are
judged in training phases (forward, backward, step) and, unless said, in every step but the first.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable
from dataclasses import dataclass

from fsdp_conformance.checks.groups import groups_used
from fsdp_conformance.checks.order import execution_order, steady_schedule
from fsdp_conformance.checks.result import CheckResult, Tally
from fsdp_conformance.checks.sizes import SizedUnits, padded_bytes, parameter_bytes, sized_units
from fsdp_conformance.checks.traffic import (
    GATHERING,
    REDUCING,
    TRAINING,
    gradient_reductions,
    in_step,
    nbytes,
    of,
    sites,
    steady_steps,
)
from fsdp_conformance.checks.units import owning_units
from fsdp_conformance.checks.volume import wire_volume
from fsdp_conformance.config import Plan, Sharding
from fsdp_conformance.errors import SuiteError
from fsdp_conformance.history.collective import CollectiveRecord, Op
from fsdp_conformance.history.training import StepRecord, TrainingHistory
from fsdp_conformance.workload import Workload

__all__ = [
    "collective_counts",
    "deferred_counts",
    "eval_collectives",
    "execution_order",
    "frozen_reductions",
    "groups_used",
    "no_collectives",
    "owning_units",
    "reductions_in",
    "schedule_digests",
    "steady_schedule",
    "wire_volume",
]

#: More than one pass over all parameters, less than two: tells "once" from "twice" whatever an engine pads.
ONCE = 1.5


@dataclass(frozen=True, slots=True)
class _Rule:
    """How many collectives of an op the phases of one step may hold."""

    op: Op
    phases: tuple[str, ...]
    least: int
    most: int

    def wanted(self) -> str:
        """The range in a message."""
        return str(self.most) if self.least == self.most else f"{self.least} to {self.most}"


def collective_counts(history: TrainingHistory, workload: Workload, plan: Plan, *, requirement: str) -> CheckResult:
    """
    Collectives per step of full, gradient, hybrid or no sharding (R062, R063, R064).

    Each unit runs once per forward, and no evaluation lies before a forward: parameters may stay gathered from one.

    Micro-batches multiply what is not deferred.

    With n units that own trainable parameters: n all-gathers in forward; n in backward, or n - 1 where the root stays
    gathered, or none where all do; n reduce-scatters; nothing else but the all-reduces of hybrid sharding and of a
    gradient norm. Frozen units may be gathered, too. Without sharding: no all-gather, gradients by all-reduce only.
    """
    if plan.sharding in (Sharding.OPTIM, Sharding.DEFAULT):
        raise SuiteError(
            f"sharding={plan.sharding}, but should be full, grad_optim, hybrid or none [collective_counts]"
        )
    tally = Tally("collective counts", requirement, rank=history.rank)
    units = sized_units(workload, plan)
    replicated = plan.sharding is Sharding.NONE or plan.replicas == history.world_size > 1
    for step in steady_steps(history):
        records = in_step(history, step.step)
        if replicated:
            _judge_replicated(tally, step, records, units)
            continue
        for rule in _sharded_rules(step, units, plan):
            _judge(tally, rule, step, records)
        _judge_rest(tally, step, records, hybrid=plan.replicas > 1)
    return tally.result()


def deferred_counts(history: TrainingHistory, workload: Workload, plan: Plan, *, requirement: str) -> CheckResult:
    """
    A step whose first micro-batches are deferred reduces every gradient once, after the last forward (R065).

    Judged by bytes, so that it holds for engines with buckets, too. Under gradient sharding parameters stay gathered
    after a deferred backward: they are gathered once in the step.
    """
    tally = Tally("deferred reduction", requirement, rank=history.rank)
    units = sized_units(workload, plan).shared
    least = parameter_bytes(units, trainable_only=True)
    most = int(ONCE * padded_bytes(units, history.world_size, trainable_only=True))
    for step in steady_steps(history):
        if len(step.losses) < 2:
            raise SuiteError(f"micro_batches={len(step.losses)}, but should be at least 2 [deferred_counts]")
        records = in_step(history, step.step)
        reduced = gradient_reductions(records)
        tally.expect(
            least <= nbytes(reduced) <= most,
            f"{nbytes(reduced)} B of gradients reduced over {len(step.losses)} micro-batches, "
            f"but should be reduced once: {least} to {most} B",
            elements=len(records), step=step.step, phase="reduce", got=f"{nbytes(reduced)} B", expected=f"{least} B",
            call=sites(reduced),
            likely="deferred micro-batches are reduced, too" if nbytes(reduced) > most else None,
        )  # fmt: skip
        last_forward = max((record.seq for record in records if record.phase == "forward"), default=-1)
        early = [record for record in reduced if record.seq < last_forward]
        tally.expect(
            not early,
            f"{len(early)} of {len(reduced)} gradient reductions come before the last micro-batch's forward, "
            "but should be 0",
            elements=len(reduced), step=step.step, phase="reduce", got=str(len(early)), expected="0", call=sites(early),
        )  # fmt: skip
        if _stays_gathered(plan):
            _judge_gathered_once(tally, step, of(records, *GATHERING), once=padded_bytes(units, history.world_size))
    return tally.result()


def eval_collectives(history: TrainingHistory, workload: Workload, *, requirement: str) -> CheckResult:
    """A forward in eval mode under no_grad reduces nothing and gathers each parameter at most once, by bytes (R066)."""
    if not history.eval_outputs:
        raise SuiteError("eval_outputs=0, but should be at least 1 [eval_collectives]: the regime evaluates nothing")
    tally = Tally("collectives in eval", requirement, rank=history.rank)
    records = [record for record in history.collectives if record.phase == "eval" and len(record.group) > 1]
    reduced, gathered = of(records, *REDUCING), of(records, *GATHERING)
    tally.expect(
        not reduced,
        f"{len(reduced)} reductions in eval ({lines(reduced)}), but should be 0",
        elements=len(records), step=_first_step(reduced), phase="eval", got=str(len(reduced)), expected="0",
        call=sites(reduced),
    )  # fmt: skip
    forwards = len(history.eval_outputs)
    most = int(ONCE * padded_bytes(sized_units(workload).shared, history.world_size)) * forwards
    tally.expect(
        nbytes(gathered) <= most,
        f"{nbytes(gathered)} B gathered by {forwards} evaluations, but should be at most {most} B: each parameter once",
        elements=len(records), step=_first_step(gathered), phase="eval", got=f"{nbytes(gathered)} B",
        expected=f"{most} B", call=sites(gathered),
    )  # fmt: skip
    return tally.result()


def no_collectives(history: TrainingHistory, *, requirement: str) -> CheckResult:
    """Nothing is issued in training or in eval, not even over one rank (R009, R022). The set-up is not judged."""
    tally = Tally("no collectives", requirement, rank=history.rank)
    for step in history.steps:
        for phase in (*TRAINING, "eval"):
            seen = [record for record in history.collectives if (record.step, record.phase) == (step.step, phase)]
            tally.expect(
                not seen,
                f"{len(seen)} collectives in {phase} ({lines(seen)}), but should be 0",
                step=step.step, phase=phase, got=str(len(seen)), expected="0", call=sites(seen),
            )  # fmt: skip
    return tally.result()


def frozen_reductions(history: TrainingHistory, workload: Workload, plan: Plan, *, requirement: str) -> CheckResult:
    """
    What is reduced are the gradients of trainable units alone (R072).

    By bytes for every engine; by count, too, where the engine shows one all-gather per unit in forward.
    """
    tally = Tally("frozen units", requirement, rank=history.rank)
    units = sized_units(workload, plan)
    if not units.frozen:
        raise SuiteError(f"frozen units=0, but should be at least 1 [frozen_reductions, workload {workload.name}]")
    trained = units.trainable
    smallest = min(parameter_bytes([unit]) for unit in units.frozen)
    most = padded_bytes(trained, history.world_size, trainable_only=True) + smallest // 2
    for step in steady_steps(history):
        records = in_step(history, step.step)
        reduced = gradient_reductions(records)
        passes = 1 if plan.defer_reduction else len(step.losses)
        tally.expect(
            nbytes(reduced) <= most * passes,
            f"{nbytes(reduced)} B of gradients reduced, but should be at most {most * passes} B: those of the units "
            f"{names(unit.label() for unit in trained)}",
            elements=len(reduced), step=step.step, phase="reduce", got=f"{nbytes(reduced)} B",
            expected=f"{most * passes} B", call=sites(reduced),
            likely=f"gradients of frozen units ({names(unit.label() for unit in units.frozen)}) are reduced, too",
        )  # fmt: skip
        gathered = of(in_step(history, step.step, "forward"), Op.ALL_GATHER)
        per_unit = len(gathered) == len(units.shared) * len(step.losses)
        scattered = of(reduced, Op.REDUCE_SCATTER)
        if per_unit and scattered:
            tally.expect(
                len(scattered) <= len(trained) * passes,
                f"reduce_scatter={len(scattered)}, but should be {len(trained) * passes}: one per trainable unit",
                elements=len(scattered), step=step.step, phase="reduce", got=str(len(scattered)),
                expected=str(len(trained) * passes), call=sites(scattered),
            )  # fmt: skip
    return tally.result()


def reductions_in(history: TrainingHistory, dtype: str, *, requirement: str) -> CheckResult:
    """Gradients travel in `dtype` in every step, e.g. "bfloat16" (R083)."""
    tally = Tally("dtype of reductions", requirement, rank=history.rank)
    for step in history.steps:
        reduced = gradient_reductions(in_step(history, step.step))
        wrong = [record for record in reduced if record.dtype.removeprefix("torch.") != dtype]
        tally.expect(
            bool(reduced) and not wrong,
            f"{len(wrong)} of {len(reduced)} reductions of gradients are in another dtype ({lines(wrong)}), but all "
            f"should be in {dtype}",
            elements=max(len(reduced), 1), step=step.step, phase="reduce", expected=dtype, call=sites(wrong),
        )  # fmt: skip
    return tally.result()


def schedule_digests(history: TrainingHistory) -> dict[str, str]:
    """
    {"schedule step 0": digest} over phase, op, bytes, dtype and group size of the collectives of training and eval.

    Equal on all ranks where all ranks issue the same sequence (R067). Groups of one rank have no other member to agree
    with, and groups are set up by some ranks for others: neither is in the digest.
    """
    digests = {}
    for step in history.steps:
        digest = hashlib.sha256()
        for record in in_step(history, step.step, *TRAINING, "eval"):
            entry = (record.phase, record.op.value, record.nbytes, record.dtype, len(record.group))
            digest.update(f"{entry}\n".encode())
        digests[f"schedule step {step.step}"] = digest.hexdigest()
    return digests


def lines(records: Iterable[CollectiveRecord], limit: int = 3) -> str:
    """The first records in one line."""
    seen = [record.line() for record in records]
    more = f" and {len(seen) - limit} more" if len(seen) > limit else ""
    return "; ".join(seen[:limit]) + more


def names(units: Iterable[str]) -> str:
    """Units in a message."""
    return ", ".join(units)


def _sharded_rules(step: StepRecord, units: SizedUnits, plan: Plan) -> list[_Rule]:
    trained, owning, passes = len(units.trainable), len(units.shared), len(step.losses)
    reductions = trained * (1 if plan.defer_reduction else passes)
    if _stays_gathered(plan):
        # Under deferred reduction parameters may stay gathered from one micro-batch to the next.
        least = trained if plan.defer_reduction else trained * passes
        gathers = [
            _Rule(Op.ALL_GATHER, ("forward",), least, owning * passes),
            _Rule(Op.ALL_GATHER, ("backward",), 0, 0),
        ]
    else:
        gathers = [
            _Rule(Op.ALL_GATHER, ("forward",), trained * passes, owning * passes),
            _Rule(Op.ALL_GATHER, ("backward",), max(trained - 1, 0) * passes, owning * passes),
        ]
    rules = [
        *gathers,
        _Rule(Op.ALL_GATHER, ("step",), 0, 0),
        _Rule(Op.REDUCE_SCATTER, TRAINING, reductions, reductions),
    ]
    if plan.replicas > 1:
        over_replicas = trained if plan.defer_all_reduce else reductions
        rules.append(_Rule(Op.ALL_REDUCE, ("forward", "backward"), over_replicas, over_replicas))
    return rules


def _stays_gathered(plan: Plan) -> bool:
    """Whether parameters are kept from forward to backward."""
    if plan.reshard_after_forward is None:
        return plan.sharding is Sharding.GRAD_OPTIM
    return plan.reshard_after_forward is False


def _judge(tally: Tally, rule: _Rule, step: StepRecord, records: list[CollectiveRecord]) -> None:
    seen = [record for record in of(records, rule.op) if record.phase in rule.phases]
    phase = rule.phases[0] if len(rule.phases) == 1 else "reduce"
    where = f" in {phase}" if len(rule.phases) == 1 else ""
    tally.expect(
        rule.least <= len(seen) <= rule.most,
        f"{rule.op.value}={len(seen)}{where}, but should be {rule.wanted()}",
        elements=max(len(seen), 1), step=step.step, phase=phase, got=str(len(seen)), expected=rule.wanted(),
        call=sites(seen),
    )  # fmt: skip


def _judge_rest(tally: Tally, step: StepRecord, records: list[CollectiveRecord], *, hybrid: bool) -> None:
    """Nothing but gathers and scatters; the all-reduce of a gradient norm is allowed where the engine returned one."""
    known = {Op.ALL_GATHER, Op.REDUCE_SCATTER}
    other = [
        record
        for record in records
        if record.op not in known
        and not (record.op is Op.ALL_REDUCE and record.phase == "step" and step.grad_norm is not None)
        and not (record.op is Op.ALL_REDUCE and record.phase != "step" and hybrid)
    ]
    tally.expect(
        not other,
        f"{len(other)} other collectives ({lines(other)}), but should be 0",
        elements=max(len(records), 1), step=step.step, phase=other[0].phase if other else None, got=str(len(other)),
        expected="0", call=sites(other),
    )  # fmt: skip


def _judge_replicated(tally: Tally, step: StepRecord, records: list[CollectiveRecord], units: SizedUnits) -> None:
    for op in (Op.ALL_GATHER, Op.REDUCE_SCATTER, Op.REDUCE):
        _judge(tally, _Rule(op, TRAINING, 0, 0), step, records)
    least = parameter_bytes(units.shared, trainable_only=True)
    reduced = gradient_reductions(of(records, Op.ALL_REDUCE))
    tally.expect(
        nbytes(reduced) >= least,
        f"{nbytes(reduced)} B all-reduced, but should be at least {least} B: every gradient",
        elements=max(len(reduced), 1), step=step.step, phase="reduce", got=f"{nbytes(reduced)} B",
        expected=f"{least} B", call=sites(reduced),
    )  # fmt: skip


def _judge_gathered_once(tally: Tally, step: StepRecord, gathered: list[CollectiveRecord], *, once: int) -> None:
    most = int(ONCE * once)
    tally.expect(
        nbytes(gathered) <= most,
        f"{nbytes(gathered)} B gathered over {len(step.losses)} micro-batches, but should be at most {most} B: "
        "parameters stay gathered after a deferred backward",
        elements=max(len(gathered), 1), step=step.step, phase="forward", got=f"{nbytes(gathered)} B",
        expected=f"{most} B", call=sites(gathered),
    )  # fmt: skip


def _first_step(records: list[CollectiveRecord]) -> int | None:
    return records[0].step if records else None
