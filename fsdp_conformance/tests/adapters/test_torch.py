"""The adapters of torch's own engines train as a plain loop does, and say truly what they offer."""

from __future__ import annotations

import unittest
from functools import partial
from typing import Any

import pytest
import torch
from torch import nn

from fsdp_conformance.adapters import registry
from fsdp_conformance.adapters.base import Adapter
from fsdp_conformance.adapters.vendors.torch_fsdp1 import default_replicas
from fsdp_conformance.adapters.vendors.torch_fsdp2 import TorchFSDP2, reshard_after_forward, reshard_option
from fsdp_conformance.driver.task import Observer
from fsdp_conformance.errors import AdapterError, ConfigError, Unsupported
from fsdp_conformance.history.collective import Op
from fsdp_conformance.plan import BackwardPrefetch, InitMode, Offload, Plan, Sharding
from fsdp_conformance.tests.adapters.adapter_ranks import RankTestCase
from fsdp_conformance.tests.adapters.adapter_workloads import PLAIN, RICH
from fsdp_conformance.tests.torch_versions import with_fsdp2_on_the_cpu
from fsdp_conformance.workload.definition import Regime

ENGINES = (
    "torch-ddp",
    "torch-fsdp1",
    "torch-fsdp1-hybrid-shard",
    "torch-fsdp1-no-shard",
    "torch-fsdp1-shard-grad-op",
    "torch-fsdp2",
)
#: Engines whose flat parameters give an unused parameter a gradient of zeros.
FLAT = tuple(name for name in ENGINES if "fsdp1" in name)


class Parity(RankTestCase):
    """Losses, gradients and parameters of every step are those of a plain loop."""

    case_timeout_s = 120.0

    @pytest.mark.nightly
    @pytest.mark.slow
    def test_sgd_and_adam(self) -> None:
        """Every engine, with SGD and momentum and with Adam."""
        for name in ENGINES:
            for optimizer in ("sgd", "adam"):
                self.assert_trains(name, regime=Regime(optimizer=optimizer))

    @pytest.mark.nightly
    @pytest.mark.slow
    @with_fsdp2_on_the_cpu
    def test_traps(self) -> None:
        """A tied weight, a frozen layer, a unit called twice, and an unused parameter."""
        for name in ENGINES:
            divergences = self.divergences(self.run_training(name, RICH), RICH)
            zeros = [line for line in divergences if "unused" in line and "expected None, got a tensor" in line]
            self.assertEqual(len(zeros), 6 if name in FLAT else 0, name)
            self.assertEqual([], [line for line in divergences if line not in zeros], name)

    @pytest.mark.nightly
    @pytest.mark.slow
    @with_fsdp2_on_the_cpu
    def test_checkpoints_of_parameters_without_state(self) -> None:
        """They load, and such parameters are without state again; also from a state dict."""
        for name in ("torch-ddp", "torch-fsdp2", "reference"):
            adapter = registry.load(name)()
            self.run_training(adapter, RICH)
            state, saved = adapter.full_optim_state(), adapter.optim_state_dict()
            self.assertNotIn("unused.weight", state)
            directory = self.shared_directory() / name
            adapter.save_checkpoint(directory)
            for load in (
                partial(adapter.load_checkpoint, directory),
                partial(adapter.load_optim_state_dict, saved),
            ):
                load()
                self.assertEqual(state, adapter.full_optim_state(), name)

    @pytest.mark.nightly
    @pytest.mark.slow
    def test_micro_batches(self) -> None:
        """Micro-batches add up, reduced each, deferred, and in between."""
        for name in ENGINES:
            for reduced in ((True, True, True), (False, False, True), (False, True, True)):
                self.assert_trains(name, regime=Regime(steps=2, micro_batches=3, reduced=reduced))

    @pytest.mark.nightly
    @pytest.mark.slow
    def test_clipping(self) -> None:
        """The total norm, by the 2-norm and by another one, and what follows from it."""
        for name in ENGINES:
            for norm_type in (2.0, 1.0):
                history = self.assert_trains(name, regime=Regime(max_norm=0.1, norm_type=norm_type))
                self.assertIsNotNone(history.steps[0].grad_norm, name)

    @pytest.mark.nightly
    @pytest.mark.slow
    def test_loss_scaling(self) -> None:
        """Scaling by powers of two changes nothing; the scale grows after every second step, clipped or not."""
        for name in ENGINES:
            for max_norm in (None, 0.1):
                plain = self.run_training(name, regime=Regime(max_norm=max_norm))
                regime = Regime(max_norm=max_norm, init_scale=4.0, growth_interval=2)
                scaled = self.run_training(name, regime=regime)
                for got, expected in zip(scaled.steps, plain.steps, strict=True):
                    torch.testing.assert_close(got.params, expected.params)
                scales = [float(record.loss_scale) for record in scaled.steps if record.loss_scale is not None]
                self.assertEqual([4.0, 8.0, 8.0], scales, name)

    @pytest.mark.nightly
    @pytest.mark.slow
    def test_options_that_are_declared(self) -> None:
        """Each declared option of the plan is taken, and leaves the numbers alone."""
        option_sets: tuple[dict[str, Any], ...] = (
            {"sharding": Sharding.FULL},
            {"sharding": Sharding.GRAD_OPTIM},
            {"sharding": Sharding.NONE},
            {"sharding": Sharding.HYBRID},
            {"reshard_after_forward": True},
            {"reshard_after_forward": False},
            {"forward_prefetch": True},
            {"backward_prefetch": BackwardPrefetch.NONE},
            {"backward_prefetch": BackwardPrefetch.PRE},
            {"backward_prefetch": BackwardPrefetch.POST},
            {"init_mode": InitMode.BEFORE},
            {"init_mode": InitMode.AFTER},
            {"device_id": "cpu"},
            {"units": ("body.0+body.2",)},
        )
        taken = 0
        for name in ENGINES:
            declared = registry.load(name).declared()
            for options in option_sets:
                if Plan(**options).capabilities() <= declared:
                    self.assert_trains(name, **options)
                    taken += 1
        # On the CPU init modes need no flag.
        self.assertEqual(taken, 50)

    @pytest.mark.nightly
    @pytest.mark.slow
    def test_auto_wrap(self) -> None:
        """FSDP1's policies make units: one gather for each, and one for what the root keeps."""
        for policy, units in (("size:40", 3), ("class:Linear", 4)):
            history = self.assert_trains("torch-fsdp1", auto_wrap=policy)
            gathers = [record for record in history.collectives if record.op is Op.ALL_GATHER and record.step == 1]
            self.assertEqual(units, len([record for record in gathers if record.phase == "forward"]), policy)

    @pytest.mark.nightly
    @pytest.mark.slow
    def test_written_parameters_are_trained(self) -> None:
        """Values that are written after the wrap are where training starts."""
        for name in ENGINES:
            values = {key: value.detach() * 0.5 for key, value in PLAIN.build(0).named_parameters()}
            history = self.run_training(name, observer=Observer(on_setup=partial(_write, values=values)))
            for key, value in values.items():
                torch.testing.assert_close(history.initial_params[key], value, rtol=0, atol=0)

    @pytest.mark.nightly
    @pytest.mark.slow
    def test_optimizer_state_in_full(self) -> None:
        """Momentum comes back in full, under original names, and is the same for every engine."""
        expected: dict[str, torch.Tensor] = {}
        for name in ENGINES:
            adapter = registry.load(name)()
            self.run_training(adapter)
            state = adapter.full_optim_state()
            got = {key: entries["momentum_buffer"] for key, entries in state.items()}
            expected = expected or got
            self.assertEqual(sorted(expected), sorted(got), name)
            for key, value in expected.items():
                torch.testing.assert_close(got[key], value, rtol=1e-4, atol=1e-6, msg=f"{name} {key}")

    @pytest.mark.nightly
    @pytest.mark.slow
    def test_freezing_between_steps(self) -> None:
        """A parameter that is frozen for a step has no gradient in it and keeps its value."""
        for name in ENGINES:
            regime = Regime(steps=3, frozen_at=((1, ("body.0.weight", "body.0.bias")), (2, ())))
            history = self.run_training(name, regime=regime)
            first, frozen, thawed = (record.params["body.0.weight"] for record in history.steps)
            self.assertIsNone((history.steps[1].grads or {})["body.0.weight"], name)
            self.assertTrue(torch.equal(first, frozen), msg=name)
            self.assertFalse(torch.equal(frozen, thawed), msg=name)

    @pytest.mark.nightly
    @pytest.mark.slow
    @with_fsdp2_on_the_cpu
    def test_units_on_a_group_of_their_own_and_ignored_modules(self) -> None:
        """Gradients of local units and of ignored modules are this rank's own; the others' are means."""
        for name in ("torch-fsdp1", "torch-fsdp1-hybrid-shard", "torch-fsdp2"):
            own: tuple[dict[str, Any], ...] = (
                {"units": ("body.0", "body.2"), "local_units": ("body.2",)},
                {"units": ("body.0",), "ignored": ("body.2",)},
            )
            for options in own:
                divergences = self.divergences(
                    self.run_training(name, regime=Regime(steps=1), **options), regime=Regime(steps=1)
                )
                kinds = {line.split(":")[0] for line in divergences}
                self.assertEqual(
                    {f"step 0 {what} body.2.{key}" for what in ("gradient", "parameter") for key in ("weight", "bias")},
                    kinds,
                    f"{name} {options}",
                )


def _write(adapter: Adapter, values: dict[str, torch.Tensor]) -> None:
    adapter.write_params(values)


class Refusals(RankTestCase):
    """Flags that are not declared or not available here are refused with a reason."""

    def test_undeclared_options(self) -> None:
        """A plan with undeclared flags is refused before anything is built, naming all of them."""
        adapter = TorchFSDP2()
        with self.assertRaisesRegex(
            Unsupported, "needs sync_module_states, zero1, but torch-fsdp2 does not declare them"
        ):
            adapter.setup(self.fail, self.fail, Plan(sharding=Sharding.OPTIM, sync_module_states=True))

    @pytest.mark.slow
    @with_fsdp2_on_the_cpu
    def test_the_engines_own_words(self) -> None:
        """Options that torch offers only on accelerators are refused by torch itself, and the adapter quotes it."""
        # A build for CUDA asks for a driver, where a build for the CPU asks for an accelerator.
        no_device = "cpu_offload_params .* RuntimeError: .*(accelerator|NVIDIA driver)"
        refused: tuple[tuple[str, dict[str, Any], str], ...] = (
            ("torch-fsdp1", {"sync_module_states": True}, "sync_module_states .* ValueError: .*CPU parameters"),
            ("torch-fsdp1", {"offload": Offload.CPU}, no_device),
            ("torch-fsdp2", {"offload": Offload.CPU_PINNED}, no_device),
        )
        for name, options, words in refused:
            with self.assertRaisesRegex(Unsupported, words):
                self.run_training(name, **options)
        self.assert_trains("torch-fsdp2", offload=Offload.CPU)

    def test_mistakes(self) -> None:
        """Replica groups that do not divide the world, and units that do not exist."""
        for name in ("torch-fsdp1", "torch-fsdp2"):
            with self.assertRaisesRegex(ConfigError, r"replicas must divide the world size 2, got 3"):
                self.run_training(name, sharding=Sharding.HYBRID, replicas=3)
            with self.assertRaisesRegex(AdapterError, "unit 'nowhere', which is not a submodule of Plain"):
                self.run_training(name, units=("nowhere",))

    @pytest.mark.nightly
    def test_an_error_of_another_cause_passes(self) -> None:
        """An error of the engine that is not the known refusal stays what it is."""
        with self.assertRaisesRegex(RuntimeError, "no wrap today") as caught:
            self.run_training(_Failing)
        self.assertNotIsInstance(caught.exception, Unsupported)


class _Failing(TorchFSDP2):
    def _options(self, model: nn.Module, plan: Plan) -> dict[str, Any]:
        raise RuntimeError("no wrap today")


class Placement(RankTestCase):
    """The memory that a rank holds, and when."""

    @pytest.mark.nightly
    @pytest.mark.slow
    def test_bytes_held(self) -> None:
        """Sharding engines hold half of parameters and state on two ranks, the others all of it."""
        for name in ENGINES:
            history = self.run_training(name)
            for kind in ("params", "optim", "grads"):
                share = history.held_bytes[kind] / history.full_bytes[kind]
                expected = 1.0 if name in ("torch-ddp", "torch-fsdp1-no-shard") else 0.5
                self.assertTrue(expected - 0.1 < share < expected + 0.12, msg=f"{name} {kind} {share}")

    @pytest.mark.slow
    def test_units_are_full_in_forward_alone(self) -> None:
        """A unit holds full parameters inside its forward and none after the step."""
        for name in ("torch-fsdp2", "torch-fsdp1"):
            adapter: Any = registry.load(name)()
            seen: list[bool] = []
            self.run_training(adapter, observer=Observer(on_setup=partial(_watch, seen=seen)))
            self.assertEqual([True] * 3, seen, name)
            self.assertEqual([], [unit for unit in ("", *PLAIN.units) if adapter.unit_is_unsharded(unit)], name)

    def test_a_unit_of_several_modules(self) -> None:
        """It is asked for by the names of all of them, as the plan has it."""
        adapter = TorchFSDP2()
        adapter.setup(
            lambda: nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4)),
            partial(torch.optim.SGD, lr=0.1),
            Plan(units=("0+1",)),
        )
        states = [adapter.unit_is_unsharded("0+1")]
        adapter.unshard("0+1")
        states.append(adapter.unit_is_unsharded("0+1"))
        adapter.reshard("0+1")
        states.append(adapter.unit_is_unsharded("0+1"))

        self.assertEqual([False, True, False], states)

    def test_a_wrapped_module_is_refused(self) -> None:
        """FSDP2 refuses a second wrap."""
        with self.assertRaisesRegex(AssertionError, "applied to a module once"):
            self.run_training("torch-fsdp2", observer=Observer(on_setup=lambda adapter: adapter.wrap_again()))

    def test_model_without_parameters(self) -> None:
        """A model with nothing to optimise is not an error."""
        adapter = TorchFSDP2()
        adapter.setup(nn.Identity, self.fail, Plan())
        adapter.step()
        self.assertEqual({}, adapter.full_params())


def _watch(adapter: Any, seen: list[bool]) -> None:
    """Note whether body.0 is full whenever it runs forward."""
    unit: nn.Module = adapter.names.modules["body.0"]
    unit.register_forward_pre_hook(lambda module, args: seen.append(adapter.unit_is_unsharded("body.0")))


class Single(RankTestCase):
    """One rank."""

    @property
    def world_size(self) -> int:
        return 1

    @pytest.mark.slow
    @with_fsdp2_on_the_cpu
    def test_no_collectives(self) -> None:
        """FSDP2 is silent at world size 1, as it declares; others are not, and do not."""
        for name in ENGINES:
            history = self.assert_trains(name)
            self.assertEqual("ws1_fast" in registry.load(name).declared(), history.collectives == [], name)


class Four(RankTestCase):
    """Four ranks."""

    @property
    def world_size(self) -> int:
        return 4

    @pytest.mark.nightly
    @pytest.mark.slow
    def test_hybrid_and_smaller_groups(self) -> None:
        """Hybrid sharding reduces over all ranks; resharding to a group of two gathers within it in backward."""
        for name in ("torch-fsdp1", "torch-fsdp2"):
            history = self.assert_trains(name, sharding=Sharding.HYBRID, replicas=2)
            self.assertEqual({2}, {len(record.group) for record in history.collectives if record.step == 1}, name)
        history = self.assert_trains("torch-fsdp2", reshard_after_forward=2)
        gathers = [record for record in history.collectives if record.op is Op.ALL_GATHER and record.step == 1]
        self.assertEqual({4}, {len(record.group) for record in gathers if record.phase == "forward"})
        self.assertEqual({2}, {len(record.group) for record in gathers if record.phase == "backward"})

    def test_tensor_parallel_groups(self) -> None:
        """Groups must divide the world."""
        for name in ("torch-fsdp1", "torch-fsdp2"):
            with self.assertRaisesRegex(ConfigError, "tensor_parallel must divide the world size 4, got 3"):
                self.run_training(name, tensor_parallel=3, tensor_styles=(("head", "column"),))


class Declarations(unittest.TestCase):
    """Declarations that follow from the plan, without ranks."""

    def test_reshard_after_forward(self) -> None:
        """The plan's own word comes first, then the degree; otherwise FSDP2's default."""
        self.assertIsNone(reshard_after_forward(Plan()))
        self.assertIs(reshard_after_forward(Plan(sharding=Sharding.FULL)), True)
        self.assertIs(reshard_after_forward(Plan(sharding=Sharding.GRAD_OPTIM)), False)
        self.assertIsNone(reshard_after_forward(Plan(sharding=Sharding.HYBRID)))
        self.assertEqual(2, reshard_after_forward(Plan(sharding=Sharding.FULL, reshard_after_forward=2)))

    def test_no_reshard_after_forward_is_no_argument(self) -> None:
        """torch 2.6 and 2.7 refuse None, which is the default since."""
        self.assertEqual({}, reshard_option(Plan()))
        self.assertEqual({"reshard_after_forward": False}, reshard_option(Plan(sharding=Sharding.GRAD_OPTIM)))

    def test_default_replicas(self) -> None:
        """Two replica groups where shard groups of two remain."""
        self.assertEqual([1, 1, 1, 2, 1, 2], [default_replicas(size) for size in range(1, 7)])

    def test_a_variant_declares_its_degree_alone(self) -> None:
        """The variants of FSDP1 are the same engine with another default."""
        degrees = {"zero3", "zero2", "zero1", "no_shard", "hsdp"}
        for name, degree in (
            ("torch-fsdp1-shard-grad-op", "zero2"),
            ("torch-fsdp1-no-shard", "no_shard"),
            ("torch-fsdp1-hybrid-shard", "hsdp"),
        ):
            self.assertEqual({degree}, degrees & registry.load(name).declared(), name)
