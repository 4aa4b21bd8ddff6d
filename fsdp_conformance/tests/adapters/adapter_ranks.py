"""Two ranks with recorded process groups, in which tests of adapters and mutants train."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from fsdp_conformance.adapters import registry
from fsdp_conformance.adapters.base import Adapter
from fsdp_conformance.driver import session
from fsdp_conformance.driver.task import Conditions, Observer, World
from fsdp_conformance.faults.fault import Fault
from fsdp_conformance.history.training import TrainingHistory
from fsdp_conformance.plan import Plan
from fsdp_conformance.tests.adapters.adapter_workloads import PLAIN, Reference, differences
from fsdp_conformance.tests.harness.started_ranks import RecordedRanks
from fsdp_conformance.workload.definition import Regime, Workload


class RankTestCase(RecordedRanks):
    """Every test method runs in two ranks."""

    def run_training(
        self,
        subject: str | type[Adapter] | Adapter,
        workload: Workload = PLAIN,
        regime: Regime | None = None,
        *,
        faults: Sequence[Fault] = (),
        observer: Observer | None = None,
        **plan: Any,
    ) -> TrainingHistory:
        """Train; `plan` are fields of the plan, of which the workload gives the rest."""
        regime = regime or Regime()
        if isinstance(subject, str):
            subject = registry.load(subject)
        return session.train(
            subject() if isinstance(subject, type) else subject,
            workload,
            session.plan_for(workload, regime, Plan(**plan)),
            regime,
            World(rank=self.rank, size=self.world_size),
            observer,
            Conditions(faults=faults),
        )

    def divergences(
        self, history: TrainingHistory, workload: Workload = PLAIN, regime: Regime | None = None
    ) -> list[str]:
        """Where the history is not what a plain loop gives."""
        reference = Reference(workload, regime or Regime(), world_size=self.world_size)
        return differences(history, reference, rank=self.rank)

    def assert_trains(
        self,
        subject: str | type[Adapter] | Adapter,
        workload: Workload = PLAIN,
        regime: Regime | None = None,
        **plan: Any,
    ) -> TrainingHistory:
        """Train, and fail unless losses, gradients and parameters are those of a plain loop."""
        history = self.run_training(subject, workload, regime, **plan)
        divergences = self.divergences(history, workload, regime)
        self.assertFalse(divergences, f"{subject} {regime} {plan}: {divergences[:3]}")
        return history
