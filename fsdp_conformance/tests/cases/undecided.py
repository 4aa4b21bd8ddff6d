"""A case whose referee fails while its ranks wait for a decision."""

from __future__ import annotations

from dataclasses import replace

from fsdp_conformance.errors import NotExact
from fsdp_conformance.explore.case import DrawnCase
from fsdp_conformance.harness.deadlines import Deadlines
from fsdp_conformance.scenarios.scenario import Scenario

#: Far longer than any test may take.
_HOURS_S = 7200.0


class Undecided(DrawnCase):
    """No references can judge its scenario."""

    @property
    def deadlines(self) -> Deadlines:
        """A rank would wait for hours for what the referee decides."""
        return replace(super().deadlines, suite_s=_HOURS_S)

    def check_scenario(self, *candidates: Scenario) -> None:
        """The referee raises instead of a decision."""

        def choose() -> str:
            raise NotExact("the mantissa is used up")

        with self.blaming("suite"):
            self.decide("the scenario and the model's numbers", choose)
