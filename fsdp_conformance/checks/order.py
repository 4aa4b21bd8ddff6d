"""The order of collectives within a step, and whether every step issues the same ones."""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Iterable, Sequence
from functools import partial

import torch
from torch import nn

from fsdp_conformance.checks.result import CheckResult, Tally
from fsdp_conformance.checks.traffic import in_step, of, sites, steady_steps
from fsdp_conformance.errors import SuiteError
from fsdp_conformance.history.collective import CollectiveRecord, Op
from fsdp_conformance.history.training import TrainingHistory
from fsdp_conformance.listing import some
from fsdp_conformance.plan import Plan
from fsdp_conformance.workload.definition import BatchKey, Workload
from fsdp_conformance.workload.units import Unit, owning_units

#: A collective up to this much larger than a unit's padded size is still the unit's.
_SLACK = 1.2


def execution_order(history: TrainingHistory, workload: Workload, plan: Plan, *, requirement: str) -> CheckResult:
    """
    All-gathers of a forward come in the order in which units run, reduce-scatters of a backward in reverse (R070).

    The number of elements identifies a collective's unit. The root is left out: it runs around all others, so its
    place is the engine's choice. Raises SuiteError if two units cannot be told apart.
    """
    tally = Tally("execution order", requirement, rank=history.rank)
    units = owning_units(workload, plan).shared
    _require_distinct(units, history.world_size, workload)
    owning = {unit.fqn for unit in units}
    entered = run_order(workload, plan, rank=history.rank, world_size=history.world_size)
    order = [name for name in entered if name in owning]
    trained = {unit.fqn for unit in units if unit.trainable}
    backwards = [name for name in reversed(order) if name in trained]
    for step in steady_steps(history):
        forward = of(in_step(history, step.step, "forward"), Op.ALL_GATHER)
        scattered = of(in_step(history, step.step, "backward"), Op.REDUCE_SCATTER)
        for phase, records, expected in (("forward", forward, order), ("backward", scattered, backwards)):
            what = "all-gathers" if phase == "forward" else "reduce-scatters"
            owners = _owners(records, units, history.world_size)
            got = [name for name in dict.fromkeys(owners) if name]
            tally.compare(
                got == expected, f"order of {what}", expected=_text(expected), got=_text(got),
                elements=max(len(records), 1), step=step.step, phase=phase, call=sites(records),
            )  # fmt: skip
    return tally.result()


def steady_schedule(history: TrainingHistory, *, requirement: str, validation: bool = False) -> CheckResult:
    """
    All steps after the first issue the same collectives, and the first issues no more of any op (R071).

    `validation`: the engine declares a check in its first iteration, so additional collectives there are allowed.
    Sizes in the first step are not compared: engines with buckets may rearrange them by what they see there.
    """
    tally = Tally("steady schedule", requirement, rank=history.rank)
    steps = steady_steps(history)
    usual = in_step(history, steps[0].step)
    for step in steps[1:]:
        records = in_step(history, step.step)
        kinds, usual_kinds = Counter(map(_kind, records)), Counter(map(_kind, usual))
        changed = {
            kind: kinds[kind] - usual_kinds[kind] for kind in kinds | usual_kinds if kinds[kind] != usual_kinds[kind]
        }
        tally.compare(
            not changed, "collectives", expected=f"the {len(usual)} of step {steps[0].step}", got=len(records),
            details=_changes(changed), elements=len(records), step=step.step,
        )  # fmt: skip
    first = history.steps[0]
    records = in_step(history, first.step)
    counts, usual_counts = Counter(map(_place, records)), Counter(map(_place, usual))
    extra = counts - usual_counts
    extras = [record for record in records if _place(record) in extra]
    tally.compare(
        not extra or validation, "collectives in the first step",
        expected=f"the {len(usual)} of step {steps[0].step}", got=len(records), details=_changes(dict(extra)),
        elements=len(records), step=first.step, phase=extras[0].phase if extras else None, call=sites(extras),
    )  # fmt: skip
    notes = [f"the first step issues {extra.total()} more collectives, as declared"] if extra and validation else []
    return tally.result(notes=notes)


def run_order(workload: Workload, plan: Plan, *, rank: int, world_size: int) -> list[str]:
    """The units in the order in which a forward of the plain model first enters them, outer before inner."""
    model = workload.build(rank)
    entered: list[str] = []
    for unit in plan.units or workload.units:
        for fqn in unit.split("+"):
            model.get_submodule(fqn).register_forward_pre_hook(partial(_enter, entered, unit))
    batch = workload.batch(BatchKey(step=0, rank=rank, world_size=world_size))
    # The model may have dropout: the numbers that this forward draws must not be missing later.
    with torch.random.fork_rng(devices=[]), torch.no_grad():
        model(*batch.args, **batch.kwargs)
    return list(dict.fromkeys(entered))


def gathered_units(
    records: Iterable[CollectiveRecord], workload: Workload, plan: Plan, *, world_size: int
) -> list[str]:
    """
    The unit below the root that each all-gather belongs to, in order, recognised by its size; the root's are left out.

    Raises SuiteError if two units cannot be told apart.
    """
    units = owning_units(workload, plan).shared
    _require_distinct(units, world_size, workload)
    return [name for name in _owners(of(records, Op.ALL_GATHER), units, world_size) if name]


def _enter(entered: list[str], unit: str, module: nn.Module, args: object) -> None:
    """Note that a unit was entered: a forward pre-hook, once its first two arguments are bound."""
    entered.append(unit)


def _require_distinct(units: Sequence[Unit], world_size: int, workload: Workload) -> None:
    by_size = sorted(units, key=lambda unit: unit.numel)
    close = [
        f"{smaller.label()} ({smaller.numel} elements) and {larger.label()} ({larger.numel})"
        for smaller, larger in itertools.pairwise(by_size)
        if smaller.padded_numel(world_size) >= larger.numel
    ]
    if close:
        raise SuiteError(
            f"cannot tell units apart by size once padded for {world_size} ranks: {'; '.join(close)} "
            f"[workload {workload.name}]"
        )


def _owners(records: Iterable[CollectiveRecord], units: Sequence[Unit], world_size: int) -> list[str]:
    return [_owner(record, units, world_size) for record in records]


def _owner(record: CollectiveRecord, units: Sequence[Unit], world_size: int) -> str:
    """The unit that a collective belongs to ("" for the root), or its size if it fits no unit."""
    dtype = getattr(torch, record.dtype, None)
    elements = record.nbytes // dtype.itemsize if isinstance(dtype, torch.dtype) else 0
    fitting = [unit for unit in units if unit.numel <= elements <= unit.padded_numel(world_size) * _SLACK]
    return max(fitting, key=lambda unit: unit.numel).fqn if fitting else f"({record.nbytes} B, no unit's)"


def _kind(record: CollectiveRecord) -> str:
    return record.line()


def _place(record: CollectiveRecord) -> str:
    return f"{record.op.value} in {record.phase}"


def _changes(changed: dict[str, int], limit: int = 4) -> str:
    return some([f"{difference:+d} {kind}" for kind, difference in changed.items()], limit, separator="; ")


def _text(names: Sequence[str]) -> str:
    return ", ".join(names) or "none"
