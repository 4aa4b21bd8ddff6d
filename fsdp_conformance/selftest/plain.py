"""
The comparison of losses that most projects rely on, on the same engines: what would it have seen?

It trains a small transformer with Adam for three steps in the default configuration, and compares the losses of a rank
with those of the unwrapped model. It belongs to no profile.
"""

from __future__ import annotations

import math

from torch import Tensor

from fsdp_conformance.cases.base import ConformanceTestCase
from fsdp_conformance.cases.declaration import conformance_case
from fsdp_conformance.checks.result import comparison
from fsdp_conformance.contract.case import case_of
from fsdp_conformance.fixtures.transformer import transformer
from fsdp_conformance.outcome.records import CaseRecord
from fsdp_conformance.selftest.cases import BoundCase
from fsdp_conformance.workload.definition import Regime

#: Relative differences of losses that are taken for equal: the usual bound, and a strict one.
USUAL, STRICT = 1e-2, 1e-5

_FIGURE = "loss difference"


class PlainLoss(ConformanceTestCase):
    """Losses alone."""

    @conformance_case("R001", chapter="A", world_size=2)
    def test_plain_loss(self) -> None:
        """The losses of three steps are those of the unwrapped model, within the usual bound."""
        workload, regime = transformer(), Regime(optimizer="adam")
        run = self.train(workload, regime=regime)
        expected = self.plain_history(workload, regime)
        worst = max(
            _relative(got, want)
            for ours, theirs in zip(run.steps, expected.steps, strict=True)
            for got, want in zip(ours.losses, theirs.losses, strict=True)
        )
        self.report.measurements[_FIGURE] = worst
        message = comparison("losses", expected=f"a relative difference of at most {USUAL}", got=f"{worst:.3g}")
        self.expect(worst <= USUAL, "R001", message, check="losses")


def plain_loss() -> BoundCase:
    """The comparison as a case."""
    name = "test_plain_loss"
    case = case_of(getattr(PlainLoss, name))
    assert case is not None, "the method is decorated"
    return BoundCase(case, PlainLoss, name)


def difference(record: CaseRecord) -> float | None:
    """The largest relative difference of a loss on any rank; None if training did not get that far."""
    figure = record.measurements.get(_FIGURE)
    return max(figure.values()) if isinstance(figure, dict) else figure


def _relative(got: Tensor, want: Tensor) -> float:
    distance = float((got.double() - want.double()).abs() / want.double().abs())
    # NaN compares as smaller than anything.
    return math.inf if math.isnan(distance) else distance
