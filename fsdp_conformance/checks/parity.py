"""
Parity: what an implementation did, step by step, against what replicated training does.

Every function compares one kind of value of one rank's history with the references and returns a CheckResult.
Comparisons are bitwise on exact workloads and within calibrated bounds elsewhere. After the first step at which a
kind diverges, later steps are counted but not told: they are consequences.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import Tensor

from fsdp_conformance.checks import explain
from fsdp_conformance.checks.comparison import Difference, compare, number
from fsdp_conformance.checks.references import Kind, References, values
from fsdp_conformance.checks.result import CheckResult
from fsdp_conformance.checks.tolerance import CEILING, Bound
from fsdp_conformance.checks.writer import last_writer
from fsdp_conformance.errors import SuiteError
from fsdp_conformance.history.training import TrainingHistory
from fsdp_conformance.outcome import Finding

#: Requirement of each kind where a case names no other.
REQUIREMENTS: dict[Kind, str] = {
    Kind.INITIAL: "R001",
    Kind.LOSS: "R001",
    Kind.GRADIENT: "R003",
    Kind.NORM: "R101",
    Kind.CLIPPED: "R101",
    Kind.PARAMETER: "R002",
    Kind.BUFFER: "R130",
    Kind.OUTPUT: "R157",
    Kind.EVAL: "R010",
}

_PHASE: dict[Kind, str] = {
    Kind.INITIAL: "init",
    Kind.LOSS: "forward",
    Kind.OUTPUT: "forward",
    Kind.GRADIENT: "reduce",
    Kind.NORM: "step",
    Kind.CLIPPED: "step",
    Kind.PARAMETER: "step",
    Kind.BUFFER: "step",
    Kind.EVAL: "eval",
}

#: Within a step. A loss diverges before the gradient that it makes, buffers are read last.
_ORDER = (
    Kind.INITIAL,
    Kind.EVAL,
    Kind.LOSS,
    Kind.OUTPUT,
    Kind.GRADIENT,
    Kind.NORM,
    Kind.CLIPPED,
    Kind.PARAMETER,
    Kind.BUFFER,
)

#: Findings of one kind; the rest of the first diverging step becomes a note.
MAX_FINDINGS = 8


def parity(
    history: TrainingHistory,
    references: References,
    *,
    requirements: Mapping[str, str] | None = None,
    none_or_zero: bool = False,
) -> list[CheckResult]:
    """
    Every comparison that the history and the regime allow; results in the order of a step.

    `requirements` replaces the requirement of a kind, by the kind's name. With `none_or_zero` a gradient of zeros
    stands for none and the other way round. What the implementation does not show (gradients, buffers, norms) is a
    note.
    """
    replaced = {Kind(kind): requirement for kind, requirement in (requirements or {}).items()}
    results: list[CheckResult] = []
    diverged: dict[str, int] = {}
    for kind in _ORDER:
        if not _applies(kind, history, references):
            continue
        judge = _Judge(kind, history, references, replaced.get(kind), none_or_zero=none_or_zero, diverged=diverged)
        result = judge.result()
        if kind is Kind.GRADIENT:
            diverged = {f.fqn: f.step for f in result.findings if f.fqn is not None and f.step is not None}
        results.append(result)
    hidden = [kind for kind in (Kind.GRADIENT, Kind.BUFFER, Kind.NORM) if _hidden(kind, history, references)]
    if hidden and results:
        results[0].notes.append(f"not exposed by the implementation, so not compared: {', '.join(hidden)}")
    return results


def initial_parity(history: TrainingHistory, references: References, *, requirement: str | None = None) -> CheckResult:
    """Parameters after setup are the model's, under its names, in full shape, bit for bit."""
    return _judged(Kind.INITIAL, history, references, requirement)


def loss_parity(history: TrainingHistory, references: References, *, requirement: str | None = None) -> CheckResult:
    """This rank's loss of every micro-batch."""
    return _judged(Kind.LOSS, history, references, requirement)


def gradient_parity(
    history: TrainingHistory, references: References, *, requirement: str | None = None, none_or_zero: bool = False
) -> CheckResult:
    """Full gradients before the optimizer: the mean over ranks, None where nobody has one."""
    return _judged(Kind.GRADIENT, history, references, requirement, none_or_zero)


def parameter_parity(
    history: TrainingHistory, references: References, *, requirement: str | None = None
) -> CheckResult:
    """Full parameters after the optimizer, relative to how far they have moved."""
    return _judged(Kind.PARAMETER, history, references, requirement)


def buffer_parity(history: TrainingHistory, references: References, *, requirement: str | None = None) -> CheckResult:
    """This rank's buffers after each step."""
    return _judged(Kind.BUFFER, history, references, requirement)


def norm_parity(history: TrainingHistory, references: References, *, requirement: str | None = None) -> CheckResult:
    """The total norm that clipping returned."""
    return _judged(Kind.NORM, history, references, requirement)


def clipped_gradient_parity(
    history: TrainingHistory, references: References, *, requirement: str | None = None
) -> CheckResult:
    """Full gradients after clipping."""
    return _judged(Kind.CLIPPED, history, references, requirement)


def output_parity(history: TrainingHistory, references: References, *, requirement: str | None = None) -> CheckResult:
    """Outputs of training forwards: structure, types and values."""
    return _judged(Kind.OUTPUT, history, references, requirement)


def eval_parity(history: TrainingHistory, references: References, *, requirement: str | None = None) -> CheckResult:
    """Outputs of forwards in eval mode."""
    return _judged(Kind.EVAL, history, references, requirement)


def first_divergence(results: Iterable[CheckResult]) -> list[Finding]:
    """All findings in the order in which things happen: by step, then by what a step does first."""
    phases = ("init", "eval", "forward", "backward", "reduce", "step")

    def place(finding: Finding) -> tuple[int, int]:
        phase = phases.index(finding.phase) if finding.phase in phases else len(phases)
        return (-1 if finding.step is None else finding.step, phase)

    return sorted((finding for result in results for finding in result.findings), key=place)


def _judged(
    kind: Kind, history: TrainingHistory, references: References, requirement: str | None, none_or_zero: bool = False
) -> CheckResult:
    result = _Judge(kind, history, references, requirement, none_or_zero=none_or_zero).result()
    return result.demand_comparisons(f"{references.workload.name}, rank {history.rank}")


def _applies(kind: Kind, history: TrainingHistory, references: References) -> bool:
    """
    Whether both sides have values of the kind. Names that are missing on one side alone are findings, not a reason.
    """
    if kind is Kind.LOSS:
        return True
    if kind in (Kind.INITIAL, Kind.PARAMETER):
        # A model without parameters has nothing to compare; names on one side alone have.
        return any(
            values(side, kind, step) for side in (history, references.expected) for step in range(len(side.steps))
        )
    if kind is Kind.OUTPUT:
        return references.regime.keep_outputs
    if kind is Kind.EVAL:
        return bool(references.expected.eval_outputs)
    if kind is Kind.BUFFER:
        return any(record.buffers for record in history.steps)
    if kind is Kind.GRADIENT:
        return bool(history.initial_params) and any(record.grads is not None for record in history.steps)
    if kind is Kind.NORM:
        return references.regime.max_norm is not None and any(record.grad_norm is not None for record in history.steps)
    return references.regime.max_norm is not None and any(record.clipped_grads is not None for record in history.steps)


def _hidden(kind: Kind, history: TrainingHistory, references: References) -> bool:
    expected = any(values(references.expected, kind, step) for step in range(len(references.expected.steps)))
    return expected and not _applies(kind, history, references)


class _Judge:
    """One kind of value of one history against the references."""

    def __init__(
        self,
        kind: Kind,
        history: TrainingHistory,
        references: References,
        requirement: str | None,
        *,
        none_or_zero: bool = False,
        diverged: Mapping[str, int] | None = None,
    ) -> None:
        if len(history.steps) != len(references.expected.steps):
            raise SuiteError(
                f"steps={len(history.steps)}, but should be {len(references.expected.steps)} as in the references "
                f"[{kind} parity, {references.workload.name}, rank {history.rank}]"
            )
        self.kind = kind
        self.history = history
        self.references = references
        self.none_or_zero = none_or_zero
        self.diverged = diverged or {}
        self.found = CheckResult(check=f"{kind} parity", requirement=requirement or REQUIREMENTS[kind])
        self.unclear: list[str] = []

    def result(self) -> CheckResult:
        """Compare every step."""
        once = self.kind in (Kind.INITIAL, Kind.EVAL)
        for step in range(1 if once else len(self.history.steps)):
            told = self._step(step)
            if not self.found.findings and told:
                self.found.findings = told[:MAX_FINDINGS]
                if len(told) > MAX_FINDINGS:
                    rest = len(told) - MAX_FINDINGS
                    self.found.notes.append(
                        f"{rest} more {self.kind}s differ at step {step} on rank {self.history.rank}"
                    )
        if self.unclear and not self.found.findings:
            where = f"{self.found.check}, {self.references.workload.name}"
            self.found.inconclusive = f"{self.unclear[0]}, above {CEILING:g}: a weak fault could hide [{where}]"
        self.found.measurements = self.references.measurements(self.kind)
        return self.found

    def _step(self, step: int) -> list[Finding]:
        got = values(self.history, self.kind, step)
        expected = values(self.references.expected, self.kind, step)
        if self.kind is Kind.INITIAL:
            # An adapter may not expose buffers; their names are judged where it does.
            expected = {name: value for name, value in expected.items() if name in got or not self._is_buffer(name)}
        told = self._names(step, got, expected)
        for name in (name for name in expected if name in got):
            finding = self._one(step, name, got[name], expected[name])
            if finding is not None:
                told.append(finding)
        return told

    def _is_buffer(self, name: str) -> bool:
        return name in self.references.expected.initial_buffers

    def _names(self, step: int, got: Mapping[str, Any], expected: Mapping[str, Any]) -> list[Finding]:
        """Names that are on one side alone."""
        if got or expected:
            self.found.counted(elements=len(expected))
        missing, added = (
            [name for name in mine if name not in theirs] for mine, theirs in ((expected, got), (got, expected))
        )
        return [
            *(self._finding(step, name, f"{self.kind} {name!r} is missing, but should be there") for name in missing),
            *(
                self._finding(step, name, f"{self.kind} {name!r} is there, but should not: no such name")
                for name in added
            ),
        ]

    def _one(self, step: int, name: str, got: Any, expected: Any) -> Finding | None:
        if not isinstance(expected, Tensor) or not isinstance(got, Tensor):
            return self._none(step, name, got, expected)
        self.found.counted(elements=expected.numel())
        if got.shape != expected.shape:
            message = f"shape={tuple(got.shape)}, but should be {tuple(expected.shape)}: the full tensor"
            return self._finding(step, name, message)
        dtype = self._dtype(name, expected)
        # A norm may be in the widest dtype of the gradients, or in float64.
        if got.dtype != dtype and self.kind is not Kind.NORM:
            return self._finding(step, name, f"dtype={got.dtype}, but should be {dtype}")
        bound = self.references.bound(self.kind, step, name)
        difference = compare(got, expected, bound)
        if difference is None:
            if bound.inconclusive and (self.kind is not Kind.PARAMETER or step == self.history.steps[-1].step):
                self.unclear.append(f"the bound of {self.kind} {name!r} at step {step} is {bound.text()}")
            return None
        return self._difference(step, name, got, expected, bound, difference)

    def _none(self, step: int, name: str, got: Any, expected: Any) -> Finding | None:
        """Values of which one is no tensor: gradients that are None, leaves of outputs."""
        self.found.counted(elements=1)
        if not isinstance(got, Tensor) and not isinstance(expected, Tensor):
            if type(got) is type(expected) and got == expected:
                return None
            return self._finding(step, name, f"{self.kind}={got!r}, but should be {expected!r}")
        if self.none_or_zero and all(value is None or not bool(value.any()) for value in (got, expected)):
            return None
        seen = [_described(value) for value in (got, expected)]
        message = f"{self.kind}={seen[0]}, but should be {seen[1]}"
        likely = explain.likely_none(got, expected, self.world_size) if self.kind is Kind.GRADIENT else None
        return self._finding(step, name, message, likely=likely)

    @property
    def world_size(self) -> int:
        return self.references.world_size

    def _dtype(self, name: str, expected: Tensor) -> torch.dtype:
        """The model's dtype: the expected value is a float64 twin."""
        if not expected.is_floating_point():
            return expected.dtype
        return self.references.dtypes.get(name, torch.float32)

    def _difference(
        self, step: int, name: str, got: Tensor, expected: Tensor, bound: Bound, difference: Difference
    ) -> Finding:
        told = f"{self.kind}={number(difference.got)}, but should be {number(difference.expected)}"
        if difference.elements > 1:
            told += f"; {difference.differing} of {difference.elements} elements differ"
        if self.diverged.get(name, step + 1) <= step and self.kind in (Kind.PARAMETER, Kind.CLIPPED):
            likely: str | None = f"follows from the gradient of step {self.diverged[name]}"
        else:
            likely = explain.likely(self._evidence(step, name, got, expected, bound))
        return self._finding(
            step, name, told, bound=bound.text(), likely=likely,
            call=last_writer(self.history, self.kind, step, self.references.workload, name), **difference.fields(),
        )  # fmt: skip

    def _evidence(self, step: int, name: str, got: Tensor, expected: Tensor, bound: Bound) -> explain.Evidence:
        references = self.references
        others = values(references.expected, self.kind, step)
        earlier = (
            references.expected.initial_params
            if self.kind is Kind.PARAMETER and step == 0
            else values(references.expected, self.kind, step - 1) if step > 0 and self.kind is not Kind.EVAL else {}
        )  # fmt: skip
        gradient = self.kind is Kind.GRADIENT
        return explain.Evidence(
            kind=str(self.kind),
            got=got,
            expected=expected,
            tolerance=bound.limit,
            world_size=references.world_size,
            rank=self.history.rank,
            micro_batches=references.regime.micro_batches,
            previous=earlier.get(name),
            contributions=_by_rank(references, step, name) if gradient and name not in references.local else None,
            others={
                n: v for n, v in others.items() if n != name and isinstance(v, Tensor) and v.shape == expected.shape
            },
        )

    def _finding(self, step: int, name: str, message: str, **fields: Any) -> Finding:
        init = self.kind in (Kind.INITIAL, Kind.EVAL)
        return Finding(
            requirement=self.found.requirement,
            check=self.found.check,
            message=message,
            step=None if init else step,
            phase=_PHASE[self.kind],
            fqn=name,
            rank=self.history.rank,
            **fields,
        )


def _by_rank(references: References, step: int, name: str) -> list[list[Tensor | None]]:
    """By rank and micro-batch: that rank's own gradient."""
    return [[micro.get(name) for micro in rank[step]] for rank in references.contributions()]


def _described(value: Any) -> str:
    return f"a tensor of {tuple(value.shape)}" if isinstance(value, Tensor) else repr(value)
