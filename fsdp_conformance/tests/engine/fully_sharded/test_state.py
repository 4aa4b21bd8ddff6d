"""Values into a fully sharded module and out of it: state dicts, whole parameters, copies; and what it refuses."""

from __future__ import annotations

import copy
import io
import pickle
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FullStateDictConfig, StateDictType

from fsdp_conformance.engine.errors import (
    ExecutionOrderError,
    ParameterReplaced,
    SharedAcrossUnits,
    TrainingStateError,
    UsedWhileSharded,
)
from fsdp_conformance.engine.fully_sharded.fully_shard import fully_shard
from fsdp_conformance.engine.fully_sharded.local_pieces import LocalPieces
from fsdp_conformance.engine.fully_sharded.wrapper import FullyShardedDataParallel
from fsdp_conformance.engine.sharding_strategy import ShardingStrategy
from fsdp_conformance.errors import ConfigError, Unsupported
from fsdp_conformance.tests.engine.fully_sharded.sharded_ranks import (
    LEARNING_RATE,
    WIDTH,
    ShardedTestCase,
    Stage,
    batch,
    chain,
    forward_sum,
    full_params,
    sharded,
)


class WithSpare(nn.Module):
    """A stage, a layer that the root owns, and a single element that nothing uses."""

    def __init__(self) -> None:
        super().__init__()
        self.stage = Stage()
        self.head = Stage(WIDTH, 3).linear
        self.spare = nn.Parameter(torch.ones(1))

    def forward(self, x: Tensor) -> Tensor:
        output: Tensor = self.head(self.stage(x))
        return output


class TestState(ShardedTestCase):
    """Tests of reading and writing values."""

    def test_replaced_between_forward_and_backward(self) -> None:
        """A parameter that is replaced between the two raises in the backward, on every rank, and is not dropped."""
        for strategy in (ShardingStrategy.FULL_SHARD, ShardingStrategy.SHARD_GRAD_OP):
            for key in ("weight", "bias"):
                subject = sharded(chain(), sharding_strategy=strategy)
                loss = forward_sum(subject, batch(self.rank))
                linear = subject.module[1].module.linear  # type: ignore[index]
                setattr(linear, key, nn.Parameter(getattr(linear, key).detach().clone()))
                with self.assertRaisesRegex(ParameterReplaced, f"linear.{key} was replaced by another"):
                    loss.backward()

    def test_replaced_inside(self) -> None:
        """A parameter that is replaced where it is whole, in a forward or in a context, raises at the next forward."""
        subject = sharded(chain())
        linear = subject.module[1].module.linear  # type: ignore[index]

        def replace(module: nn.Module, _: Any) -> None:
            module.weight = nn.Parameter(torch.zeros(WIDTH, WIDTH))

        handle = linear.register_forward_pre_hook(replace)
        loss = forward_sum(subject, batch(self.rank))
        handle.remove()
        with self.assertRaisesRegex(ParameterReplaced, "linear.weight was replaced"):
            loss.backward()
        subject = sharded(chain())
        with subject.summon_full_params(subject):
            replace(subject.module[1].module.linear, None)  # type: ignore[index]
        with self.assertRaisesRegex(ParameterReplaced, "linear.weight was replaced"):
            forward_sum(subject, batch(self.rank))

    def test_full_state_dict(self) -> None:
        """A full state dict has the names and values of the module, and loads into it and back."""
        model = chain()
        plain = copy.deepcopy(model)
        subject = sharded(model)
        self.train(subject)
        state = subject.state_dict()
        self.assertEqual(list(plain.state_dict()), list(state))
        plain.load_state_dict(state)
        self.assert_same_params(plain, subject)
        for value in state.values():
            value.add_(1)
        subject.load_state_dict(state)
        plain.load_state_dict(state)
        self.assert_same_params(plain, subject)
        with self.assertRaisesRegex(ParameterReplaced, r"0\.linear\.weight is missing.*; spare is unexpected"):
            subject.load_state_dict({"spare": torch.zeros(1)})

    def test_summon_writeback(self) -> None:
        """Values written inside are kept if requested, and gradients are there on request."""
        subject = sharded(chain())
        forward_sum(subject, batch(self.rank)).backward()
        for writeback in (False, True):
            before = full_params(subject)
            with subject.summon_full_params(subject, writeback=writeback, with_grads=True):
                for parameter in subject.parameters():
                    assert parameter.grad is not None, "every parameter was used"
                    self.assertEqual(parameter.shape, parameter.grad.shape)
                    parameter.detach().mul_(2)
            for name, value in full_params(subject).items():
                self.assertTrue(torch.equal(value, before[name] * (2 if writeback else 1)))
        with self.assertRaises(ConfigError), subject.summon_full_params(subject, rank0_only=True):
            pass

    def test_summon_between_forward_and_backward(self) -> None:
        """Reading whole parameters there leaves the backward alone; writing one element of one rank's is told."""
        for strategy in (ShardingStrategy.FULL_SHARD, ShardingStrategy.NO_SHARD):
            plain, subject = chain(), sharded(chain(), sharding_strategy=strategy)
            for model in (plain, subject):
                loss = forward_sum(model, batch(0))
                if model is subject:
                    with subject.summon_full_params(subject):
                        pass
                loss.backward()
            with subject.summon_full_params(subject, writeback=False, with_grads=True):
                for mine, theirs in zip(plain.parameters(), subject.parameters(), strict=True):
                    self.assertEqual(mine.grad, theirs.grad)
            loss = forward_sum(subject, batch(0))
            with subject.summon_full_params(subject), torch.no_grad():
                next(subject[0].parameters()).view(-1)[0] += 1
            with self.assertRaisesRegex(ParameterReplaced, "modified between forward and backward"):
                loss.backward()
            self.train(subject, steps=1)

    def test_summon_without_gradients(self) -> None:
        """If no rank has a gradient, no rank shows one, not even one without elements of the parameter."""
        subject = sharded(WithSpare())
        forward_sum(subject, batch(self.rank)).backward()
        with subject.summon_full_params(subject, writeback=False, with_grads=True):
            shown = {name: parameter.grad is not None for name, parameter in subject.named_parameters()}
        self.assertEqual({name: name != "spare" for name in shown}, shown)
        self.assertEqual(5, len(shown))

    def test_buffers_in_the_context(self) -> None:
        """Buffers have the names of the plain module."""
        model = chain()
        model[0].register_buffer("mean", torch.zeros(3))
        self.assertEqual(["root.0.mean"], [name for name, _ in sharded(model).named_buffers(prefix="root")])

    def test_deepcopy(self) -> None:
        """A copy has values, and trains, and leaves the original alone."""
        subject = sharded(chain())
        self.train(subject, steps=1)
        twin = copy.deepcopy(subject)
        before = full_params(subject)
        expected = [loss.item() for loss in self.train(twin, steps=2, first=1)]
        for name, value in full_params(subject).items():
            self.assertTrue(torch.equal(before[name], value), msg=name)
        got = [loss.item() for loss in self.train(subject, steps=2, first=1)]
        self.assertEqual(expected, got)
        for (name, mine), theirs in zip(full_params(subject).items(), full_params(twin).values(), strict=True):
            self.assertTrue(torch.equal(mine, theirs), msg=name)

    def test_apply(self) -> None:
        """`apply` reaches every module once, with whole parameters; inside of a context it raises."""
        subject = sharded(chain())
        shapes: list[tuple[int, ...]] = []

        def halve(module: nn.Module) -> None:
            for parameter in module.parameters(recurse=False):
                shapes.append(tuple(parameter.shape))
                parameter.detach().mul_(0.5)

        before = full_params(subject)
        subject.apply(halve)
        self.assertEqual([tuple(value.shape) for value in before.values()], shapes)
        for name, value in full_params(subject).items():
            self.assertTrue(torch.equal(before[name] * 0.5, value), msg=name)
        with subject.summon_full_params(subject), self.assertRaises(TrainingStateError):
            subject.apply(halve)

    def test_summon_in_a_step(self) -> None:
        """Whole parameters cannot be asked for in forward, and the model goes on."""

        class Asking(Stage):
            asks = True

            def forward(self, x: Tensor) -> Tensor:
                if self.asks:
                    with FullyShardedDataParallel.summon_full_params(subject):
                        pass
                return super().forward(x)

        asking = Asking()
        subject = sharded(nn.Sequential(asking, Stage(WIDTH, 3)))
        with self.assertRaises(TrainingStateError):
            subject(batch(self.rank))
        asking.asks = False
        self.train(subject, steps=1)

    def test_written_through_data(self) -> None:
        """A shard that was put into `.data` is taken over; another shape is refused."""
        subject = sharded(chain())
        before = full_params(subject)
        for parameter in subject.parameters():
            parameter.data = parameter.data * 2
        subject(batch(self.rank))
        for name, value in full_params(subject).items():
            self.assertTrue(torch.equal(value, before[name] * 2))
        next(subject.parameters()).data = torch.zeros(1)
        with self.assertRaises(ParameterReplaced):
            subject(batch(self.rank))

    def test_meta(self) -> None:
        """Modules on the meta device get their own initial values; who has none is refused by name."""
        with torch.device("meta"):
            model = nn.Sequential(nn.Linear(3, 5), nn.Linear(5, 2))
        torch.manual_seed(3)
        subject = FullyShardedDataParallel(model)
        torch.manual_seed(3)
        plain = nn.Sequential(nn.Linear(3, 5), nn.Linear(5, 2))
        self.assert_same_params(plain, subject)
        with torch.device("meta"):
            helpless = nn.ParameterList([nn.Parameter(torch.zeros(2))])
            outer = nn.Sequential()
            outer.helpless = helpless
        with self.assertRaisesRegex(ConfigError, "ParameterList"):
            FullyShardedDataParallel(outer)

    def test_optimizer_state(self) -> None:
        """The full optimizer state is the unwrapped model's, and comes back."""
        from fsdp_conformance.engine.fully_sharded.optimizer_state import full_optimizer_state, load_optimizer_state

        subject = sharded(chain())
        optimizer = torch.optim.AdamW(subject.parameters(), lr=LEARNING_RATE)
        self.train(subject, optimizer=optimizer)
        state = full_optimizer_state(subject, optimizer)
        shapes = {name: tuple(value.shape) for name, value in full_params(subject).items()}
        self.assertEqual(shapes, {name: tuple(entries["exp_avg"].shape) for name, entries in state["state"].items()})
        other = torch.optim.AdamW(subject.parameters(), lr=1.0)
        load_optimizer_state(subject, other, state)
        again = full_optimizer_state(subject, other)
        for name, entries in state["state"].items():
            for key, value in entries.items():
                self.assertTrue(torch.equal(value, again["state"][name][key]), msg=f"{name} {key}")
        self.assertEqual(LEARNING_RATE, other.param_groups[0]["lr"])


def _around() -> nn.Module:
    """A plain module with its own parameter and buffers, before, between and after two parts."""
    outer = nn.Module()
    outer.scale = nn.Parameter(torch.full((2,), 3.0))
    outer.first = nn.Sequential(Stage(), nn.BatchNorm1d(WIDTH))
    outer.norm = nn.BatchNorm1d(WIDTH)
    outer.second = chain()
    outer.register_buffer("offset", torch.arange(2.0))
    return outer


def _wrapped_inside(outer: nn.Module) -> nn.Module:
    """Both parts in wrappers, the second with wrappers inside."""
    outer.first, outer.second = FullyShardedDataParallel(outer.first), sharded(outer.second)  # type: ignore[arg-type]
    return outer


class TestAround(ShardedTestCase):
    """State dicts of a plain module around wrappers."""

    def test_names_and_values(self) -> None:
        """Those of the module before its parts were wrapped, which load into one another."""
        plain, outer = _around(), _wrapped_inside(_around())
        state = outer.state_dict()
        self.assertEqual(list(plain.state_dict()), list(state))
        for name, value in plain.state_dict().items():
            self.assertTrue(torch.equal(value, state[name]), msg=name)
            state[name] = value + 1
        for target in (plain, outer):
            self.assertEqual("<All keys matched successfully>", str(target.load_state_dict(state)))
        for name, value in plain.state_dict().items():
            self.assertTrue(torch.equal(value, outer.state_dict()[name]), msg=name)
        # The shards themselves, not copies of them.
        self.assert_same_params(plain.second, outer.second)  # type: ignore[arg-type]

    def test_after_training(self) -> None:
        """Values of the step, and the next step starts from what was loaded."""
        outer = _wrapped_inside(_around())
        before = outer.state_dict()
        self.train(outer.second, steps=2)  # type: ignore[arg-type]
        self.assertFalse(torch.equal(before["second.0.linear.weight"], outer.state_dict()["second.0.linear.weight"]))
        outer.load_state_dict(before)
        loaded = outer.state_dict()
        self.train(outer.second, steps=2)  # type: ignore[arg-type]
        outer.load_state_dict(loaded)
        for name, value in before.items():
            self.assertTrue(torch.equal(value, outer.state_dict()[name]), msg=name)

    def test_what_does_not_fit(self) -> None:
        """Missing and unexpected names are those of the plain module; values of another shape change nothing."""
        outer = _wrapped_inside(_around())
        state = outer.state_dict()
        moved = {("second.9.bias" if name == "second.3.bias" else name): value for name, value in state.items()}
        del moved["first.0.linear.bias"]
        result = outer.load_state_dict(moved, strict=False)
        self.assertEqual(["first.0.linear.bias", "second.3.bias"], result.missing_keys)
        self.assertEqual(["second.9.bias"], result.unexpected_keys)
        with self.assertRaisesRegex(RuntimeError, r'Missing.*"second\.3\.bias"[^_]*Unexpected.*"second\.9\.bias"'):
            outer.load_state_dict(moved)
        # torch itself does not miss the counters of normalisations in old state dicts, which have no versions.
        counters = {"norm.num_batches_tracked"}
        self.assertEqual(set(state), {*outer.load_state_dict({}, strict=False).missing_keys} | counters)
        wrong = {name: torch.zeros(99) if name == "second.3.bias" else value + 1 for name, value in state.items()}
        with self.assertRaisesRegex(RuntimeError, r"shape of 3\.bias"):
            outer.load_state_dict(wrong)
        self.assertTrue(torch.equal(state["second.0.linear.weight"], outer.state_dict()["second.0.linear.weight"]))
        with self.assertRaisesRegex(Unsupported, "assign"):
            outer.load_state_dict(state, assign=True)

    def test_other_kinds(self) -> None:
        """Sharded ones, and values on the first rank alone, as the wrappers inside were told."""
        outer = _wrapped_inside(_around())
        with FullyShardedDataParallel.state_dict_type(outer, StateDictType.SHARDED_STATE_DICT):
            state = outer.state_dict()
            self.assertIsInstance(state["second.0.linear.weight"], LocalPieces)
            self.assertEqual("<All keys matched successfully>", str(outer.load_state_dict(state)))
            del state["second.3.bias"]
            self.assertEqual(["second.3.bias"], outer.load_state_dict(state, strict=False).missing_keys)
        on_one = FullStateDictConfig(rank0_only=True, offload_to_cpu=True)
        with FullyShardedDataParallel.state_dict_type(outer, StateDictType.FULL_STATE_DICT, on_one):
            names = [name for name in outer.state_dict() if name.startswith(("first.", "second."))]
            self.assertEqual(self.rank == 0, bool(names))

    def test_copies(self) -> None:
        """A copy of the outer module loads into its own shards."""
        outer = _wrapped_inside(_around())
        twin = copy.deepcopy(outer)
        state = {name: value + 1 for name, value in outer.state_dict().items()}
        twin.load_state_dict(state)
        self.assertTrue(torch.equal(state["second.3.bias"], twin.state_dict()["second.3.bias"]))
        self.assertTrue(torch.equal(state["second.3.bias"] - 1, outer.state_dict()["second.3.bias"]))


class OnItsOwn(nn.Linear):
    """A layer whose values do not depend on a random state."""

    def reset_parameters(self) -> None:
        with torch.no_grad():
            self.weight.fill_(0.5)
            self.bias.fill_(0.25)


class TestMeta(ShardedTestCase):
    """Initialisation of modules on meta by a function of the user's."""

    def _model(self, device: str) -> nn.Sequential:
        first, last = OnItsOwn(4, 4, device=device), OnItsOwn(4, 4, device=device)
        last.weight = first.weight
        return nn.Sequential(first, OnItsOwn(4, 3, device=device), last)

    def test_the_function_gives_memory(self) -> None:
        """It is called once with each module, on meta, as torch calls it; tied parameters stay tied."""
        called: list[nn.Module] = []

        def init(module: nn.Module) -> None:
            called.append(module)
            self.assertTrue(all(each.is_meta for each in module.parameters(recurse=False)))
            module.to_empty(device="cpu", recurse=False)
            module.reset_parameters()  # type: ignore[operator]

        model = self._model("meta")
        model[2].bias = nn.Parameter(torch.empty(4, device="meta"))
        subject = FullyShardedDataParallel(model, param_init_fn=init)
        self.assertEqual(list(model), called)
        self.assertIs(model[0].weight, model[2].weight)
        self.assert_same_params(self._model("cpu"), subject)

    def test_tied_across_units(self) -> None:
        """Units that are made one after the other share what took the place of a parameter."""

        def init(module: nn.Module) -> None:
            module.to_empty(device="cpu", recurse=False)
            module.reset_parameters()  # type: ignore[operator]

        for function in (None, init):
            model = self._model("meta")
            for index in range(3):
                layer = model[index]
                model[index] = FullyShardedDataParallel(layer, param_init_fn=function, device_id=torch.device("cpu"))
            subject = FullyShardedDataParallel(model, device_id=torch.device("cpu"))
            names = [name for name, _ in subject.named_parameters(remove_duplicate=False)]
            unique = [name for name, _ in subject.named_parameters()]
            self.assertEqual(6, len(names))
            self.assertEqual(5, len(unique))
            self.assert_same_params(self._model("cpu"), subject)

    def test_what_is_left_on_meta(self) -> None:
        """Tensors left on meta are named, with what to do."""
        with self.assertRaisesRegex(ConfigError, r"weight, bias of a OnItsOwn must not be on meta.*to_empty"):
            FullyShardedDataParallel(self._model("meta"), param_init_fn=lambda module: None)


class TestRefusals(ShardedTestCase):
    """Tests of errors."""

    def test_written_between_forward_and_backward(self) -> None:
        """A parameter that is written when its backward is still to come is refused by name, and training goes on."""
        subject = sharded(chain())
        loss = forward_sum(subject, batch(self.rank))
        with torch.no_grad():
            for parameter in subject.parameters():
                parameter.mul_(1)
        with self.assertRaisesRegex(ParameterReplaced, "3.bias was modified between forward and backward"):
            loss.backward()
        self.train(subject, steps=1)

    def test_shards_in_a_state_dict(self) -> None:
        """A plain module around a unit in place does not give shards as if they were parameters."""
        outer, inner = nn.Module(), Stage()
        fully_shard(inner)
        outer.inner = inner
        with self.assertRaisesRegex(Unsupported, "full_state_dict"):
            outer.state_dict()

    def test_copies_of_modules_sharded_in_place(self) -> None:
        """A copy and a pickle are refused, and the message says what to do; a wrapper is refused as a pickle alone."""
        model = chain()
        fully_shard(model[0])
        fully_shard(model)
        with self.assertRaisesRegex(Unsupported, "wrap it in FullyShardedDataParallel"):
            copy.deepcopy(model)
        for subject in (model, sharded(chain())):
            with self.assertRaisesRegex(Unsupported, "state.dict"):
                pickle.dumps(subject)
            with self.assertRaisesRegex(Unsupported, "state.dict"):
                torch.save(subject, io.BytesIO())

    def test_order(self) -> None:
        """Ranks that run different units of one size raise, naming the unit."""
        model = nn.ModuleDict({"left": Stage(), "right": Stage()})

        class Divergent(nn.Module):
            def __init__(self, branches: nn.ModuleDict) -> None:
                super().__init__()
                self.branches = branches

            def forward(self, x: Tensor, key: str) -> Any:
                return self.branches[key](x)

        subject = sharded(Divergent(model))
        if self.rank == 0:
            with self.assertRaisesRegex(ExecutionOrderError, "branches.left"):
                subject(batch(0), "left")
        else:
            subject(batch(1), "right")

    def test_used_while_sharded(self) -> None:
        """A parameter in a graph outside of its unit's forward raises in backward."""
        subject = sharded(chain())
        penalty = sum((parameter**2).sum() for parameter in subject.parameters())
        with self.assertRaisesRegex(UsedWhileSharded, "3.bias"):
            penalty.backward()  # type: ignore[union-attr]

    def test_shared_without_a_common_unit(self) -> None:
        """Two units that share a parameter and have no unit around them are refused by name."""
        model = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3))
        model[1].weight = model[0].weight
        first, second = FullyShardedDataParallel(model[0]), FullyShardedDataParallel(model[1])
        first(torch.ones(1, 3))
        with self.assertRaisesRegex(SharedAcrossUnits, "weight"):
            second(torch.ones(1, 3))

    def test_options(self) -> None:
        """Options of the wrong kind are refused, all at once."""
        with self.assertRaisesRegex(ConfigError, "sharding_strategy must .* got 'full'.*cpu_offload must .* got 3"):
            FullyShardedDataParallel(nn.Linear(2, 2), sharding_strategy="full", cpu_offload=3)  # type: ignore[arg-type]
        with self.assertRaisesRegex(ConfigError, "a shard group and a replica group"):
            FullyShardedDataParallel(nn.Linear(2, 2), sharding_strategy=ShardingStrategy.HYBRID_SHARD)
        with self.assertRaisesRegex(ConfigError, "wrap it only once"):
            FullyShardedDataParallel(FullyShardedDataParallel(nn.Linear(2, 2)))
