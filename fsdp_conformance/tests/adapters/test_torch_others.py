"""torch's ZeroRedundancyOptimizer and its composable `replicate` train as a plain loop does, and say what they hold."""

from __future__ import annotations

import pytest

from fsdp_conformance.adapters import registry
from fsdp_conformance.errors import Unsupported
from fsdp_conformance.plan import Offload, Sharding
from fsdp_conformance.tests.adapters.adapter_ranks import RankTestCase
from fsdp_conformance.tests.adapters.adapter_workloads import RICH
from fsdp_conformance.workload.definition import Regime

pytestmark = pytest.mark.slow

ENGINES = ("torch-zero1", "torch-replicate")


def test_neither_declares_to_shard_parameters() -> None:
    """ZeRO-1 shards the optimizer's state, `replicate` nothing."""
    degrees = {"zero1", "zero2", "zero3", "no_shard", "hsdp"}

    assert [degrees & registry.load(name).declared() for name in ENGINES] == [{"zero1"}, {"no_shard"}]
    assert "full_optim_state" not in registry.load("torch-zero1").declared()


class Parity(RankTestCase):
    """On two ranks."""

    case_timeout_s = 120.0

    @pytest.mark.nightly
    def test_training(self) -> None:
        """Training agrees with SGD and Adam, with clipping, and with micro-batches that are reduced later."""
        for name in ENGINES:
            for regime in (
                Regime(),
                Regime(optimizer="adam"),
                Regime(max_norm=0.1),
                Regime(micro_batches=3, reduced=(False, True, True)),
            ):
                self.assert_trains(name, regime=regime)

    @pytest.mark.nightly
    def test_traps(self) -> None:
        """A tied weight, a frozen layer, a unit called twice, and an unused parameter."""
        for name in ENGINES:
            self.assertEqual([], self.divergences(self.run_training(name, RICH), RICH), name)

    @pytest.mark.nightly
    def test_what_is_held(self) -> None:
        """ZeRO-1 holds half of the state, more or less: each parameter is one rank's."""
        for name, least, most in (("torch-zero1", 0.2, 0.8), ("torch-replicate", 1.0, 1.0)):
            history = self.run_training(name)
            self.assertEqual(history.held_bytes["params"], history.full_bytes["params"], name)
            share = history.held_bytes["optim"] / history.full_bytes["optim"]
            self.assertTrue(least <= share <= most, f"{name} {share}")

    @pytest.mark.nightly
    def test_refusals(self) -> None:
        """Operations that need sharding are refused, because these engines do not shard."""
        for name in ENGINES:
            with self.assertRaisesRegex(Unsupported, "zero3"):
                self.run_training(name, sharding=Sharding.FULL)
            with self.assertRaisesRegex(Unsupported, "cpu_offload_params"):
                self.run_training(name, offload=Offload.CPU)
