"""The tensors of a step against the bounds of rounding, and what a finding says of those that exceed them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from fsdp_conformance.parity.finding import Finding
from fsdp_conformance.parity.noise import TENSORS, Noise, Select
from fsdp_conformance.parity.result import Comparison, Row
from fsdp_conformance.parity.runs import TrainingStep
from fsdp_conformance.parity.words import named_with_ties, number_of_tensors, size_of_difference
from fsdp_conformance.recordings.fingerprint import Whole, relative

#: A tensor that exceeds its bound: its name, its value, the expected one, and the bound.
Exceeded = tuple[str, Whole, Whole, float]


@dataclass(frozen=True)
class Bounds:
    """The bounds of a comparison. What is compared is counted in its rows."""

    comparison: Comparison
    tied: Mapping[str, tuple[str, ...]]
    """The other names of parameters that modules share."""

    @property
    def noise(self) -> Noise:
        """How far rounding takes the reference."""
        return self.comparison.noise

    def exceeded(
        self,
        kind: str,
        number: int,
        values: Mapping[str, Whole],
        others: Mapping[str, Whole],
        select: Select | None = None,
    ) -> list[Exceeded]:
        """
        The tensors that are further from the reference than rounding takes them, in the order of the model.

        `select` gives those of a step for a kind that is not one of TENSORS.
        """
        select = select or TENSORS[kind]
        equal, worst, worst_name, count = 0, 0.0, "", 0
        beyond: list[Exceeded] = []
        for name, wanted in others.items():
            value = values.get(name)
            if value is None:
                continue
            count += 1
            if value.equals(wanted) and value.dtype == wanted.dtype:
                equal += 1
                continue
            if value.dtype != wanted.dtype:
                worst, worst_name = float("inf"), name
                beyond.append((name, value, wanted, 0.0))
                continue
            bound = self.noise.bound(kind, select, number, name)
            distance = relative(value, wanted)
            if bound is None:
                self.comparison.unjudged_tensors += 1
                if self.comparison.unjudged is None:
                    self.comparison.unjudged = number
                continue
            self.comparison.coarsest = max(self.comparison.coarsest, bound)
            if distance / bound > worst:
                worst, worst_name = distance / bound, name
            if distance > bound:
                beyond.append((name, value, wanted, bound))
        self.comparison.rows.append(
            Row(step=number, kind=kind, tensors=count, equal=equal, worst=worst, name=worst_name)
        )
        return beyond

    def finding(
        self,
        title: str,
        step: TrainingStep,
        kind: str,
        beyond: Sequence[Exceeded],
        *,
        total: int,
        evidence: tuple[str, ...] = (),
        **details: Any,
    ) -> Finding:
        """The finding that tensors are beyond their bounds, of `total` of their kind. `details`: other fields of it."""
        name, value, wanted, bound = beyond[0]
        return Finding(
            title=title,
            step=step.number,
            first=f"{self.named(name)} · {size_of_difference(value, wanted, bound)}",
            evidence=(*number_of_tensors(len(beyond), total), *evidence),
            kind=kind,
            tensors=tuple(item[0] for item in beyond),
            **details,
        )

    def named(self, name: str) -> str:
        """A parameter's name, with those of modules that share it."""
        return named_with_ties(name, self.tied)
