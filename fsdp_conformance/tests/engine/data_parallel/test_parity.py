"""Training with DataParallel is bitwise equal to training with DistributedDataParallel, under every option."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import nn

from fsdp_conformance.adapters.vendors.reference_data_parallel import ReferenceDataParallel
from fsdp_conformance.driver import session
from fsdp_conformance.driver.task import World
from fsdp_conformance.engine.data_parallel.data_parallel import DataParallel
from fsdp_conformance.fixtures.registry import workload_by_name, workload_names
from fsdp_conformance.harness.context import log
from fsdp_conformance.history.training import TrainingHistory
from fsdp_conformance.plan import Plan
from fsdp_conformance.references.all_reduce import all_reduce_reference
from fsdp_conformance.references.ddp import ddp_absence, ddp_reference
from fsdp_conformance.tests.engine.data_parallel.reducer_ranks import ReducerTestCase
from fsdp_conformance.workload.definition import Regime, Workload

#: Options of the wrapper under which everything must stay the same.
OPTIONS: tuple[dict[str, Any], ...] = (
    {},
    {"gradient_as_bucket_view": True},
    {"bucket_cap_mb": 0.0},
    {"bucket_cap_mb": (0.0001, 0.001)},
)


class _WithoutSearch(ReferenceDataParallel):
    """A model wrapped without the search for unused parameters."""

    def wrap(self, model: nn.Module, plan: Plan) -> nn.Module:
        return DataParallel(model, broadcast_buffers=False, **plan.extra)


class ParityTestCase(ReducerTestCase):
    """Trains workloads with the engine and with torch's DistributedDataParallel, and compares the results."""

    case_timeout_s = 240.0

    def engine_run(
        self, workload: Workload, regime: Regime, options: dict[str, Any], *, search: bool = True
    ) -> TrainingHistory:
        adapter = ReferenceDataParallel() if search else _WithoutSearch()
        plan = session.plan_for(workload, regime, Plan(extra=options))
        history = session.train(adapter, workload, plan, regime, World(rank=self.rank, size=self.world_size))
        adapter.close()
        return history

    def reference_run(self, workload: Workload, regime: Regime) -> TrainingHistory:
        """DistributedDataParallel, or explicit all-reduces where it cannot serve as a reference."""
        reference = all_reduce_reference if ddp_absence(workload, regime) else ddp_reference
        return reference(workload, regime, rank=self.rank, world_size=self.world_size)

    def assert_bitwise(
        self, workload: Workload, regime: Regime | None = None, options: Sequence[dict[str, Any]] = OPTIONS
    ) -> None:
        """Losses, gradients, parameters and buffers of every step equal the reference's."""
        regime = regime or Regime()
        expected = self.reference_run(workload, regime)
        for option in options:
            actual = self.engine_run(workload, regime, option)
            self.assertEqual(expected.requires_grad, actual.requires_grad)
            compared = 0
            for mine, theirs in zip(actual.steps, expected.steps, strict=True):
                place = f"{workload.name} {option} {regime} step {mine.step}"
                for what, got, tensors in (
                    ("loss", dict(enumerate(mine.losses)), dict(enumerate(theirs.losses))),
                    ("gradient", mine.grads or {}, theirs.grads or {}),
                    ("parameter", mine.params, theirs.params),
                    ("buffer", mine.buffers, theirs.buffers),
                ):
                    self.assertEqual(tensors.keys(), got.keys(), f"{place} {what}")
                    for name, tensor in tensors.items():
                        other = got[name]  # type: ignore[index]
                        compared += 1
                        if tensor is None or other is None:
                            self.assertIs(tensor, other, f"{place} {what} {name}")
                        else:
                            self.assertTrue(torch.equal(tensor, other), msg=f"{place} {what} {name} differs")
            self.assertGreaterEqual(compared, 3)


def exact_workloads() -> list[Workload]:
    """The exact probes."""
    return [workload for workload in map(workload_by_name, workload_names()) if workload.exact]


class TwoRanks(ParityTestCase):
    """Sums of two commute: every workload is bitwise, exact or not."""

    @pytest.mark.nightly
    @pytest.mark.slow
    def test_every_workload(self) -> None:
        """Models of the field and exact probes, all options for the probes."""
        self.assertGreater(len(workload_names()), 30)
        for name in workload_names():
            workload = workload_by_name(name)
            self.assert_bitwise(workload, options=OPTIONS if workload.exact else OPTIONS[:2])

    @pytest.mark.nightly
    @pytest.mark.slow
    def test_accumulation(self) -> None:
        """Micro-batches: each reduced, deferred, and interleaved."""
        workload = workload_by_name("exact-accumulation")
        for reduced in ((True, True, True), (False, False, True), (False, True, True), (True, False, True)):
            self.assert_bitwise(workload, Regime(micro_batches=3, reduced=reduced))
        for name in ("transformer", "exact-unused", "exact-divergent"):
            regime = Regime(micro_batches=2, reduced=(False, True), unused_parameters=True)
            self.assert_bitwise(workload_by_name(name), regime)

    @pytest.mark.nightly
    @pytest.mark.slow
    def test_other_regimes(self) -> None:
        """Adam, clipping, evaluation, forwards without backward, dropped gradients, freezing, two backwards."""
        frozen = ((1, ("stages.0.linear.weight", "stages.1.linear.bias")), (2, ("stages.2.linear.weight",)))
        for regime in (
            Regime(optimizer="adam"),
            Regime(max_norm=0.1),
            Regime(eval_before=(1, 2), eval_between=(1,)),
            Regime(idle_forwards=2),
            Regime(gradient_to_none=("stages.1.linear.weight",)),
            Regime(frozen_at=frozen, unused_parameters=True),
            Regime(frozen_at=frozen, micro_batches=2, reduced=(False, True), unused_parameters=True),
            Regime(backwards_per_forward=2),
        ):
            self.assert_bitwise(workload_by_name("exact-long"), regime, OPTIONS[:2])

    @pytest.mark.nightly
    @pytest.mark.slow
    def test_without_the_search_for_unused_parameters(self) -> None:
        """Parity holds with rebuilt buckets, too, which change after the first step."""
        for name in ("exact-nested", "exact-tied", "exact-multi-forward", "transformer"):
            workload = workload_by_name(name)
            expected = self.reference_run(workload, Regime())
            for option in ({"bucket_cap_mb": 0.0001}, {"static_graph": True}, {"gradient_as_bucket_view": True}):
                actual = self.engine_run(workload, Regime(), option, search=False)
                for mine, theirs in zip(actual.steps, expected.steps, strict=True):
                    for parameter, value in theirs.params.items():
                        self.assertTrue(torch.equal(value, mine.params[parameter]), msg=f"{name} {option} {parameter}")


class OneRank(ParityTestCase):
    """A world of one is plain training, and nothing is communicated."""

    @property
    def world_size(self) -> int:
        return 1

    @pytest.mark.nightly
    @pytest.mark.slow
    def test_exact_probes(self) -> None:
        """Bitwise, without a collective."""
        for workload in exact_workloads():
            self.assert_bitwise(workload, options=OPTIONS[:2])
        begin = self.mark()
        self.engine_run(workload_by_name("exact-nested"), Regime(), {})
        self.assertEqual([], log().records[begin:])


@pytest.mark.slow
class ThreeRanks(ParityTestCase):
    """Tests with three ranks."""

    @property
    def world_size(self) -> int:
        return 3

    @pytest.mark.slow
    @pytest.mark.nightly
    def test_exact_probes(self) -> None:
        """Exact probes are bitwise equal with every option."""
        for workload in exact_workloads():
            self.assert_bitwise(workload)
        self.assert_bitwise(
            workload_by_name("exact-accumulation"), Regime(micro_batches=3, reduced=(False, False, True)), OPTIONS[:2]
        )


@pytest.mark.slow
class FourRanks(ParityTestCase):
    """Ring and tree sums differ here, but not for exact values."""

    @property
    def world_size(self) -> int:
        return 4

    @pytest.mark.nightly
    def test_exact_probes(self) -> None:
        """Exact probes are bitwise equal."""
        for workload in exact_workloads():
            self.assert_bitwise(workload, options=OPTIONS[:2])
