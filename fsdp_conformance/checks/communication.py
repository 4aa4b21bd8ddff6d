"""
Which collectives a step issues and how many bytes they carry.

Expected values are derived from the workload's units. Process groups are judged in `groups`, order in `order`. Unless
stated otherwise, a check covers the training phases (forward, backward, step) of every step but the first.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

import torch

from fsdp_conformance.checks.partition import shard_group_size
from fsdp_conformance.checks.result import CheckResult, Tally
from fsdp_conformance.checks.traffic import (
    GATHERING,
    REDUCING,
    TRAINING,
    expect_bytes,
    expect_count,
    gradient_reductions,
    in_step,
    lines,
    nbytes,
    of,
    parameter_gathers,
    sites,
    steady_steps,
)
from fsdp_conformance.diagnosis import amounts
from fsdp_conformance.errors import SuiteError
from fsdp_conformance.history.collective import CollectiveRecord, Op
from fsdp_conformance.history.training import StepRecord, TrainingHistory
from fsdp_conformance.plan import Plan, Sharding
from fsdp_conformance.workload.definition import Workload
from fsdp_conformance.workload.units import OwningUnits, Unit, owning_units, padded_bytes, parameter_bytes

#: More than one pass over all parameters and less than two: tells "once" from "twice" however an engine pads.
ONCE = 1.5


@dataclass(frozen=True, slots=True)
class _Rule:
    """How many collectives of an op the phases of one step may hold."""

    op: Op
    phases: tuple[str, ...]
    least: int
    most: int


def collective_counts(history: TrainingHistory, workload: Workload, plan: Plan, *, requirement: str) -> CheckResult:
    """
    Collectives per step of full, gradient, hybrid or no sharding (R062, R063, R064).

    Each unit runs once per forward, and no evaluation precedes a forward: parameters may stay gathered from one.

    Micro-batches multiply whatever is not deferred, and gathers unless parameters are kept between micro-batches
    (R095, R096).

    With n units that own trainable parameters: n all-gathers in forward; n in backward, or n - 1 where the root stays
    gathered, or none where all do; n reduce-scatters; nothing else but the all-reduces of hybrid sharding and of a
    gradient norm. Frozen units may be gathered, too. Without sharding: no all-gather, gradients by all-reduce only.
    Raises SuiteError for a plan that it cannot judge.
    """
    if plan.sharding in (Sharding.OPTIM, Sharding.DEFAULT):
        raise SuiteError(
            f"sharding: expected full, grad_optim, hybrid or none, got {plan.sharding} [collective_counts]"
        )
    if plan.reshard_after_backward is False and not _stays_gathered(plan):
        raise SuiteError(
            "reshard_after_backward: expected None, because what is resharded after forward is gathered again, got "
            "False [collective_counts]"
        )
    tally = Tally("collective counts", requirement, rank=history.rank)
    units = owning_units(workload, plan)
    replicated = plan.sharding is Sharding.NONE or plan.replicas == history.world_size > 1
    for step in steady_steps(history):
        records = in_step(history, step.step)
        if replicated:
            _judge_replicated(tally, step, records, units)
            continue
        for rule in _sharded_rules(step, units, plan):
            _judge_rule(tally, rule, step, records)
        _judge_rest(tally, step, records, units, hybrid=plan.replicas > 1)
    return tally.result()


def deferred_counts(history: TrainingHistory, workload: Workload, plan: Plan, *, requirement: str) -> CheckResult:
    """
    A step whose first micro-batches are deferred reduces every gradient once, after the last forward (R065).

    Judged by bytes, so that it holds for engines with buckets, too. Under gradient sharding parameters stay gathered
    after a deferred backward: they are gathered once per step. Raises SuiteError for a step with fewer than two
    micro-batches.
    """
    tally = Tally("deferred reduction", requirement, rank=history.rank)
    units = owning_units(workload, plan).shared
    least = parameter_bytes(units, trainable_only=True)
    most = int(ONCE * padded_bytes(units, history.world_size, trainable_only=True))
    for step in steady_steps(history):
        if len(step.losses) < 2:
            raise SuiteError(f"micro-batches: expected at least 2, got {len(step.losses)} [deferred_counts]")
        records = in_step(history, step.step)
        reduced = gradient_reductions(records)
        expect_bytes(
            tally, f"gradients reduced over {len(step.losses)} micro-batches", reduced, least=least, most=most,
            details="each should be reduced once", elements=len(records), step=step.step, phase="reduce",
            likely="deferred micro-batches are reduced, too" if nbytes(reduced) > most else None,
        )  # fmt: skip
        last_forward = max((record.seq for record in records if record.phase == "forward"), default=-1)
        early = [record for record in reduced if record.seq < last_forward]
        expect_count(
            tally, "gradient reductions before the last micro-batch's forward", early,
            details=f"{len(reduced)} in the step", elements=len(reduced), step=step.step, phase="reduce",
        )  # fmt: skip
        if _stays_gathered(plan):
            expect_bytes(
                tally, f"parameters gathered over {len(step.losses)} micro-batches", parameter_gathers(records),
                most=ONCE * padded_bytes(units, history.world_size), step=step.step, phase="forward",
                details="parameters stay gathered after a deferred backward",
            )  # fmt: skip
    return tally.result()


def reduced_once(history: TrainingHistory, workload: Workload, plan: Plan, *, requirement: str) -> CheckResult:
    """
    A step of one micro-batch reduces no gradient more than once, by bytes (R135). Each unit runs once per forward.

    Parity shows that each is reduced at all: an engine may do that where its collectives cannot be seen. Raises
    SuiteError for a step with more than one micro-batch.
    """
    tally = Tally("reduced once", requirement, rank=history.rank)
    units = owning_units(workload, plan).shared
    most = int(ONCE * padded_bytes(units, history.world_size, trainable_only=True))
    for step in steady_steps(history):
        if len(step.losses) != 1:
            raise SuiteError(f"micro-batches: expected 1, got {len(step.losses)} [reduced_once]")
        records = in_step(history, step.step)
        reduced = gradient_reductions(records)
        expect_bytes(
            tally, "gradients reduced", reduced, most=most, details="each should be reduced once",
            elements=max(len(records), 1), step=step.step, phase="reduce",
            likely="a gradient is reduced more than once" if nbytes(reduced) > most else None,
        )  # fmt: skip
    return tally.result()


def eval_collectives(history: TrainingHistory, workload: Workload, *, requirement: str) -> CheckResult:
    """
    A forward in eval mode under no_grad reduces nothing and gathers each parameter at most once, by bytes (R066).

    No collective at all passes, too, and counts as one element that was compared. Raises SuiteError if the run made no
    evaluation.
    """
    if not history.eval_outputs:
        raise SuiteError("eval outputs: expected at least 1, got 0 [eval_collectives]: the regime has no evaluation")
    tally = Tally("collectives in eval", requirement, rank=history.rank)
    records = [record for record in history.collectives if record.phase == "eval" and len(record.group) > 1]
    reduced, gathered, elements = of(records, *REDUCING), of(records, *GATHERING), max(len(records), 1)
    expect_count(
        tally, "reductions in eval", reduced, details=lines(reduced), elements=elements,
        step=_first_step(reduced), phase="eval",
    )  # fmt: skip
    forwards = len(history.eval_outputs)
    once = int(ONCE * padded_bytes(owning_units(workload).shared, history.world_size))
    expect_bytes(
        tally, f"parameters gathered by {forwards} evaluations", gathered, most=once * forwards,
        details="each should be gathered once", elements=elements, step=_first_step(gathered), phase="eval",
    )  # fmt: skip
    return tally.result()


def no_collectives(history: TrainingHistory, *, requirement: str) -> CheckResult:
    """No collective in training or eval, not even over one rank (R009, R022). Setup is not judged."""
    tally = Tally("no collectives", requirement, rank=history.rank)
    for step in history.steps:
        for phase in (*TRAINING, "eval"):
            collectives = [
                record for record in history.collectives if (record.step, record.phase) == (step.step, phase)
            ]
            expect_count(
                tally,
                f"collectives in {phase}",
                collectives,
                details=lines(collectives),
                elements=1,
                step=step.step,
                phase=phase,
            )
    return tally.result()


def frozen_reductions(history: TrainingHistory, workload: Workload, plan: Plan, *, requirement: str) -> CheckResult:
    """
    Only the gradients of trainable units are reduced (R072).

    By bytes for every engine, and also by count where the engine shows one all-gather per unit in forward. Raises
    SuiteError if no unit is frozen.
    """
    tally = Tally("frozen units", requirement, rank=history.rank)
    units = owning_units(workload, plan)
    if not units.frozen:
        raise SuiteError(f"frozen units: expected at least 1, got 0 [frozen_reductions, workload {workload.name}]")
    trained = units.trainable
    smallest = min(parameter_bytes([unit]) for unit in units.frozen)
    most = padded_bytes(trained, history.world_size, trainable_only=True) + smallest // 2
    for step in steady_steps(history):
        reduced = gradient_reductions(in_step(history, step.step))
        passes = 1 if plan.defer_reduction else len(step.losses)
        expect_bytes(
            tally, "gradients reduced", reduced, most=most * passes, elements=max(len(reduced), 1), step=step.step,
            phase="reduce", details=f"the trainable units are {_names(trained)}",
            likely=f"gradients of frozen units ({_names(units.frozen)}) are reduced, too",
        )  # fmt: skip
        gathered = of(in_step(history, step.step, "forward"), Op.ALL_GATHER)
        per_unit = len(gathered) == len(units.shared) * len(step.losses)
        scattered = of(reduced, Op.REDUCE_SCATTER)
        if per_unit and scattered:
            # Fewer are allowed: an engine may reduce units together.
            expected = len(trained) * passes
            tally.compare(
                len(scattered) <= expected, "reduce_scatter", got=len(scattered), expected=expected,
                details="one per trainable unit", elements=len(scattered), step=step.step, phase="reduce",
                call=sites(scattered),
            )  # fmt: skip
    return tally.result()


def reductions_in(history: TrainingHistory, dtype: str, *, requirement: str) -> CheckResult:
    """Gradients are reduced in `dtype` in every step, e.g. "bfloat16" (R083)."""
    tally = Tally("dtype of reductions", requirement, rank=history.rank)
    for step in history.steps:
        # A single number in the step is a norm or a flag, which may have any dtype.
        reduced = [
            record
            for record in gradient_reductions(in_step(history, step.step))
            if record.phase != "step" or record.nbytes > torch.float64.itemsize
        ]
        _compare_dtypes(tally, step.step, reduced, [dtype], may_be_none=False)
    return tally.result()


def reduced_as_planned(history: TrainingHistory, workload: Workload, plan: Plan, *, requirement: str) -> CheckResult:
    """
    No gradients are reduced in another dtype than the plan has for a unit (R084).

    Unlike `reductions_in`, it holds for any schedule, also for steps that reduce nothing.
    """
    tally = Tally("dtype of reductions", requirement, rank=history.rank)
    dtypes = {reduce_dtype(plan, unit.fqn) or torch.float32 for unit in owning_units(workload, plan).shared}
    names = sorted(str(dtype).removeprefix("torch.") for dtype in dtypes)
    for step in history.steps:
        # A number or two are norms and flags, which may have any dtype.
        reduced = [
            record
            for record in gradient_reductions(in_step(history, step.step, "backward", "step"))
            if record.nbytes > 2 * torch.float64.itemsize
        ]
        _compare_dtypes(tally, step.step, reduced, names, may_be_none=True, names_cause=True)
    return tally.result()


def _compare_dtypes(
    tally: Tally,
    step: int,
    reduced: Sequence[CollectiveRecord],
    dtypes: Sequence[str],
    *,
    may_be_none: bool,
    names_cause: bool = False,
) -> None:
    """Compare the dtypes of a step's reductions with those that they may have."""
    wrong = [record for record in reduced if record.dtype.removeprefix("torch.") not in dtypes]
    got = ", ".join(dict.fromkeys(record.dtype.removeprefix("torch.") for record in wrong)) or "no reduction"
    expected = " or ".join(dtypes)
    tally.compare(
        not wrong and (bool(reduced) or may_be_none), "dtype of gradient reductions", expected=expected, got=got,
        details=f"{len(wrong)} of {len(reduced)} ({lines(wrong)})" if wrong else "",
        elements=max(len(reduced), 1), step=step, phase="reduce", call=sites(wrong),
        likely=f"gradients are reduced in {got}, not in {expected}" if wrong and names_cause else None,
    )  # fmt: skip


def wire_volume(
    history: TrainingHistory, workload: Workload, plan: Plan, *, world_size: int, padding: float, requirement: str
) -> CheckResult:
    """
    All-gathers receive, and reduce-scatters send, the bytes of the parameters plus at most the declared padding (R068).

    A pass over all parameters ideally takes P bytes, where P is their size in the dtype of computation for gathers, and
    in that of the reduction for reductions. It takes at most 1 + `padding` times P with dim 0 of each parameter padded
    to a multiple of the shard group. A forward is one pass of gathers, a backward at most one, and a step one pass of
    reductions (of trainable parameters), unless micro-batches multiply them. Other ops carry at most the padding; under
    hybrid sharding all-reduces carry one more shard's worth. Raises SuiteError if the plan does not shard parameters.
    """
    if plan.sharding not in (Sharding.FULL, Sharding.HYBRID) or plan.replicas == world_size > 1:
        raise SuiteError(
            f"plan: expected parameters sharded over at least 2 of {world_size} ranks, got sharding={plan.sharding}, "
            f"replicas={plan.replicas} [wire_volume]"
        )
    tally = Tally("wire volume", requirement, rank=history.rank)
    units = owning_units(workload, plan).shared
    group_size = world_size // plan.replicas
    computed, reduced = partial(compute_dtype, plan), partial(reduce_dtype, plan)
    ideal = parameter_bytes(units, dtype=computed)
    ideal_trained = parameter_bytes(units, trainable_only=True, dtype=reduced)
    most = padded_bytes(units, group_size, dtype=computed) * (1 + padding)
    most_trained = padded_bytes(units, group_size, trainable_only=True, dtype=reduced) * (1 + padding)
    trainable = owning_units(workload, plan).trainable
    ratios: dict[str, float] = {}
    for step in steady_steps(history):
        records = in_step(history, step.step)
        passes = len(step.losses)
        reductions = 1 if plan.defer_reduction else passes
        gathered = of(records, Op.ALL_GATHER)
        forward = [record for record in gathered if record.phase == "forward"]
        backward = [record for record in gathered if record.phase == "backward"]
        scattered = of(records, Op.REDUCE_SCATTER)
        other = [record for record in records if record.op not in (Op.ALL_GATHER, Op.REDUCE_SCATTER)]
        shard = most_trained / group_size * reductions if plan.replicas > 1 else 0
        for phase, what, calls, least, limit in (
            ("forward", "received by all-gathers in forward", forward, ideal * passes, most * passes),
            ("backward", "received by all-gathers in backward", backward, 0, most * passes),
            ("reduce", "sent by reduce-scatters", scattered, ideal_trained * reductions, most_trained * reductions),
            (None, "carried by other collectives", other, 0, shard + padding * ideal),
        ):
            ratio = nbytes(calls) / least if least else None
            likely = None
            if phase is not None and nbytes(calls) > limit:
                of_pass = (trainable, reduced, reductions) if phase == "reduce" else (units, computed, passes)
                likely = _why_more(calls, *of_pass, workload, group_size=group_size, padding=padding)
            expect_bytes(
                tally, what, calls, least=least, most=limit, step=step.step, phase=phase, ratio=ratio, likely=likely
            )
        ratios = {
            "forward": nbytes(forward) / ideal,
            "backward": nbytes(backward) / ideal,
            "reduce": nbytes(scattered) / ideal_trained,
        }
    return tally.result(measurements={"wire volume over ideal": ratios, "parameter bytes": ideal})


def _why_more(
    calls: Sequence[CollectiveRecord],
    units: Sequence[Unit],
    dtype: Callable[[str], torch.dtype | None],
    times: int,
    workload: Workload,
    *,
    group_size: int,
    padding: float,
) -> str | None:
    """The likely cause of more bytes than `times` passes over these units need."""
    planned = {str(dtype(unit.fqn) or workload.dtype).removeprefix("torch.") for unit in units}
    ideal = parameter_bytes(units, dtype=dtype) * times
    most = padded_bytes(units, group_size, dtype=dtype) * (1 + padding) * times
    records = [(call.nbytes, call.dtype) for call in calls]
    return amounts.volume(records, ideal, dtypes=planned, units=len(units) * times, padding=most / ideal - 1)


def no_more_collectives(
    history: TrainingHistory, other: TrainingHistory, what: str, *, requirement: str
) -> CheckResult:
    """In every step, no op occurs more often than in another run of the same model without `what` (R022)."""
    tally = Tally("collectives with and without", requirement, rank=history.rank)
    for step in history.steps:
        mine, theirs = in_step(history, step.step), in_step(other, step.step)
        for op in dict.fromkeys(record.op for record in mine):
            expect_count(
                tally, f"{op.value} with {what}", of(mine, op), most=len(of(theirs, op)), step=step.step,
                details="as many as without them",
            )  # fmt: skip
    return tally.result()


def compute_dtype(plan: Plan, unit: str) -> torch.dtype | None:
    """The dtype in which a unit's parameters are gathered; None for their own."""
    name = plan.dtype_of(unit)
    dtype: torch.dtype | None = None if name is None else getattr(torch, name)
    return dtype


def reduce_dtype(plan: Plan, unit: str) -> torch.dtype | None:
    """The dtype in which a unit's gradients are reduced; None for that of its parameters."""
    if plan.reduce_dtype is None:
        return compute_dtype(plan, unit)
    dtype: torch.dtype = getattr(torch, plan.reduce_dtype)
    return dtype


def total_volume(
    history: TrainingHistory, workload: Workload, plan: Plan, *, world_size: int, padding: float, requirement: str
) -> CheckResult:
    """
    A step sends at most two passes of parameters and one of gradients in all, plus the declared padding (R068).

    That is full sharding; less sharding needs less. An all-reduce counts twice, because it is a reduction and a gather.
    An engine whose default is hybrid also all-reduces a shard.
    """
    tally = Tally("total volume", requirement, rank=history.rank)
    units = owning_units(workload, plan).shared
    group_size = shard_group_size(history, plan, world_size=world_size)
    passes = 2 * padded_bytes(units, group_size)
    trained = padded_bytes(units, group_size, trainable_only=True)
    over_replicas = 2 * trained / group_size if group_size < world_size else 0
    most = (passes + trained + over_replicas) * (1 + padding)
    for step in steady_steps(history):
        # A message counts once, on the rank that sends it.
        records = [record for record in in_step(history, step.step) if record.op is not Op.RECV]
        sent = nbytes(records) + nbytes(of(records, Op.ALL_REDUCE))
        tally.compare(
            sent <= most * len(step.losses), "sent in the step", expected=f"at most {int(most) * len(step.losses)} B",
            got=f"{sent} B", details=f"the parameters have {parameter_bytes(units)} B, padding at most {padding:.0%}",
            elements=max(len(records), 1), step=step.step, call=sites(records) if sent > most else None,
        )  # fmt: skip
    return tally.result()


def _names(units: tuple[Unit, ...]) -> str:
    return ", ".join(unit.label() for unit in units)


def _sharded_rules(step: StepRecord, units: OwningUnits, plan: Plan) -> list[_Rule]:
    trained, owning, passes = len(units.trainable), len(units.shared), len(step.losses)
    deferred = [unit for unit in units.trainable if unit.fqn in plan.deferred_units] or units.trainable
    # Deferred units are reduced once, all others after every micro-batch.
    reductions = trained * passes - (len(deferred) * (passes - 1) if plan.defer_reduction else 0)
    most = owning * passes
    if _stays_gathered(plan):
        # Under deferred reduction parameters may stay gathered from one micro-batch to the next.
        forward = trained if plan.defer_reduction else trained * passes
        backward = (0, 0)
        if plan.reshard_after_backward is False:
            forward, most = trained, owning
    else:
        forward = trained * passes
        backward = (max(trained - 1, 0) * passes, owning * passes)
    rules = [
        _Rule(Op.ALL_GATHER, ("forward",), forward, most),
        _Rule(Op.ALL_GATHER, ("backward",), *backward),
        _Rule(Op.ALL_GATHER, ("step",), 0, 0),
        _Rule(Op.REDUCE_SCATTER, TRAINING, reductions, reductions),
    ]
    if plan.replicas > 1:
        over_replicas = trained if plan.defer_all_reduce else reductions
        rules.append(_Rule(Op.ALL_REDUCE, ("forward", "backward"), over_replicas, over_replicas))
    return rules


def _stays_gathered(plan: Plan) -> bool:
    """True if parameters stay gathered from forward to backward."""
    if plan.reshard_after_forward is None:
        return plan.sharding is Sharding.GRAD_OPTIM
    return plan.reshard_after_forward is False


def _judge_rule(tally: Tally, rule: _Rule, step: StepRecord, records: list[CollectiveRecord]) -> None:
    collectives = [record for record in of(records, rule.op) if record.phase in rule.phases]
    phase = rule.phases[0] if len(rule.phases) == 1 else "reduce"
    what = f"{rule.op.value} in {phase}" if len(rule.phases) == 1 else rule.op.value
    expect_count(tally, what, collectives, least=rule.least, most=rule.most, step=step.step, phase=phase)


def _judge_rest(
    tally: Tally, step: StepRecord, records: list[CollectiveRecord], units: OwningUnits, *, hybrid: bool
) -> None:
    """Only gathers and scatters may occur, and the all-reduce of a gradient norm if the engine returned one."""
    countable = {Op.ALL_GATHER, Op.REDUCE_SCATTER}
    other = [
        record
        for record in records
        if record.op not in countable
        and not (record.op is Op.ALL_REDUCE and record.phase == "step" and step.grad_norm is not None)
        and not (record.op is Op.ALL_REDUCE and record.phase != "step" and hybrid)
    ]
    expect_count(
        tally, "other collectives", other, details=lines(other), elements=max(len(records), 1), step=step.step,
        phase=other[0].phase if other else None, likely=_instead_of_scattering(records, other, units),
    )  # fmt: skip


def _instead_of_scattering(
    records: list[CollectiveRecord], other: list[CollectiveRecord], units: OwningUnits
) -> str | None:
    """The likely cause if all-reduces carry the gradients and nothing is scattered, else None."""
    summed = gradient_reductions(of(other, Op.ALL_REDUCE))
    trained = parameter_bytes(units.shared, trainable_only=True)
    if not trained or of(records, Op.REDUCE_SCATTER) or nbytes(summed) < trained:
        return None
    return f"gradients are all-reduced instead of reduce-scattered: {nbytes(summed)} B in all-reduces, none scattered"


def _judge_replicated(tally: Tally, step: StepRecord, records: list[CollectiveRecord], units: OwningUnits) -> None:
    for op in (Op.ALL_GATHER, Op.REDUCE_SCATTER, Op.REDUCE):
        _judge_rule(tally, _Rule(op, TRAINING, 0, 0), step, records)
    expect_bytes(
        tally, "gradients all-reduced", gradient_reductions(of(records, Op.ALL_REDUCE)),
        least=parameter_bytes(units.shared, trainable_only=True), step=step.step, phase="reduce",
    )  # fmt: skip


def _first_step(records: list[CollectiveRecord]) -> int | None:
    return records[0].step if records else None
