"""Scripts that were written for torch's FullyShardedDataParallel: its options, its policies, its state dicts."""

from __future__ import annotations

import copy
import functools
import os
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor, nn
from torch.distributed import fsdp
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import save
from torch.distributed.fsdp import wrap
from torch.nn.parallel import DistributedDataParallel

from fsdp_conformance.engine.errors import StructureMismatch
from fsdp_conformance.engine.fully_sharded.wrapper import FullyShardedDataParallel
from fsdp_conformance.engine.sharding_strategy import BackwardPrefetch, CPUOffload, MixedPrecision, ShardingStrategy
from fsdp_conformance.errors import ConfigError, Unsupported
from fsdp_conformance.tests.engine.fully_sharded.checkpoint_ranks import CheckpointTestCase
from fsdp_conformance.tests.engine.fully_sharded.sharded_ranks import (
    WIDTH,
    ShardedTestCase,
    Stage,
    batch,
    chain,
    forward_sum,
)

_BATCH_NORM = nn.modules.batchnorm._BatchNorm


class Attending(nn.Module):
    """A stage, attention, and a list of stages that are called one by one."""

    def __init__(self) -> None:
        super().__init__()
        self.attention = nn.MultiheadAttention(WIDTH, 1)
        self.stages = nn.ModuleList([Stage(), Stage()])

    def forward(self, x: Tensor) -> Tensor:
        x = self.attention(x, x, x)[0]
        for stage in self.stages:
            x = stage(x)
        return x


def units(model: FullyShardedDataParallel) -> list[str]:
    """The names of the units inside."""
    return sorted(unit.name for unit in model.units if unit.name)


class TestOptions(ShardedTestCase):
    """Arguments of the constructor."""

    @pytest.mark.slow
    def test_torchs_classes(self) -> None:
        """Torch's enums and dataclasses mean what the engine's of the same name do."""
        for strategy in fsdp.ShardingStrategy:
            if "HYBRID" not in strategy.name:
                self._assert_same(
                    {"sharding_strategy": strategy}, {"sharding_strategy": ShardingStrategy[strategy.name]}
                )
        for prefetch in fsdp.BackwardPrefetch:
            self._assert_same({"backward_prefetch": prefetch}, {"backward_prefetch": BackwardPrefetch[prefetch.name]})
        policy = {"param_dtype": torch.bfloat16, "reduce_dtype": torch.float32, "cast_forward_inputs": True}
        self._assert_same(
            {
                "cpu_offload": fsdp.CPUOffload(offload_params=True),
                "mixed_precision": fsdp.MixedPrecision(**policy),  # type: ignore[arg-type]
                "sharding_strategy": None,
                "device_id": "cpu",
            },
            {
                "cpu_offload": CPUOffload(offload_params=True),
                "mixed_precision": MixedPrecision(**policy),  # type: ignore[arg-type]
                "device_id": torch.device("cpu"),
            },
        )

    def test_full_precision_in_eval(self) -> None:
        """The environment variable of torch's class holds for torch's MixedPrecision, from the wrap on."""
        for value, expected in (("1", torch.float32), ("0", torch.bfloat16), ("", torch.bfloat16)):
            with mock.patch.dict(os.environ, {"FSDP_USE_FULL_PREC_IN_EVAL": value}):
                model = FullyShardedDataParallel(
                    chain(), mixed_precision=fsdp.MixedPrecision(param_dtype=torch.bfloat16)
                )
            self.assertEqual(torch.bfloat16, model(batch(self.rank)).dtype)
            self.assertEqual(expected, model.eval()(batch(self.rank)).dtype)

    def _assert_same(self, torchs: dict[str, Any], ours: dict[str, Any]) -> None:
        actual, expected = (FullyShardedDataParallel(chain(), **options) for options in (torchs, ours))
        self.assertEqual(expected.unit.mixed_precision, actual.unit.mixed_precision)
        self.assertEqual(expected.unit.spec.offload, actual.unit.spec.offload)
        self.assertEqual(expected.unit.reshard_after_forward, actual.unit.reshard_after_forward)
        self.assertEqual(expected.plan(), actual.plan())
        losses = [self.train(model, step=lambda m, x: forward_sum(m, x).float()) for model in (expected, actual)]
        self.assertEqual(losses[0], losses[1])

    def test_order_of_arguments(self) -> None:
        """Positional arguments are in torch's order."""
        group = torch.distributed.group.WORLD
        model = FullyShardedDataParallel(
            chain(),
            group,
            fsdp.ShardingStrategy.SHARD_GRAD_OP,
            fsdp.CPUOffload(offload_params=False),
            wrap.ModuleWrapPolicy({Stage}),
            None,
            None,
            None,
            None,
            torch.device("cpu"),
            True,
            False,
            True,
            True,
        )
        self.assertEqual(["0", "1", "2"], units(model))
        self.assertFalse(model.unit.reshard_after_forward)

    def test_refusals(self) -> None:
        """Options that the engine does not offer are refused by name."""
        refused: list[tuple[str, dict[str, Any]]] = [
            ("use_orig_params=False", {"use_orig_params": False}),
            ("keep_low_precision_grads", {"mixed_precision": fsdp.MixedPrecision(keep_low_precision_grads=True)}),
            (
                "_module_classes_to_ignore=LayerNorm",
                {"mixed_precision": fsdp.MixedPrecision(_module_classes_to_ignore=(_BATCH_NORM, nn.LayerNorm))},
            ),
        ]
        for message, options in refused:
            with self.assertRaisesRegex(Unsupported, message):
                FullyShardedDataParallel(chain(), **options)
        model = chain()
        mixed = [model[0], model.get_parameter("1.linear.weight")]
        wrong: list[tuple[str, dict[str, Any]]] = [
            ("device_id must be .* got 'nowhere'", {"device_id": "nowhere"}),
            ("device_id must be .* got 1.5", {"device_id": 1.5}),
            ("sharding_strategy must be .* got 'full'", {"sharding_strategy": "full", "reshard_after_forward": 1}),
            ("auto_wrap_policy must be .* got 3", {"auto_wrap_policy": 3}),
            ("either all parameters or all modules", {"ignored_states": mixed}),
            ("must not be units, got a FullySharded", {"ignored_modules": [FullyShardedDataParallel(Stage())]}),
            ("not both", {"ignored_states": [model[0]], "ignored_modules": [model[1]]}),
            ("either all parameters or all modules", {"ignored_states": 3}),
        ]
        for message, options in wrong:
            with self.assertRaisesRegex(ConfigError, message):
                FullyShardedDataParallel(model, **options)

    def test_ignored_on_some_ranks(self) -> None:
        """Ignored modules may shift the names of the others; their shapes must still agree."""
        for ignoring in ((0, 1), (1,)):
            spare = [nn.Linear(2, 2) for _ in range(self.rank + 1)] if self.rank in ignoring else []
            model = nn.Sequential(Stage(), *spare, Stage())
            # The spare layers are left out of the forward, too.
            model.forward = lambda x, model=model: model[-1](model[0](x))  # type: ignore[method-assign,misc]
            subject = FullyShardedDataParallel(model, ignored_modules=spare)
            forward_sum(subject, batch(self.rank)).backward()
        other = nn.Sequential(nn.Linear(2, 3 + self.rank), nn.Linear(2, 2))
        with self.assertRaisesRegex(StructureMismatch, "shape of parameter 0"):
            FullyShardedDataParallel(other, ignored_modules=[other[1]])

    def test_ignored_parameters(self) -> None:
        """An ignored parameter is left alone, and is in the full state dict; units next to it train as before."""
        model = chain()
        ignored: Any = model.get_parameter("1.linear.weight")
        values = ignored.detach().clone()
        policy = functools.partial(wrap.size_based_auto_wrap_policy, min_num_params=WIDTH + 1)
        subject = FullyShardedDataParallel(copy.deepcopy(model), auto_wrap_policy=policy)
        self.assertIn("1", {name.split(".")[0] for name in units(subject)})
        subject = FullyShardedDataParallel(model, auto_wrap_policy=policy, ignored_states=[ignored])
        self.assertNotIn("1", {name.split(".")[0] for name in units(subject)})
        forward_sum(subject, batch(self.rank)).backward()
        assert ignored.grad is not None, "it was used"
        self.assertEqual((WIDTH, WIDTH), tuple(ignored.grad.shape))
        self.assertTrue(torch.equal(values, ignored))
        self.assertIs(ignored, dict(subject.named_parameters())["1.linear.weight"])
        self.assertTrue(torch.equal(values, subject.state_dict()["1.linear.weight"]))
        as_module = FullyShardedDataParallel(chain(), ignored_states=())
        self.assertEqual(1, len(as_module.units))


class TestPolicies(ShardedTestCase):
    """Policies of torch.distributed.fsdp.wrap choose the same units as in torch's class."""

    @pytest.mark.slow
    def test_same_units(self) -> None:
        """Policies choose the units that they choose in torch; containers without a forward are never units."""
        policies: list[Any] = [
            wrap.always_wrap_policy,
            functools.partial(wrap.size_based_auto_wrap_policy, min_num_params=20),
            functools.partial(wrap.size_based_auto_wrap_policy, min_num_params=70),
            functools.partial(wrap.transformer_auto_wrap_policy, transformer_layer_cls={Stage}),
            functools.partial(wrap.lambda_auto_wrap_policy, lambda_fn=lambda module: isinstance(module, nn.Linear)),
            functools.partial(
                wrap._or_policy,
                policies=[wrap.ModuleWrapPolicy({nn.MultiheadAttention}), wrap.ModuleWrapPolicy({Stage})],
            ),
            wrap.ModuleWrapPolicy({Stage, nn.MultiheadAttention}),
            wrap.CustomPolicy(lambda module: isinstance(module, Stage)),
        ]
        for policy in policies:
            theirs = fsdp.FullyShardedDataParallel(
                Attending(), auto_wrap_policy=policy, use_orig_params=True, device_id=torch.device("cpu")
            )
            names = {
                name.replace("_fsdp_wrapped_module.", "")
                for name, module in theirs.named_modules()
                if isinstance(module, fsdp.FullyShardedDataParallel) and name
            }
            expected = {name.removeprefix("_fsdp_wrapped_module") for name in names}
            # Torch wraps the list as well, and what attention uses without calling it.
            expected -= {"stages", "attention.out_proj"}
            ours = FullyShardedDataParallel(Attending(), auto_wrap_policy=policy)
            self.assertEqual(sorted(expected), units(ours), msg=str(policy))
            forward_sum(ours, batch(self.rank)).backward()

    def test_options_of_single_units(self) -> None:
        """A custom policy may return options, in torch's spelling."""

        def choose(module: nn.Module) -> Any:
            unit_options = {"sharding_strategy": fsdp.ShardingStrategy.SHARD_GRAD_OP}
            return unit_options if isinstance(module, Stage) and module.linear.out_features == WIDTH else False

        model = FullyShardedDataParallel(chain(), auto_wrap_policy=wrap.CustomPolicy(choose))
        self.assertEqual(["0", "1", "2"], units(model))
        self.assertEqual([False] * 3 + [True], [unit.reshard_after_forward for unit in model.units])

    def test_wrap_by_hand(self) -> None:
        """`enable_wrap` and `wrap` make wrappers of ours."""
        with wrap.enable_wrap(wrapper_cls=FullyShardedDataParallel, sharding_strategy=fsdp.ShardingStrategy.NO_SHARD):
            model = wrap.wrap(nn.Sequential(wrap.wrap(Stage()), Stage(WIDTH, 3)))
        self.assertEqual(2, len(FullyShardedDataParallel.fsdp_modules(model)))
        self.assertEqual([model], FullyShardedDataParallel.fsdp_modules(model, root_only=True))


class TestStateDicts(CheckpointTestCase):
    """`state_dict_type` and the optimizer's state."""

    def test_full(self) -> None:
        """The full state is the unsharded model's, and with rank0_only the first rank's alone."""
        model = chain()
        reference = DistributedDataParallel(copy.deepcopy(model))
        subject = FullyShardedDataParallel(model, auto_wrap_policy=wrap.ModuleWrapPolicy({Stage}))
        theirs, mine = (torch.optim.Adam(each.parameters()) for each in (reference, subject))
        self.train(reference, optimizer=theirs), self.train(subject, optimizer=mine)
        config = fsdp.FullStateDictConfig(offload_to_cpu=True, rank0_only=True)
        kind = fsdp.StateDictType.FULL_STATE_DICT
        with subject.state_dict_type(
            subject, kind, config, fsdp.FullOptimStateDictConfig(offload_to_cpu=True, rank0_only=True)
        ):
            state = subject.state_dict()
            optimizer_state = subject.optim_state_dict(subject, mine)
        if self.rank:
            self.assertEqual(({}, {}), (state, optimizer_state))
        else:
            expected = reference.module.state_dict()
            self.assertEqual(list(expected), list(state))
            self.assertTrue(all(torch.equal(expected[name], value) for name, value in state.items()))
            self.assertEqual(list(state), optimizer_state["param_groups"][0]["params"])
            for number, name in enumerate(state):
                moments = theirs.state_dict()["state"][number]
                self.assertTrue(torch.equal(moments["exp_avg"], optimizer_state["state"][name]["exp_avg"]))
        self.assertEqual([name for name, _ in subject.named_parameters()], list(subject.state_dict()))

    @pytest.mark.slow
    def test_optimizer_round_trip(self) -> None:
        """Every way to save and load the optimizer's state gives the same next step."""
        subject = self._trained()
        optimizer = self.optimizer(subject)
        self.train(subject, optimizer=optimizer, steps=2)
        state = subject.state_dict()
        full = FullyShardedDataParallel.optim_state_dict(subject, optimizer)
        world = torch.distributed.group.WORLD
        legacy = FullyShardedDataParallel.full_optim_state_dict(subject, optimizer, rank0_only=False, group=world)
        pieces = FullyShardedDataParallel.sharded_optim_state_dict(subject, optimizer)
        expected = self.train(subject, optimizer=optimizer, first=2)
        for saved, method in (
            (full, "optim_state_dict_to_load"),
            (legacy, "shard_full_optim_state_dict"),
            (pieces, "flatten_sharded_optim_state_dict"),
        ):
            twin = self._trained()
            twin.load_state_dict(state)
            restored = self.optimizer(twin)
            convert = getattr(FullyShardedDataParallel, method)
            if method == "shard_full_optim_state_dict":
                restored.load_state_dict(convert(saved, twin, optim=restored))
            elif method == "optim_state_dict_to_load":
                convert(twin, restored, saved, load_directly=True)
            else:
                restored.load_state_dict(convert(saved, twin, restored))
            self.assertEqual(expected, self.train(twin, optimizer=restored, first=2), msg=method)

    def test_sharded_optimizer_state_of_other_units(self) -> None:
        """State that other units hold on this rank is refused instead of loaded."""
        subject, other = self._trained(), FullyShardedDataParallel(chain())
        optimizer, restored = self.optimizer(subject), self.optimizer(other)
        self.train(subject, optimizer=optimizer, steps=1)
        pieces = FullyShardedDataParallel.sharded_optim_state_dict(subject, optimizer)
        for convert in ("flatten_sharded_optim_state_dict", "optim_state_dict_to_load"):
            arguments = (pieces, other, restored) if convert.startswith("flatten") else (other, restored, pieces)
            with self.assertRaisesRegex(StructureMismatch, "expected this rank's part of it, got a part"):
                getattr(FullyShardedDataParallel, convert)(*arguments)

    def test_sharded(self) -> None:
        """Sharded states go through torch.distributed.checkpoint, live or as copies on the CPU."""
        for offload in (False, True):
            subject, twin = self._trained(), FullyShardedDataParallel(chain())
            directory = self.shared_directory()
            kind = fsdp.StateDictType.SHARDED_STATE_DICT
            config = fsdp.ShardedStateDictConfig(offload_to_cpu=offload)
            with subject.state_dict_type(subject, kind, config):
                save(subject.state_dict(), checkpoint_id=directory)
            before = twin.set_state_dict_type(twin, kind, config)
            self.assertEqual("FULL_STATE_DICT", before.state_dict_type.name)
            state = twin.state_dict()
            load(state, checkpoint_id=directory)
            twin.load_state_dict(state)
            twin.set_state_dict_type(twin, before.state_dict_type, before.state_dict_config)
            expected = subject.state_dict()
            self.assertTrue(all(torch.equal(expected[name], value) for name, value in twin.state_dict().items()))

    def test_refusals(self) -> None:
        """Kinds and calls that do not exist here are refused by name, and leave the settings as they were."""
        model = FullyShardedDataParallel(chain())
        optimizer = self.optimizer(model)
        kinds = fsdp.StateDictType
        with self.assertRaisesRegex(Unsupported, "LOCAL_STATE_DICT"):
            model.set_state_dict_type(model, kinds.LOCAL_STATE_DICT)
        with self.assertRaisesRegex(Unsupported, "_use_dtensor"):
            model.set_state_dict_type(model, kinds.SHARDED_STATE_DICT, fsdp.ShardedStateDictConfig(_use_dtensor=True))
        with self.assertRaisesRegex(ConfigError, "must be a FullStateDictConfig, got ShardedStateDictConfig"):
            model.set_state_dict_type(model, kinds.FULL_STATE_DICT, fsdp.ShardedStateDictConfig())
        with self.assertRaisesRegex(ConfigError, "must be a StateDictType, got 'full'"):
            model.set_state_dict_type(model, "full")  # type: ignore[arg-type]
        with self.assertRaisesRegex(ConfigError, "contain a FullyShardedDataParallel, got a Linear"):
            FullyShardedDataParallel.get_state_dict_type(nn.Linear(1, 1))
        for name in ("scatter_full_optim_state_dict", "rekey_optim_state_dict"):
            with self.assertRaisesRegex(Unsupported, name):
                getattr(model, name)({}, model, optim=optimizer)
        alone = torch.distributed.new_group([self.rank], use_local_synchronization=True)
        with self.assertRaisesRegex(Unsupported, "group="):
            model.sharded_optim_state_dict(model, optimizer, group=alone)
        with self.assertRaisesRegex(Unsupported, "optim_input"):
            model.full_optim_state_dict(model, optimizer, list(model.parameters()))
        with self.assertRaisesRegex(StructureMismatch, "on every rank"):
            model.optim_state_dict_to_load(model, optimizer, {})
        self.assertEqual("FULL_STATE_DICT", model.get_state_dict_type(model).state_dict_type.name)

    def _trained(self) -> FullyShardedDataParallel:
        model = FullyShardedDataParallel(chain(), auto_wrap_policy=wrap.ModuleWrapPolicy({Stage}))
        self.train(model, steps=1)
        return model
