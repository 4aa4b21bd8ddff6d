"""Values equal those of the rounding reference (`references.rounding`), bit for bit."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from fsdp_conformance.checks.result import CheckResult, Tally
from fsdp_conformance.history.training import TrainingHistory
from fsdp_conformance.references.reference_set import Kind, values

_PHASES = {Kind.LOSS: "forward", Kind.GRADIENT: "reduce", Kind.EVAL: "eval", Kind.INPUT: "backward"}

#: Values that a training has once, not in each step.
_ONCE = frozenset({Kind.EVAL, Kind.INPUT})

#: Values whose dtype the optimizer or the user relies on; the dtype of outputs is the engine's choice.
_IN_THEIR_DTYPE = frozenset({Kind.GRADIENT, Kind.PARAMETER, Kind.BUFFER})


def rounds_alike(
    history: TrainingHistory,
    expected: TrainingHistory,
    *,
    requirement: str,
    kinds: Sequence[Kind],
    none_or_zero: bool = False,
    mistakes: Callable[[], Iterable[tuple[str, TrainingHistory]]] = tuple,
) -> CheckResult:
    """
    Values of these kinds equal the rounding reference's, bit for bit.

    Gradients that the implementation does not expose are judged by the parameters that they lead to. With
    `none_or_zero`, a gradient of zeros equals none at all. `mistakes`: what engines with one mistake would have, each
    with the likely cause; called if values differ.
    """
    tally = Tally("rounding parity", requirement, rank=history.rank)
    notes = []
    if Kind.GRADIENT in kinds and all(record.grads is None for record in history.steps):
        kinds = list(dict.fromkeys(Kind.PARAMETER if kind is Kind.GRADIENT else kind for kind in kinds))
        notes.append("gradients are not exposed: the parameters they lead to were compared")
    for pair in _pairs(history, expected, kinds, none_or_zero=none_or_zero):
        text_expected, text_got = pair.difference or ("", "")
        tally.compare(
            pair.difference is None, pair.kind, expected=text_expected, got=text_got,
            details="the reference rounds where the plan says", elements=pair.elements,
            step=None if pair.kind in _ONCE else pair.step, phase=_PHASES.get(pair.kind, "step"), fqn=pair.name,
        )  # fmt: skip
    if tally.findings:
        pairs = partial(_pairs, history, kinds=kinds, none_or_zero=none_or_zero)
        causes = (cause for cause, wrong in mistakes() if all(pair.difference is None for pair in pairs(wrong)))
        likely = next(causes, None)
        tally.findings[:] = [replace(finding, likely=likely) for finding in tally.findings]
    return tally.result(notes=notes).demand_comparisons(f"rank {history.rank}")


@dataclass(frozen=True, slots=True)
class _Pair:
    """Two values of one kind, step and name."""

    kind: Kind
    step: int
    name: str
    elements: int
    difference: tuple[str, str] | None
    """The expected and the observed side; None if they are equal."""


def _pairs(
    history: TrainingHistory, expected: TrainingHistory, kinds: Sequence[Kind], *, none_or_zero: bool
) -> Iterator[_Pair]:
    for kind in kinds:
        for record in expected.steps[: 1 if kind in _ONCE else None]:
            got = values(history, kind, record.step)
            for name, want in values(expected, kind, record.step).items():
                shown = got.get(name)
                if none_or_zero and kind is Kind.GRADIENT and _is_zero(shown) and _is_zero(want):
                    shown = want
                difference = _difference(shown, want, demands_dtype=kind in _IN_THEIR_DTYPE)
                yield _Pair(kind, record.step, name, want.numel() if isinstance(want, Tensor) else 1, difference)


def _is_zero(gradient: Tensor | None) -> bool:
    """True for no gradient, or one of zeros."""
    return gradient is None or not gradient.any()


def _difference(got: Any, want: Any, *, demands_dtype: bool) -> tuple[str, str] | None:
    """The expected and the observed side of a value that differs, or None."""
    if not isinstance(got, Tensor) or not isinstance(want, Tensor):
        return None if type(got) is type(want) else (type(want).__name__, type(got).__name__)
    if got.shape != want.shape or (demands_dtype and got.dtype is not want.dtype):
        return f"{want.dtype} {tuple(want.shape)}", f"{got.dtype} {tuple(got.shape)}"
    if torch.equal(got.double(), want.double()):
        return None
    return "bitwise equality", f"a difference of up to {(got.double() - want.double()).abs().max().item():.3g}"
