"""
Metamorphic relations: two runs of one implementation that differ only in what must not change a result.

Unit boundaries, the shape of the mesh, prefetching, how a batch is split into micro-batches: on an exact workload, the
results are bitwise equal. On two ranks they are so on any workload, as long as each rank computes the same, because a
sum of two has only one order. No reference takes part: what is smaller than the noise of the references is seen, too.
"""

from __future__ import annotations

from collections.abc import Mapping
from enum import StrEnum

import torch
from torch import Tensor

from fsdp_conformance.checks.result import CheckResult, Tally
from fsdp_conformance.errors import SuiteError
from fsdp_conformance.history.training import StepRecord, TrainingHistory


class Losses(StrEnum):
    """How the losses of the two runs are related."""

    EQUAL = "equal"
    SUMS = "sums"
    """The runs divide a step into different numbers of micro-batches: the sums over a step are equal."""
    OTHERS = "others"
    """A rank has other samples in the other run: they are not compared."""


def same_training(
    run: TrainingHistory,
    other: TrainingHistory,
    *,
    what: str,
    requirement: str,
    losses: Losses = Losses.EQUAL,
) -> CheckResult:
    """
    Losses, gradients and parameters of every step are bitwise equal. `what`: how the other run differs, for messages.

    Gradients are compared if both runs show them, and each run must move a parameter: runs that do not train are always
    equal. Raises SuiteError if the runs have different numbers of steps.
    """
    if len(run.steps) != len(other.steps):
        raise SuiteError(f"steps: expected {len(other.steps)}, got {len(run.steps)} [invariance, rank {run.rank}]")
    tally = Tally("invariance", requirement, rank=run.rank)
    for history in (run, other):
        after = history.steps[-1].params
        moved = any(
            not torch.equal(value, after[name]) for name, value in history.initial_params.items() if name in after
        )
        tally.compare(moved, "parameters", expected="some that training moved", got="some" if moved else "none")
    for got, expected in zip(run.steps, other.steps, strict=True):
        if losses is not Losses.OTHERS:
            ours, theirs = (_losses(record, losses) for record in (got, expected))
            _compare(tally, "loss", ours, theirs, step=got.step, phase="forward", what=what)
        if got.grads is not None and expected.grads is not None:
            _compare(tally, "gradient", got.grads, expected.grads, step=got.step, phase="reduce", what=what)
        _compare(tally, "parameter", got.params, expected.params, step=got.step, phase="step", what=what)
        if tally.findings:
            # Later steps follow from this one.
            break
    return tally.result()


def _losses(record: StepRecord, relation: Losses) -> dict[str, Tensor]:
    if relation is Losses.SUMS:
        return {"sum of losses": torch.stack(record.losses).sum()}
    return {f"loss of micro-batch {micro}": loss for micro, loss in enumerate(record.losses)}


def _compare(
    tally: Tally,
    kind: str,
    got: Mapping[str, Tensor | None],
    expected: Mapping[str, Tensor | None],
    *,
    step: int,
    phase: str,
    what: str,
) -> None:
    for name in expected.keys() | got.keys():
        ours, theirs = got.get(name), expected.get(name)
        if isinstance(ours, Tensor) and isinstance(theirs, Tensor) and ours.shape == theirs.shape:
            same = torch.equal(ours, theirs)
            shown = f"differences of up to {(ours.double() - theirs.double()).abs().max().item():.3g}"
        else:
            same = ours is theirs
            shown = f"{_described(ours)} and {_described(theirs)}"
        tally.compare(
            same, kind, expected=f"the same bits with {what}", got=shown, elements=0 if ours is None else ours.numel(),
            step=step, phase=phase, fqn=name, bound="bitwise",
        )  # fmt: skip


def _described(value: Tensor | None) -> str:
    return "none" if value is None else f"a tensor of {tuple(value.shape)}"
