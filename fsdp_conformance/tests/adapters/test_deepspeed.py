"""DeepSpeed's three stages train as a plain loop does, through an adapter that owns neither backward nor step."""

from __future__ import annotations

import importlib.util
from functools import partial

import pytest
import torch

from fsdp_conformance.adapters import registry
from fsdp_conformance.adapters.base import Adapter
from fsdp_conformance.adapters.deepspeed_zero import DeepSpeedZeRO1, DeepSpeedZeRO3
from fsdp_conformance.adapters.smoke import smoke
from fsdp_conformance.config import Offload, Plan
from fsdp_conformance.errors import AdapterNotFound, Unsupported
from fsdp_conformance.tests.adapters.adapter_ranks import RankTestCase
from fsdp_conformance.tests.adapters.adapter_workloads import PLAIN, RICH
from fsdp_conformance.workload import Regime

STAGES = ("deepspeed-zero1", "deepspeed-zero2", "deepspeed-zero3")

installed = importlib.util.find_spec("deepspeed") is not None
needs_deepspeed = pytest.mark.skipif(not installed, reason="deepspeed is an extra with a separate environment")


def test_the_stages_declare_their_degree_alone() -> None:
    """Known without the engine."""
    degrees = {"zero1", "zero2", "zero3", "no_shard", "hsdp"}

    assert [degrees & registry.load(name).declared() for name in STAGES] == [{"zero1"}, {"zero2"}, {"zero3"}]
    assert "no_sync" in DeepSpeedZeRO1.declared() - DeepSpeedZeRO3.declared()


@pytest.mark.skipif(installed, reason="deepspeed is installed")
def test_without_the_engine() -> None:
    """The adapter is there, its engine is not: what to install."""
    with pytest.raises(AdapterNotFound, match=r"the engine of 'deepspeed-zero3' cannot be imported: .*Install it in "):
        registry.describe_here("deepspeed-zero3")


@needs_deepspeed
@pytest.mark.parametrize("name", STAGES)
def test_smoke(name: str) -> None:
    """The adapter keeps to the protocol."""
    assert [(result.problems, result.not_run) for result in smoke(name, timeout_s=120)] == [((), "")] * 6


def _write(adapter: Adapter, values: dict[str, torch.Tensor]) -> None:
    adapter.write_params(values)


@needs_deepspeed
class Stages(RankTestCase):
    """On two ranks."""

    case_timeout_s = 240.0
    preload = DeepSpeedZeRO1.preload

    def setUp(self) -> None:
        self.rank_environment = self.preload_environment = dict(DeepSpeedZeRO1.environment)
        super().setUp()

    def test_parity(self) -> None:
        """With SGD and Adam, with clipping, with micro-batches, and where two losses share one forward."""
        for name in STAGES:
            for regime in (
                Regime(),
                Regime(optimizer="adam"),
                Regime(max_norm=0.1),
                Regime(micro_batches=3),
                Regime(eval_before=(1,), eval_between=(1,), idle_forwards=1),
            ):
                self.assert_trains(name, regime=regime)
        self.assert_trains("deepspeed-zero1", regime=Regime(micro_batches=3, reduced=(False, True, True)))
        self.assert_trains("deepspeed-zero1", regime=Regime(backwards_per_forward=2))
        self.assert_trains("deepspeed-zero3", offload=Offload.CPU)

    def test_traps(self) -> None:
        """A tied weight, a frozen layer, a unit called twice; unused parameters get zeros."""
        for name in STAGES:
            found = self.divergences(self.run_training(name, RICH), RICH)
            self.assertEqual([], [line for line in found if "unused" not in line], name)

    def test_what_is_held(self) -> None:
        """Stage 1 and 2 hold the parameters and half of the state, stage 3 half of both."""
        for name, share in (("deepspeed-zero1", 1.0), ("deepspeed-zero2", 1.0), ("deepspeed-zero3", 0.53)):
            history = self.run_training(name)
            held, full = history.held_bytes, history.full_bytes
            self.assertAlmostEqual(share, held["params"] / full["params"], places=2, msg=name)
            self.assertTrue(0.5 <= held["optim"] / full["optim"] < 0.6, msg=name)

    def test_writing_and_reading(self) -> None:
        """Written values are trained, optimizer state comes back in full."""
        for name in STAGES:
            values = {key: value.detach() * 0.5 for key, value in PLAIN.build(0).named_parameters()}
            adapter = registry.load(name)()
            history = self.run_training(adapter, on_setup=partial(_write, values=values))
            for key, value in values.items():
                torch.testing.assert_close(history.initial_params[key], value, rtol=0, atol=0, msg=f"{name} {key}")
            state = adapter.full_optim_state()
            self.assertEqual(
                {key: value.shape for key, value in values.items()},
                {key: entries["momentum_buffer"].shape for key, entries in state.items()},
                name,
            )

    def test_refusals(self) -> None:
        """What is not declared, another device, and a clipping that was not configured."""
        with self.assertRaisesRegex(Unsupported, "no_sync, but deepspeed-zero2 does not declare it"):
            self.run_training("deepspeed-zero2", regime=Regime(micro_batches=2, reduced=(False, True)))
        with self.assertRaisesRegex(Unsupported, "on the CPU only, not on cuda"):
            DeepSpeedZeRO1().setup(self.fail, self.fail, Plan(device="cuda"))
        adapter = DeepSpeedZeRO1()
        self.run_training(adapter)
        with self.assertRaisesRegex(Unsupported, "max_norm must be None as at construction, got 2.0"):
            adapter.step(max_norm=2.0)
