"""DeepSpeed's three stages train as a plain loop does, through an adapter that owns neither backward nor step."""

from __future__ import annotations

import importlib.util
from functools import partial

import pytest
import torch

from fsdp_conformance.adapters import registry
from fsdp_conformance.adapters.base import Adapter
from fsdp_conformance.adapters.vendors.deepspeed_zero import DeepSpeedZeRO1, DeepSpeedZeRO2, DeepSpeedZeRO3
from fsdp_conformance.driver.smoke import CHECKS, smoke
from fsdp_conformance.driver.task import Observer
from fsdp_conformance.errors import AdapterNotFound, Unsupported
from fsdp_conformance.fixtures import optimizers
from fsdp_conformance.plan import Offload, Plan, Sharding
from fsdp_conformance.tests.adapters.adapter_ranks import RankTestCase
from fsdp_conformance.tests.adapters.adapter_workloads import PLAIN, RICH
from fsdp_conformance.workload.definition import Regime
from fsdp_conformance.workload.events import Action, Event, Moment

STAGES = ("deepspeed-zero1", "deepspeed-zero2", "deepspeed-zero3")

installed = importlib.util.find_spec("deepspeed") is not None
needs_deepspeed = pytest.mark.skipif(not installed, reason="deepspeed is an extra with a separate environment")


def test_the_stages_declare_their_degree_alone() -> None:
    """Known without the engine."""
    degrees = {"zero1", "zero2", "zero3", "no_shard", "hsdp"}

    assert [degrees & registry.load(name).declared() for name in STAGES] == [{"zero1"}, {"zero2"}, {"zero3"}]
    assert "pipelined_microbatch" in DeepSpeedZeRO1.declared() - DeepSpeedZeRO3.declared()


@pytest.mark.skipif(installed, reason="deepspeed is installed")
def test_without_the_engine() -> None:
    """The adapter is there, its engine is not: what to install."""
    with pytest.raises(AdapterNotFound, match=r"the engine of 'deepspeed-zero3' cannot be imported: .*Install it in "):
        registry.describe_here("deepspeed-zero3")


def test_buckets_are_small_and_streams_are_used_on_an_accelerator_only() -> None:
    """DeepSpeed allocates a bucket whole, and on the CPU there is nothing to overlap with."""
    on_cpu, on_sim = (DeepSpeedZeRO2().config(Plan(device=device))["zero_optimization"] for device in ("cpu", "sim"))

    assert (on_cpu["overlap_comm"], on_sim["overlap_comm"]) == (False, True)
    assert all(settings["reduce_bucket_size"] < 10**4 for settings in (on_cpu, on_sim))


@needs_deepspeed
@pytest.mark.parametrize("device", ["cpu", "sim"])
@pytest.mark.parametrize("name", STAGES)
def test_smoke(name: str, device: str) -> None:
    """The adapter keeps to the protocol, also where the device is called cuda."""
    results = smoke(name, device=device, timeout_s=120)

    assert [(result.problems, result.not_run) for result in results] == [((), "")] * len(CHECKS)


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
        """Training agrees with SGD and Adam, with clipping, with micro-batches, and with two losses of one forward."""
        for name in STAGES:
            for regime in (
                Regime(),
                Regime(optimizer="adam"),
                Regime(max_norm=0.1),
                Regime(micro_batches=3),
                Regime(micro_batches=3, reduced=(False, True, True)),
                Regime(eval_before=(1,), eval_between=(1,), idle_forwards=1),
            ):
                self.assert_trains(name, regime=regime)
        self.assert_trains("deepspeed-zero1", regime=Regime(backwards_per_forward=2))
        self.assert_trains("deepspeed-zero3", offload=Offload.CPU)

    def test_traps(self) -> None:
        """A tied weight, a frozen layer, a unit called twice; unused parameters get zeros."""
        for name in STAGES:
            divergences = self.divergences(self.run_training(name, RICH), RICH)
            self.assertEqual([], [line for line in divergences if "unused" not in line], name)

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
            history = self.run_training(adapter, observer=Observer(on_setup=partial(_write, values=values)))
            for key, value in values.items():
                torch.testing.assert_close(history.initial_params[key], value, rtol=0, atol=0, msg=f"{name} {key}")
            state = adapter.full_optim_state()
            self.assertEqual(
                {key: value.shape for key, value in values.items()},
                {key: entries["momentum_buffer"].shape for key, entries in state.items()},
                name,
            )

    def test_checkpoints_and_state_dicts(self) -> None:
        """A second model with other values, once loaded, has exactly what the first one saved or returned."""
        directory = self.shared_directory()
        for name in STAGES:
            saved = registry.load(name)()
            self.run_training(saved)
            expected, state = saved.full_params(), saved.full_state_dict()
            saved.save_checkpoint(directory / name)
            alone = saved.full_state_dict(rank0_only=True)
            self.assertEqual(list(alone), [] if self.rank else list(state), name)
            for load in (
                lambda adapter, name=name: adapter.load_checkpoint(directory / name),
                lambda adapter, state=state: adapter.load_full_state_dict(state),
            ):
                loaded = registry.load(name)()
                values = self.run_training(loaded, observer=Observer(on_setup=load)).initial_params
                for key, value in expected.items():
                    torch.testing.assert_close(values[key], value, rtol=0, atol=0, msg=f"{name} {key}")
            with self.assertRaisesRegex(RuntimeError, "Missing key"):
                loaded.load_full_state_dict({})
        with self.assertRaisesRegex(FileNotFoundError, "no checkpoint to load in .*nowhere"):
            loaded.load_checkpoint(directory / "nowhere")

    def test_between_steps(self) -> None:
        """A learning rate of zero changes nothing, and a skipped step leaves nothing in the next one's gradients."""
        still = Event(action=Action.LEARNING_RATE, moment=Moment.STEP, step=0, value=0.0)
        skipped = Event(action=Action.SKIP, moment=Moment.OPTIMIZER, step=0)
        for name in STAGES:
            runs = [self.run_training(name, regime=Regime(steps=2, events=(event,))) for event in (still, skipped)]
            for run in runs:
                for key, value in run.initial_params.items():
                    torch.testing.assert_close(run.steps[0].params[key], value, rtol=0, atol=0, msg=f"{name} {key}")
            without, after = (run.steps[1].grads for run in runs)
            assert without, "the adapter shows gradients"
            assert after, "the adapter shows gradients"
            for key, grad in without.items():
                torch.testing.assert_close(after[key], grad, msg=f"{name} {key}")

    def test_full_parameters_in_a_context(self) -> None:
        """Stage 3 shows a unit's parameters, and shards them again when the context is left."""
        adapter = DeepSpeedZeRO3()
        self.run_training(adapter)
        full = adapter.full_params()
        unit = adapter.plan.units[0]
        with adapter.full_params_context(unit):
            shown = {key: value.detach().clone() for key, value in adapter.parameters().items() if value.numel()}
            self.assertEqual([True, False], [adapter.unit_is_unsharded(each) for each in (unit, adapter.plan.units[1])])
        self.assertEqual({key for key in full if key.startswith(f"{unit}.")}, shown.keys())
        for key, value in shown.items():
            torch.testing.assert_close(value, full[key], rtol=0, atol=0)
        self.assertFalse(adapter.unit_is_unsharded(unit))
        with adapter.full_params_context(unit, writeback=True), torch.no_grad():
            for key in shown:
                adapter.parameters()[key].fill_(0.5)
        self.assertEqual({0.5}, set(adapter.full_params()[next(iter(shown))].flatten().tolist()))

    def test_an_optimizer_for_whole_matrices_is_refused(self) -> None:
        """DeepSpeed refuses it unless it is explicitly allowed."""
        workload = optimizers.stepped_by(PLAIN, "adafactor", optimizers.WHOLE_MATRIX["adafactor"])
        with self.assertRaisesRegex(Exception, "untested ZeRO Optimizer"):
            self.run_training("deepspeed-zero1", workload, Regime(optimizer="adafactor"))

    def test_refusals(self) -> None:
        """Undeclared flags, another device, and clipping that was not configured are refused."""
        with self.assertRaisesRegex(Unsupported, "zero1, but deepspeed-zero2 does not declare it"):
            DeepSpeedZeRO2().setup(self.fail, self.fail, Plan(sharding=Sharding.OPTIM))
        with self.assertRaisesRegex(Unsupported, "on the simulated accelerator, not on cuda"):
            DeepSpeedZeRO1().setup(self.fail, self.fail, Plan(device="cuda"))
        adapter = DeepSpeedZeRO1()
        self.run_training(adapter)
        with self.assertRaisesRegex(Unsupported, "max_norm must be None as at construction, got 2.0"):
            adapter.step(max_norm=2.0)
