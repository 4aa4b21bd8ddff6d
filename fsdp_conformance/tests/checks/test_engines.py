"""The communication checks and the sharding witness on real engines: silent on torch's own, loud on the wrong ones."""

from __future__ import annotations

from typing import Any

import pytest

from fsdp_conformance.adapters import registry
from fsdp_conformance.checks import communication, partition
from fsdp_conformance.checks.groups import groups_used
from fsdp_conformance.checks.order import execution_order, steady_schedule
from fsdp_conformance.driver import session
from fsdp_conformance.driver.task import World
from fsdp_conformance.fixtures import experts, frozen, models, probes
from fsdp_conformance.history.training import TrainingHistory
from fsdp_conformance.outcome.records import Finding
from fsdp_conformance.plan import Plan, Sharding
from fsdp_conformance.tests.harness.started_ranks import RecordedRanks
from fsdp_conformance.workload.definition import Regime, Workload

#: Engines are trained at several world sizes.
pytestmark = pytest.mark.slow

PADDING = 0.15


class EngineTestCase(RecordedRanks):
    """Ranks with recorded process groups, and training in one line."""

    def run_training(
        self, spec: str, workload: Workload, regime: Regime | None = None, **plan: Any
    ) -> tuple[TrainingHistory, Plan]:
        regime = regime or Regime()
        full_plan = session.plan_for(workload, regime, Plan(**plan))
        adapter = registry.load(spec)()
        history = session.train(adapter, workload, full_plan, regime, World(rank=self.rank, size=self.world_size))
        return history, full_plan

    def witness(self, history: TrainingHistory, plan: Plan) -> list[Finding]:
        result = partition.sharding_witness(history, plan, world_size=self.world_size, padding=PADDING)
        self.assertGreater(result.count.comparisons, 0)
        return list(result.findings)

    def assert_silent(self, *results: Any) -> None:
        for result in results:
            self.assertEqual("", "\n".join(finding.sentence() for finding in result.findings))
            self.assertGreater(result.count.comparisons, 0)


class TwoRanks(EngineTestCase):
    """FSDP1 and FSDP2 issue what the contract says."""

    @pytest.mark.nightly
    def test_fsdp2(self) -> None:
        """No check reports anything on FSDP2."""
        self._all_checks("torch-fsdp2")

    @pytest.mark.nightly
    def test_fsdp1(self) -> None:
        """No check reports anything on FSDP1, whose all-gathers are of lists on the CPU."""
        self._all_checks("torch-fsdp1")

    def _all_checks(self, spec: str) -> None:
        nested, staircase, wide = probes.exact_nested(), models.staircase(), models.wide_mlp()
        run, plan = self.run_training(spec, nested, sharding=Sharding.FULL)
        self.assert_silent(
            communication.collective_counts(run, nested, plan, requirement="R062"),
            groups_used(run, nested, plan, requirement="R069"),
            steady_schedule(run, requirement="R071"),
        )
        run, plan = self.run_training(spec, nested, sharding=Sharding.GRAD_OPTIM)
        self.assert_silent(communication.collective_counts(run, nested, plan, requirement="R063"))
        run, plan = self.run_training(spec, nested, Regime(eval_before=(1, 2)))
        self.assert_silent(communication.eval_collectives(run, nested, requirement="R066"))
        run, plan = self.run_training(spec, staircase, sharding=Sharding.FULL)
        self.assert_silent(execution_order(run, staircase, plan, requirement="R070"))
        run, plan = self.run_training(spec, wide, sharding=Sharding.FULL)
        self.assert_silent(
            communication.wire_volume(run, wide, plan, world_size=2, padding=PADDING, requirement="R068")
        )
        self.assertEqual([], self.witness(run, plan))

    @pytest.mark.nightly
    def test_special_workloads(self) -> None:
        """Deferred reduction, frozen units and an expert on its own group pass; ignoring the deferral does not."""
        accumulation, mixture, partly = probes.exact_accumulation(), experts.mixture_of_experts(), frozen.frozen_units()
        for spec in ("torch-fsdp2", "torch-fsdp1"):
            regime = Regime(micro_batches=2, reduced=(False, True))
            run, plan = self.run_training(spec, accumulation, regime)
            self.assert_silent(communication.deferred_counts(run, accumulation, plan, requirement="R065"))
            run, plan = self.run_training(spec, mixture)
            self.assert_silent(groups_used(run, mixture, plan, requirement="R069"))
            run, plan = self.run_training(spec, partly)
            self.assert_silent(communication.frozen_reductions(run, partly, plan, requirement="R072"))
        eager, plan = self.run_training("torch-fsdp2", accumulation, Regime(micro_batches=2))
        findings = communication.deferred_counts(eager, accumulation, plan, requirement="R065").findings

        self.assertEqual({1, 2}, {finding.step for finding in findings})
        self.assertEqual(4, len(findings))

    @pytest.mark.nightly
    def test_every_strategy_shows_its_sharding(self) -> None:
        """Uneven layers and padded storages included; a default of any degree passes."""
        for spec in ("torch-fsdp2", "torch-fsdp1", "torch-fsdp1-shard-grad-op"):
            for workload in (models.wide_mlp(), probes.exact_nested(), probes.exact_tiny()):
                self.assertEqual([], self.witness(*self.run_training(spec, workload)), f"{spec} {workload.name}")

    def test_replicated_training_is_refused(self) -> None:
        """DDP and FSDP1's NO_SHARD train at parity and do not shard."""
        for spec in ("torch-ddp", "torch-fsdp1-no-shard"):
            findings = self.witness(*self.run_training(spec, models.wide_mlp()))

            self.assertEqual({"R188"}, {finding.requirement for finding in findings}, spec)
            self.assertIn("got 290400 B; 1.000 of 290400 B", findings[0].message)

    @pytest.mark.nightly
    def test_a_shard_group_of_one_in_fsdp1(self) -> None:
        """FSDP1 reduces over the shard group of one rank instead of the replicas: a defect of torch, and it is seen."""
        nested = probes.exact_nested()
        run, plan = self.run_training("torch-fsdp1", nested, sharding=Sharding.HYBRID, replicas=2)
        findings = groups_used(run, nested, plan, requirement="R069").findings

        self.assertEqual(
            f"ranks of all_reduce: expected [0,1], got [{self.rank}]; 5 of 5 collectives", findings[0].message
        )
        self.assertIn("gradients reduced over the replica group [0,1]: expected all, got none", findings[1].message)


class FourRanks(EngineTestCase):
    """Two replicas of two shards."""

    @property
    def world_size(self) -> int:
        return 4

    @pytest.mark.nightly
    def test_hybrid(self) -> None:
        """Gathers in blocks, all-reduces in strides, half of the bytes on every rank."""
        nested = probes.exact_nested()
        for spec in ("torch-fsdp2", "torch-fsdp1"):
            run, plan = self.run_training(spec, nested, sharding=Sharding.HYBRID, replicas=2)
            self.assert_silent(
                groups_used(run, nested, plan, requirement="R069"),
                communication.collective_counts(run, nested, plan, requirement="R062"),
            )
            self.assertEqual([], self.witness(run, plan))
        self.assertEqual([], self.witness(*self.run_training("torch-fsdp1-hybrid-shard", models.wide_mlp())))
