"""
Parity: what an implementation computed in each step, against replicated training.

Each kind of value of one rank's history is compared with the references and gives one CheckResult. Comparisons are
bitwise on exact workloads and within calibrated bounds elsewhere. After the first step at which a kind diverges, later
steps are counted but not reported: they are consequences.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Mapping
from functools import cached_property, partial
from typing import Any

import torch
from torch import Tensor

from fsdp_conformance.checks.comparison import Difference, compare, numbers
from fsdp_conformance.checks.derived import with_derived_gradients
from fsdp_conformance.checks.result import CheckResult, comparison
from fsdp_conformance.checks.traffic import REDUCING, of
from fsdp_conformance.diagnosis import causes
from fsdp_conformance.diagnosis.evidence import Evidence
from fsdp_conformance.diagnosis.headline import causes_in
from fsdp_conformance.diagnosis.mistakes import (
    supposed_clipped,
    supposed_gradients,
    supposed_loss_scales,
    supposed_losses,
    supposed_norms,
    supposed_parameters,
)
from fsdp_conformance.diagnosis.optimizer_steps import (
    SupposedStep,
    implied_gradients,
    possible,
    rate_factors,
    supposed_steps,
)
from fsdp_conformance.errors import SuiteError
from fsdp_conformance.history.collective import CollectiveRecord
from fsdp_conformance.history.training import Tensors, TrainingHistory
from fsdp_conformance.outcome.records import Finding
from fsdp_conformance.references.reference_set import Kind, References, values
from fsdp_conformance.references.tolerance import CEILING, Bound
from fsdp_conformance.workload.definition import NEGATING, Regime, Workload
from fsdp_conformance.workload.events import Action
from fsdp_conformance.workload.units import Unit, owner, owning_units, parameter_bytes

#: Requirement of each kind unless a case names another.
REQUIREMENTS: dict[Kind, str] = {
    Kind.INITIAL: "R001",
    Kind.LOSS: "R001",
    Kind.GRADIENT: "R003",
    Kind.NORM: "R101",
    Kind.CLIPPED: "R101",
    Kind.LOSS_SCALE: "R105",
    Kind.PARAMETER: "R002",
    Kind.BUFFER: "R130",
    Kind.OUTPUT: "R157",
    Kind.EVAL: "R010",
    Kind.READ: "R052",
    Kind.STATE: "R146",
    Kind.INPUT: "R157",
}

_PHASE: dict[Kind, str] = {
    Kind.INITIAL: "init",
    Kind.LOSS: "forward",
    Kind.OUTPUT: "forward",
    Kind.GRADIENT: "reduce",
    Kind.NORM: "step",
    Kind.CLIPPED: "step",
    Kind.LOSS_SCALE: "step",
    Kind.PARAMETER: "step",
    Kind.BUFFER: "step",
    Kind.EVAL: "eval",
    Kind.READ: "step",
    Kind.STATE: "checkpoint",
    Kind.INPUT: "backward",
}

#: Order within a step. A loss diverges before the gradient it produces; buffers are read last.
_ORDER = (
    Kind.INITIAL,
    Kind.READ,
    Kind.STATE,
    Kind.EVAL,
    Kind.LOSS,
    Kind.OUTPUT,
    Kind.INPUT,
    Kind.GRADIENT,
    Kind.NORM,
    Kind.CLIPPED,
    Kind.LOSS_SCALE,
    Kind.PARAMETER,
    Kind.BUFFER,
)

#: Kinds that are compared once for the whole run.
_ONCE = frozenset({Kind.INITIAL, Kind.EVAL, Kind.READ, Kind.STATE, Kind.INPUT})

#: Kinds of values that an engine stores.
_STORED = (Kind.INITIAL, Kind.PARAMETER, Kind.BUFFER, Kind.READ, Kind.STATE)
#: Kinds of any dtype: a norm may be in the widest dtype of the gradients, or in float64.
_IN_ANY_DTYPE = frozenset({Kind.NORM, Kind.LOSS_SCALE})
#: The same where units compute in low precision, and the engine chooses the dtype of what they return.
_IN_ANY_DTYPE_ROUNDED = _IN_ANY_DTYPE | {Kind.LOSS, Kind.OUTPUT, Kind.EVAL, Kind.INPUT}

#: Findings per kind; the rest of the first diverging step becomes a note.
MAX_FINDINGS = 8

#: Padding that implementations have been seen to add to a unit: up to a sixth, plus a row per rank.
_SLACK = 1.25


def parity(
    history: TrainingHistory,
    references: References,
    *,
    requirements: Mapping[str, str] | None = None,
    none_or_zero: bool = False,
) -> list[CheckResult]:
    """
    Every comparison that the history and the regime allow; results in the order of a step.

    `requirements` replaces the requirement of a kind, by the kind's name. With `none_or_zero` a missing gradient and a
    gradient of zeros count as equal. Gradients that the implementation does not expose are derived from the changes of
    its parameters where possible (`checks.derived`). What cannot be seen at all (`hidden_kinds`) is a note.
    """
    replaced = {Kind(kind): requirement for kind, requirement in (requirements or {}).items()}
    results: list[CheckResult] = []
    diverged: dict[str, int] = {}
    for kind in _ORDER:
        sides = _seen(kind, history, references)
        if sides is None:
            continue
        judge = _Judge(kind, *sides, replaced.get(kind), none_or_zero=none_or_zero, diverged=diverged)
        result = judge.result()
        if sides[0] is not history:
            # Rounded changes show small errors less clearly, but the next comparison, of the parameters, shows them.
            result.inconclusive = None
            result.notes.append("gradients are not exposed: they were derived from the changes of the parameters")
        if kind is Kind.GRADIENT:
            diverged = {f.fqn: f.step for f in result.findings if f.fqn is not None and f.step is not None}
        results.append(result)
    hidden = hidden_kinds(history, references)
    if hidden and results:
        results[0].notes.append(f"not exposed by the implementation, so not compared: {', '.join(hidden)}")
    return results


def hidden_kinds(history: TrainingHistory, references: References) -> list[Kind]:
    """Kinds that the references have and the implementation gives no way to see: gradients, buffers, norms."""
    kinds = (Kind.GRADIENT, Kind.BUFFER, Kind.NORM)
    return [
        kind for kind in kinds if _has_values(references.expected, kind) and _seen(kind, history, references) is None
    ]


def kind_parity(
    kind: Kind,
    history: TrainingHistory,
    references: References,
    *,
    requirement: str | None = None,
    none_or_zero: bool = False,
) -> CheckResult:
    """One of the comparisons of `parity`. Raises NothingCompared if neither side has a value of the kind."""
    result = _Judge(kind, history, references, requirement, none_or_zero=none_or_zero).result()
    return result.demand_comparisons(f"{references.workload.name}, rank {history.rank}")


class LastWriters:
    """The collectives that reduced the gradients of one history. The model is built once, for all gradients."""

    def __init__(self, history: TrainingHistory, workload: Workload) -> None:
        self._history = history
        self._workload = workload

    def of_gradient(self, step: int, name: str) -> str | None:
        """
        The collective that reduced a gradient, on one line, or None if none fits or several do.

        It is recognised by its size: between the bytes of the parameter's unit and a quarter more.
        """
        reduced = self._reductions.get(step, [])
        if len(reduced) > 1:
            least, most = self._sizes.get(owner(name, self._workload.units), (1, 0))
            reduced = [record for record in reduced if least <= record.nbytes <= most]
        return _reference_to(reduced[0]) if len(reduced) == 1 else None

    @cached_property
    def _reductions(self) -> dict[int | None, list[CollectiveRecord]]:
        """The reductions of backward, by step."""
        by_step: dict[int | None, list[CollectiveRecord]] = {}
        for record in of(self._history.collectives, *REDUCING):
            if record.phase == "backward":
                by_step.setdefault(record.step, []).append(record)
        return by_step

    @cached_property
    def _sizes(self) -> dict[str, tuple[int, float]]:
        """The least and the most bytes that reducing a unit takes, by the unit's name."""
        return {
            unit.fqn: _reduced_bytes(unit, self._history.world_size) for unit in owning_units(self._workload).shared
        }


def _reduced_bytes(unit: Unit, world_size: int) -> tuple[int, float]:
    least = parameter_bytes([unit], trainable_only=True)
    row_per_rank = sum(world_size * p.row_numel * p.itemsize for p in unit.parameters if p.shape)
    return least, least * _SLACK + row_per_rank


def _reference_to(record: CollectiveRecord) -> str:
    return f"#{record.seq} {record.line()}" + (f" at {record.site}" if record.site else "")


def _applies(kind: Kind, history: TrainingHistory, references: References) -> bool:
    """
    True if both sides have values of the kind. A name that only one side has is a finding, not a reason to skip.
    """
    if kind is Kind.LOSS:
        return True
    if kind in (Kind.INITIAL, Kind.PARAMETER):
        # A model without parameters has nothing to compare, unless one side has names that the other lacks.
        return any(_has_values(side, kind) for side in (history, references.expected))
    if kind is Kind.OUTPUT:
        return references.regime.keep_outputs
    if kind is Kind.EVAL:
        return bool(references.expected.eval_outputs)
    if kind is Kind.READ:
        return bool(references.expected.reads)
    if kind is Kind.STATE:
        return bool(references.expected.states)
    if kind is Kind.INPUT:
        return bool(references.expected.input_grads)
    if kind is Kind.BUFFER:
        return history.shows_buffers and any(_has_values(side, kind) for side in (history, references.expected))
    if kind is Kind.GRADIENT:
        return bool(history.initial_params) and any(record.grads is not None for record in history.steps)
    if kind is Kind.LOSS_SCALE:
        return references.regime.init_scale is not None
    if kind is Kind.NORM:
        return references.regime.max_norm is not None and any(record.grad_norm is not None for record in history.steps)
    return references.regime.max_norm is not None and any(record.clipped_grads is not None for record in history.steps)


def _seen(kind: Kind, history: TrainingHistory, references: References) -> tuple[TrainingHistory, References] | None:
    """The two sides to compare, with derived gradients if those are not exposed; None if a side cannot be seen."""
    if _applies(kind, history, references):
        return history, references
    if kind is Kind.GRADIENT and _has_values(references.expected, kind):
        return with_derived_gradients(history, references)
    return None


def _has_values(history: TrainingHistory, kind: Kind) -> bool:
    return any(values(history, kind, step) for step in range(len(history.steps)))


#: A difference that was found, as a function that explains it and returns the finding.
_Unexplained = Callable[[], Finding]


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
                f"steps: expected {len(references.expected.steps)} as in the references, got {len(history.steps)} "
                f"[{kind} parity, {references.workload.name}, rank {history.rank}]"
            )
        self.kind = kind
        self.history = history
        self.references = references
        self.none_or_zero = none_or_zero
        self.diverged = diverged or {}
        self.writers = LastWriters(history, references.workload)
        self.comparison = CheckResult(check=f"{kind} parity", requirement=requirement or REQUIREMENTS[kind])
        self.unclear: list[str] = []
        self._gradients_supposed: dict[int, list[tuple[str, Tensors]]] = {}
        self._steps_supposed: dict[int, list[SupposedStep]] = {}
        self._roundings: dict[int, str | None] = {}
        self._rate_factors: dict[int, dict[str, float]] = {}
        self._implied: dict[int, dict[str, tuple[Tensor, Tensor]]] = {}

    def result(self) -> CheckResult:
        """Compare every step."""
        once = self.kind in _ONCE
        for step in range(1 if once else len(self.history.steps)):
            differing = self._step(step)
            if not self.comparison.findings and differing:
                self.comparison.findings = [explained() for explained in differing[:MAX_FINDINGS]]
                if len(differing) > MAX_FINDINGS:
                    rest = len(differing) - MAX_FINDINGS
                    self.comparison.notes.append(
                        f"{rest} more {self.kind}s differ at step {step} on rank {self.history.rank}"
                    )
        if self.unclear and not self.comparison.findings:
            where = f"{self.comparison.check}, {self.references.workload.name}"
            unclear = f"{self.unclear[0]}, above {CEILING:g}: a weak fault could hide in it [{where}]"
            # Each micro-batch has gradients of inputs. Some may nearly vanish: the others show what the engine does.
            if self.kind is Kind.INPUT and len(self.unclear) < len(self.references.expected.input_grads):
                self.comparison.notes.append(unclear)
            else:
                self.comparison.inconclusive = unclear
        self.comparison.measurements = self.references.measurements(self.kind)
        return self.comparison

    def _step(self, step: int) -> list[_Unexplained]:
        """The differences at a step. Only those that are reported are explained, which takes longest."""
        got = values(self.history, self.kind, step)
        expected = values(self.references.expected, self.kind, step)
        if self.kind is Kind.INITIAL and not self.history.shows_buffers:
            buffers = self.references.expected.initial_buffers
            expected = {name: value for name, value in expected.items() if name not in buffers}
        differing = self._names(step, got, expected)
        for name in (name for name in expected if name in got):
            difference = self._one(step, name, got[name], expected[name])
            if difference is not None:
                differing.append(difference)
        return differing

    def _names(self, step: int, got: Mapping[str, Any], expected: Mapping[str, Any]) -> list[_Unexplained]:
        """Names that only one side has."""
        if got or expected:
            self.comparison.counted(elements=len(expected))
        missing = [name for name in expected if name not in got]
        added = [name for name in got if name not in expected]
        return [
            *(partial(self._finding, step, name, f"{self.kind} {name!r} is missing") for name in missing),
            *(
                partial(self._finding, step, name, f"unexpected {self.kind} {name!r}: the model has none")
                for name in added
            ),
        ]

    def _one(self, step: int, name: str, got: Any, expected: Any) -> _Unexplained | None:
        if not isinstance(expected, Tensor) or not isinstance(got, Tensor):
            return self._none(step, name, got, expected)
        self.comparison.counted(elements=expected.numel())
        if got.shape != expected.shape:
            return partial(
                self._differs,
                step,
                name,
                "shape",
                tuple(got.shape),
                tuple(expected.shape),
                details="must be the full tensor",
            )
        dtype = self._dtype(name, expected)
        if got.dtype != dtype and self.kind not in (_IN_ANY_DTYPE_ROUNDED if self.references.rounds else _IN_ANY_DTYPE):
            likely = (
                f"converted to {str(got.dtype).removeprefix('torch.')}: it should keep its dtype"
                if self.kind in _STORED
                else None
            )
            return partial(self._differs, step, name, "dtype", got.dtype, dtype, likely=likely)
        bound = self.references.bound(self.kind, step, name)
        difference = compare(got, expected, bound)
        if difference is None:
            if bound.inconclusive and (self.kind is not Kind.PARAMETER or step == self.history.steps[-1].step):
                self.unclear.append(f"the bound of {self.kind} {name!r} at step {step} is {bound.text()}")
            return None
        return partial(self._difference, step, name, got, expected, bound, difference)

    def _none(self, step: int, name: str, got: Any, expected: Any) -> _Unexplained | None:
        """Values at least one of which is not a tensor: gradients that are None, leaves of outputs."""
        self.comparison.counted(elements=1)
        if not isinstance(got, Tensor) and not isinstance(expected, Tensor):
            if type(got) is type(expected) and got == expected:
                return None
            return partial(self._differs, step, name, self.kind, repr(got), repr(expected))
        if self.none_or_zero and all(value is None or not bool(value.any()) for value in (got, expected)):
            return None
        likely = self._likely_none(step, name, got, expected) if self.kind is Kind.GRADIENT else None
        return partial(self._differs, step, name, self.kind, _described(got), _described(expected), likely=likely)

    def _likely_none(self, step: int, name: str, got: Tensor | None, expected: Tensor | None) -> str | None:
        contributions = self.references.contributions()[self.history.rank][step]
        return causes.likely_none(
            got,
            expected,
            trainable=self.references.expected.requires_grad.get(name, True),
            used=any(micro.get(name) is not None for micro in contributions),
        )

    def _dtype(self, name: str, expected: Tensor) -> torch.dtype:
        """The model's dtype, since the expected value is a float64 twin."""
        if not expected.is_floating_point():
            return expected.dtype
        of_the_model: torch.dtype = getattr(torch, self.references.workload.dtype)
        # Values that were read, or taken from a state dict, are named like "0.weight, read 1".
        return self.references.dtypes.get(name.rpartition(", ")[0] or name, of_the_model)

    def _difference(
        self, step: int, name: str, got: Tensor, expected: Tensor, bound: Bound, difference: Difference
    ) -> Finding:
        counted = f"{difference.differing} of {difference.elements} elements differ" if difference.elements > 1 else ""
        if self.comparison.findings:
            # Only the first step that differs is reported.
            likely: str | None = None
        elif self.diverged.get(name, step + 1) <= step and self.kind in (Kind.PARAMETER, Kind.CLIPPED):
            likely = f"a consequence of the wrong gradient in step {self.diverged[name]}"
        else:
            likely = self._likely(step, name, got, expected, bound)
        return self._differs(
            step, name, self.kind, *numbers(difference.got, difference.expected), details=counted,
            bound=bound.text(), likely=likely,
            call=self.writers.of_gradient(step, name) if self.kind is Kind.GRADIENT else None, **difference.place(),
        )  # fmt: skip

    def _likely(self, step: int, name: str, got: Tensor, expected: Tensor, bound: Bound) -> str | None:
        try:
            likely = self._rounded_elsewhere(step)
            if likely is not None:
                return likely
            likely = causes.likely(self._evidence(step, name, got, expected, bound))
            if self.kind is Kind.GRADIENT:
                return self._of_gradient(likely)
            if self.kind is Kind.PARAMETER and not causes_in(likely):
                return self._in_gradient(step, name) or likely
            return likely
        except Exception as error:  # noqa: BLE001 - a difference that was found must not be lost for want of its cause
            return f"unknown: a bug in the suite, please report it: {type(error).__name__}: {error}"

    def _rounded_elsewhere(self, step: int) -> str | None:
        """The cause, if all values of the step are those of an engine that rounds elsewhere."""
        if step not in self._roundings:
            got = values(self.history, self.kind, step)
            causes_of_all = (
                cause for cause, wrong in self.references.roundings() if _are_equal(got, values(wrong, self.kind, step))
            )
            self._roundings[step] = next(causes_of_all, None)
        return self._roundings[step]

    def _in_gradient(self, step: int, name: str) -> str | None:
        """The likely cause, from the gradient with which the optimizer must have stepped; it need not be exposed."""
        references = self.references
        if step not in self._implied:
            self._implied[step] = implied_gradients(references, step, values(self.history, self.kind, step))
        if name in references.local or name not in self._implied[step]:
            return None
        wrong, right = self._implied[step][name]
        earlier = values(references.expected, Kind.GRADIENT, step - 1) if step else {}
        evidence = Evidence(
            kind=str(Kind.GRADIENT),
            got=wrong,
            expected=right,
            tolerance=None,
            world_size=references.world_size,
            rank=self.history.rank,
            micro_batches=references.regime.micro_batches,
            previous=earlier.get(name),
            contributions=_by_rank(references, step, name),
            factors=_factors(references.regime, references.workload),
        )
        cause = self._of_gradient(causes.likely(evidence))
        if cause is None:
            return None
        names, _, fact = cause.partition(": ")
        return f"{names}: in the gradient that the step implies, {fact}"

    def _of_gradient(self, likely: str | None) -> str | None:
        """The cause of a wrong gradient. Words and numbers assume a mean over the ranks; the user may have a sum."""
        named_causes = causes_in(likely)
        if not self.references.regime.sums or not named_causes:
            return likely
        other_causes = [name for name in named_causes if not name.startswith("divided by ")]
        of_sum = [
            "averaged instead of summed" if name == causes.AVERAGED_TWICE else name
            for name in other_causes or named_causes
        ]
        return f"{', or '.join(of_sum)}: the user has gradients summed over the ranks"

    def _evidence(self, step: int, name: str, got: Tensor, expected: Tensor, bound: Bound) -> Evidence:
        references = self.references
        others = values(references.expected, self.kind, step)
        initial = {
            Kind.PARAMETER: references.expected.initial_params,
            Kind.BUFFER: references.expected.initial_buffers,
        }
        earlier = (
            initial[self.kind]
            if self.kind in initial and step == 0
            else values(references.expected, self.kind, step - 1) if step > 0 and self.kind not in _ONCE else {}
        )  # fmt: skip
        gradient, local = self.kind is Kind.GRADIENT, name in references.local
        by_rank = _by_rank(references, step, name) if gradient else None
        return Evidence(
            kind=str(self.kind),
            got=got,
            expected=expected,
            tolerance=bound.limit,
            # Only this rank contributes to the gradient of a parameter that no other rank has.
            world_size=1 if local else references.world_size,
            rank=0 if local else self.history.rank,
            micro_batches=references.regime.micro_batches,
            # A loss scale that has not changed is not a stale one.
            previous=None if self.kind is Kind.LOSS_SCALE else earlier.get(name),
            contributions=[by_rank[self.history.rank]] if by_rank is not None and local else by_rank,
            others={
                n: v for n, v in others.items() if n != name and isinstance(v, Tensor) and v.shape == expected.shape
            },
            factors=self._factors(step),
            unit=self._unit(step, name, others),
            supposed=partial(self._supposed, step, name),
        )

    def _factors(self, step: int) -> dict[str, float]:
        """The mistakes by which a gradient, or the update of a parameter, would be scaled."""
        if self.kind is Kind.PARAMETER:
            if step not in self._rate_factors:
                self._rate_factors[step] = rate_factors(self.references, step)
            return self._rate_factors[step]
        return _factors(self.references.regime, self.references.workload) if self.kind is Kind.GRADIENT else {}

    def _unit(self, step: int, name: str, expected: Mapping[str, Any]) -> tuple[Tensor, Tensor] | None:
        """The actual and the expected values of the parameter's unit, flat; None if they are not all comparable."""
        if self.kind not in (Kind.INITIAL, Kind.GRADIENT, Kind.PARAMETER):
            return None
        units, got = self.references.workload.units, values(self.history, self.kind, step)
        held: list[Tensor] = []
        right: list[Tensor] = []
        for other in (other for other in expected if owner(other, units) == owner(name, units)):
            value, reference = got.get(other), expected[other]
            if reference is None and value is None:
                continue
            if not isinstance(value, Tensor) or not isinstance(reference, Tensor) or value.shape != reference.shape:
                return None
            held.append(value.flatten())
            right.append(reference.flatten())
        return torch.cat(held), torch.cat(right)

    def _supposed(self, step: int, name: str) -> Iterable[tuple[str, Tensor]]:
        """For each mistake that the step may have: a phrase, and the value as it would be."""
        if self.kind is Kind.LOSS:
            return supposed_losses(self.references, step, int(name.rpartition(" ")[2]))
        if self.kind is Kind.NORM:
            return supposed_norms(self.references, step)
        if self.kind is Kind.PARAMETER:
            if step not in self._steps_supposed:
                got, right = (values(run, self.kind, step) for run in (self.history, self.references.expected))
                self._steps_supposed[step] = possible(supposed_steps(self.references, step), got, right)
            of_all = [(phrase, after[name]) for phrase, after in self._steps_supposed[step] if name in after]
            return itertools.chain(supposed_parameters(self.references, step, name), of_all)
        if self.kind is Kind.LOSS_SCALE:
            return supposed_loss_scales(self.references, step)
        if self.kind is Kind.CLIPPED:
            return supposed_clipped(self.references, step, name)
        if self.kind is not Kind.GRADIENT:
            return ()
        if step not in self._gradients_supposed:
            self._gradients_supposed[step] = list(
                supposed_gradients(self.references, step, self.history.steps[step].losses)
            )
        return [(phrase, grads[name]) for phrase, grads in self._gradients_supposed[step] if name in grads]

    def _differs(
        self, step: int, name: str, what: str, got: object, expected: object, *, details: str = "", **fields: Any
    ) -> Finding:
        message = comparison(what, expected=expected, got=got, details=details)
        return self._finding(step, name, message, got=str(got), expected=str(expected), **fields)

    def _finding(self, step: int, name: str, message: str, **fields: Any) -> Finding:
        init = self.kind in _ONCE
        return Finding(
            requirement=self.comparison.requirement,
            check=self.comparison.check,
            message=message,
            step=None if init else step,
            phase=_PHASE[self.kind],
            fqn=name,
            rank=self.history.rank,
            **fields,
        )


def _are_equal(got: Mapping[str, Any], others: Mapping[str, Any]) -> bool:
    """True if all tensors are equal, bit for bit."""
    return got.keys() == others.keys() and all(
        torch.equal(value.double(), other.double())
        if isinstance(value, Tensor) and isinstance(other, Tensor) and value.shape == other.shape
        else value is other
        for value, other in ((value, others[name]) for name, value in got.items())
    )


def _factors(regime: Regime, workload: Workload) -> dict[str, float]:
    """The mistakes that would scale gradients in this regime, apart from ranks and micro-batches."""
    factors = {}
    if NEGATING in workload.traits:
        factors["a hook of the user on a module was not called"] = -1.0
    if regime.backwards_per_forward > 1:
        factors[f"one of {regime.backwards_per_forward} backwards missing"] = 1 / regime.backwards_per_forward
    idle = sum(event.action is Action.FORWARD for event in regime.in_step(0))
    if idle:
        factors["divided by all forwards, with and without backward"] = regime.micro_batches / (
            regime.micro_batches + idle
        )
    return factors


def _by_rank(references: References, step: int, name: str) -> list[list[Tensor | None]]:
    """The gradients of each rank alone, by rank and micro-batch; the right gradient is their mean over the ranks."""
    factor = references.world_size if references.regime.sums else 1
    return [
        [None if (grad := micro.get(name)) is None else grad * factor for micro in rank[step]]
        for rank in references.contributions()
    ]


def _described(value: Any) -> str:
    return f"a tensor of {tuple(value.shape)}" if isinstance(value, Tensor) else repr(value)
