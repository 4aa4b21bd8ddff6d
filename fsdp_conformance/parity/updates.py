"""The optimizer's part of a step in two runs: the state it loads, its step counters, and what it updates."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from fsdp_conformance.parity import gradients
from fsdp_conformance.parity.bounds import Bounds
from fsdp_conformance.parity.finding import Finding, Whose
from fsdp_conformance.parity.noise import EXPLAINED, TENSORS
from fsdp_conformance.parity.runs import Run, TrainingStep
from fsdp_conformance.parity.words import instead, of_own_optimizer
from fsdp_conformance.recordings.fingerprint import Whole, inner_product, norm_of

#: Updates whose factors are nearer to 1 are not scaled: another part of them differs.
_SAME_UPDATE = 1e-3


@dataclass(frozen=True)
class Updates:
    """The optimizers' steps of two runs."""

    run: Run
    reference: Run
    bounds: Bounds
    whose: Whose
    """Whose a difference is that no mistake of the script explains."""

    def differences(self, step: TrainingStep, expected: TrainingStep) -> Iterator[Finding]:
        """Compare what the optimizers of two steps have done, and the buffers."""
        line = step.steps[0].line
        if step.loaded.values and expected.loaded.values:
            yield from self._loaded(step, expected)
        yield from self._counters(step, expected)
        for kind in ("parameter", "optimizer state", "buffer"):
            select = TENSORS[kind]
            values, others = select(step).values, select(expected).values
            if kind == "parameter":
                values = select(step).farthest(select(expected))
            beyond = self.bounds.exceeded(kind, step.number, values, others)
            if not beyond:
                continue
            defined = step.steps[0].defined if kind != "buffer" else ""
            likely = self._why_update(kind, step, expected, [item[0] for item in beyond])
            yield self.bounds.finding(
                f"The {kind}s differ after the step",
                step,
                kind,
                beyond,
                total=len(others),
                whose=Whose.SCRIPT if defined else self.whose,
                likely=of_own_optimizer(step.steps[0].optimizer, defined, likely) if defined else likely,
                evidence=("the gradients and the settings of the optimizer agree",),
                line=line,
            )

    def _loaded(self, step: TrainingStep, expected: TrainingStep) -> Iterator[Finding]:
        """A state that was loaded into the optimizer before the step."""
        values, others = step.loaded.values, expected.loaded.values
        beyond = self.bounds.exceeded("loaded state", step.number, values, others)
        if beyond:
            first = step.steps[0]
            by_torch = first.is_loaded_by_torch
            yield self.bounds.finding(
                "The optimizer's state differs after it was loaded",
                step,
                "loaded state",
                beyond,
                total=len(others),
                whose=self.whose if by_torch else Whose.SCRIPT,
                likely="" if by_torch else "the script makes the state that it loads from that of other ranks or rows",
                line=first.loaded_line,
            )

    def _counters(self, step: TrainingStep, expected: TrainingStep) -> Iterator[Finding]:
        """The numbers of steps that the optimizers have in their states."""
        mine, theirs = step.steps[0].counters, expected.steps[0].counters
        # A parameter of one element has other states that are single numbers.
        counts = [name for name in theirs if name in mine and mine[name].is_integer() and theirs[name].is_integer()]
        name = next((name for name in counts if mine[name] != theirs[name]), None)
        if name is not None:
            whose, likely = self._why_count(step, expected, name)
            yield Finding(
                title="The optimizer counts its steps differently",
                whose=whose,
                step=step.number,
                first=f"'{name}' · {instead(mine[name], theirs[name])}",
                likely=likely,
                line=step.steps[0].line,
                is_exact=True,
            )

    def _why_count(self, step: TrainingStep, expected: TrainingStep, name: str) -> tuple[Whose, str]:
        """Why a parameter was stepped another number of times, and by whom."""
        zero = gradients.why_zero(step, expected, [name.removesuffix("/step")])
        if zero:
            # Scripts freeze parameters and clear gradients; an engine may give zeros to what is not used.
            return Whose.EITHER if self.reference.sharding == "kept" else self.whose, zero
        is_loaded = step.steps[0].is_loaded
        if step.steps[0].counters[name] == 1 < expected.steps[0].counters[name]:
            other = self.run.steps[step.number - 1].steps[0].optimizer if step.number else ""
            is_made_again = other not in ("", step.steps[0].optimizer)
            likely = "its state begins with this step: no state of the steps before was loaded into it"
            if expected.steps[0].is_loaded and not is_loaded:
                return Whose.SCRIPT, f"{likely}. The reference loads one: an optimizer that is made after that has none"
            return Whose.SCRIPT if is_made_again else Whose.EITHER, likely
        likely = "a state was loaded into it, and its count of steps is not the loaded one" if is_loaded else ""
        return self.whose, likely

    def _why_update(self, kind: str, step: TrainingStep, expected: TrainingStep, names: list[str]) -> str:
        if kind != "parameter":
            return ""
        zero = gradients.why_zero(step, expected, names)
        if zero:
            return zero
        before = _before(self.run, step), _before(self.reference, expected)
        factors = []
        for name in names[:8]:
            moved, wanted = (
                _change(each.get(name), after.parameters.values[name])
                for each, after in zip(before, (step, expected), strict=True)
            )
            if moved is None or wanted is None:
                return ""
            square = inner_product(wanted, wanted)
            factor = inner_product(moved, wanted) / square if square else 0.0
            rest = norm_of([a - factor * b for a, b in zip(moved, wanted, strict=True)])
            if rest > EXPLAINED * math.sqrt(square):
                # A part of the tensor has another update.
                return ""
            factors.append(factor)
        if all(abs(factor) < 1e-6 for factor in factors):
            return "the parameters were not updated"
        are_same = max(factors) - min(factors) < 0.02 * abs(factors[0])
        if are_same and all(abs(factor - 1) > _SAME_UPDATE for factor in factors):
            return f"the update is {factors[0]:.4g} times the expected one"
        return ""


def _before(run: Run, step: TrainingStep) -> Mapping[str, Whole]:
    return run.steps[step.number - 1].parameters.values if step.number else step.initial_values.values


def _change(before: Whole | None, after: Whole) -> list[float] | None:
    return None if before is None else [b - a for a, b in zip(before.numbers, after.numbers, strict=True)]
