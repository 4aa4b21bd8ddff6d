"""What a fully sharded module does that no case of a suite asks: checkpoints, hooks, scaling, errors, reports."""

from __future__ import annotations

import copy
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint

from fsdp_conformance.engine.errors import (
    ExecutionOrderError,
    ParameterReplaced,
    SharedAcrossUnits,
    TrainingStateError,
    UsedWhileSharded,
)
from fsdp_conformance.engine.fully_shard import fully_shard
from fsdp_conformance.engine.fully_sharded import FullyShardedDataParallel
from fsdp_conformance.engine.gradient_scaler import ShardedGradScaler
from fsdp_conformance.engine.sharding_strategy import BackwardPrefetch, MixedPrecision, ShardingStrategy
from fsdp_conformance.errors import ConfigError, Unsupported
from fsdp_conformance.tests.sharded_ranks import (
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


class Checkpointed(nn.Module):
    """Runs what it wraps under a checkpoint."""

    def __init__(self, module: nn.Module, *, reentrant: bool) -> None:
        super().__init__()
        self.module = module
        self.reentrant = reentrant

    def forward(self, x: Tensor) -> Tensor:
        output: Tensor = checkpoint(self.module, x, use_reentrant=self.reentrant)
        return output


class Raising(nn.Module):
    """The identity, until it is told to raise."""

    where = ""

    def forward(self, x: Tensor) -> Tensor:
        if self.where == "forward":
            raise ValueError("on purpose")
        if self.where == "backward" and x.requires_grad:
            x.register_hook(_refuse)
        return x


def _refuse(_: Tensor) -> None:
    raise ValueError("on purpose")


class TestCheckpointing(ShardedTestCase):
    """Forwards that are computed twice."""

    def test_inside_of_units(self) -> None:
        """A checkpoint inside of a unit changes nothing, reentrant or not."""
        for reentrant in (False, True):
            model = chain()
            for stage in model:
                if isinstance(stage, Stage):
                    stage.linear = Checkpointed(stage.linear, reentrant=reentrant)  # type: ignore[assignment]
            self.assert_trains_as_ddp(model, step=lambda m, x: forward_sum(m, x.requires_grad_()))

    def test_around_units(self) -> None:
        """A checkpoint around units changes nothing, reentrant or not, and leaves nothing unsharded."""
        for strategy in (ShardingStrategy.FULL_SHARD, ShardingStrategy.SHARD_GRAD_OP):
            for reentrant in (False, True):
                model = nn.Sequential(
                    Checkpointed(nn.Sequential(Stage(), Stage()), reentrant=reentrant),
                    Checkpointed(Stage(), reentrant=reentrant),
                    Stage(WIDTH, 3),
                )
                subject = self.assert_trains_as_ddp(
                    model, step=lambda m, x: forward_sum(m, x.requires_grad_()), sharding_strategy=strategy
                )
                self.assertEqual([], [unit.label for unit in subject.units if unit.is_unsharded])

    def test_reduces_once(self) -> None:
        """A unit in a checkpoint is reduced once in a step."""
        model = nn.Sequential(Checkpointed(Stage(), reentrant=False), Stage(WIDTH, 3))
        subject = sharded(model)
        self.train(subject, steps=1)
        self.schedule()
        self.train(subject, steps=1)
        self.assertEqual(2, sum("reduce_scatter" in line for line in self.schedule()))


class TestRecovery(ShardedTestCase):
    """After an exception."""

    def test_training_goes_on(self) -> None:
        """After an exception in forward or backward, on every rank, the next step is as if it had not been tried."""
        for where in ("forward", "backward"):
            raising = Raising()
            model = nn.Sequential(Stage(), raising, Stage(), Stage(WIDTH, 3))
            reference = DistributedDataParallel(copy.deepcopy(model))
            subject = sharded(model)
            self.train(reference, steps=1), self.train(subject, steps=1)
            raising.where = where
            with self.assertRaisesRegex(ValueError, "on purpose"):
                forward_sum(subject, batch(self.rank).requires_grad_()).backward()
            raising.where = ""
            for parameter in subject.parameters():
                parameter.grad = None
            expected = self.train(reference, steps=2, first=1)
            got = self.train(subject, steps=2, first=1)
            self.assertEqual([loss.item() for loss in expected], [loss.item() for loss in got])
            self.assert_same_params(reference.module, subject)
            self.assertEqual([], [unit.label for unit in subject.units if unit.is_unsharded])


class TestSteps(ShardedTestCase):
    """Ways to train."""

    def test_optimizer_in_backward(self) -> None:
        """A step in the hook of a parameter's gradient gives what a step after backward gives, and runs once."""
        model = chain()
        reference = DistributedDataParallel(copy.deepcopy(model))
        subject = sharded(model)
        calls = []
        optimizers = {parameter: torch.optim.SGD([parameter], lr=LEARNING_RATE) for parameter in subject.parameters()}

        def step(parameter: Tensor) -> None:
            calls.append(parameter)
            optimizers[parameter].step()  # type: ignore[index]
            parameter.grad = None

        for parameter in subject.parameters():
            parameter.register_post_accumulate_grad_hook(step)
        optimizer = torch.optim.SGD(reference.parameters(), lr=LEARNING_RATE)
        for number in range(3):
            forward_sum(reference, batch(self.rank, number)).backward()
            optimizer.step()
            optimizer.zero_grad()
            forward_sum(subject, batch(self.rank, number)).backward()
        self.assertEqual(3 * len(optimizers), len(calls))
        self.assert_same_params(reference.module, subject)

    def test_two_forwards_then_two_backwards(self) -> None:
        """Forward, forward, backward, backward adds up as one step."""
        for strategy in (ShardingStrategy.FULL_SHARD, ShardingStrategy.SHARD_GRAD_OP, ShardingStrategy.NO_SHARD):
            model = chain()
            reference = copy.deepcopy(model)
            subject = sharded(model, sharding_strategy=strategy)
            optimizer = self.optimizer(subject)
            losses = [forward_sum(subject, batch(self.rank, number)) for number in range(2)]
            for loss in losses:
                loss.backward()
            optimizer.step()
            for rank in range(2):
                for number in range(2):
                    (forward_sum(reference, batch(rank, number)) / 2).backward()
            self.optimizer(reference).step()
            self.assert_same_params(reference, subject)

    def test_every_option(self) -> None:
        """Strategy and prefetch change nothing."""
        for strategy in (ShardingStrategy.FULL_SHARD, ShardingStrategy.SHARD_GRAD_OP, ShardingStrategy.NO_SHARD):
            for prefetch in (None, *BackwardPrefetch):
                self.assert_trains_as_ddp(
                    chain(), sharding_strategy=strategy, backward_prefetch=prefetch, forward_prefetch=True
                )

    def test_functional(self) -> None:
        """`fully_shard` trains as the wrapper does, and leaves the module's class alone."""
        model = chain()
        reference = DistributedDataParallel(copy.deepcopy(model))
        for stage in list(model)[:-1]:
            fully_shard(stage)
        fully_shard(model)
        expected, got = self.train(reference), self.train(model)
        self.assertEqual([loss.item() for loss in expected], [loss.item() for loss in got])
        self.assertIs(nn.Sequential, type(model))
        self.assert_same_params(reference.module, model)

    def test_clipping(self) -> None:
        """The norm of all gradients is that of the full gradients for p = 1, 2, inf, and so are the clipped ones."""
        for norm_type in (1.0, 2.0, float("inf")):
            model = chain()
            reference = DistributedDataParallel(copy.deepcopy(model))
            subject = sharded(model)
            forward_sum(reference, batch(self.rank)).backward()
            forward_sum(subject, batch(self.rank)).backward()
            expected = torch.nn.utils.clip_grad_norm_(reference.parameters(), 0.5, norm_type)
            got = subject.clip_grad_norm_(0.5, norm_type)
            torch.testing.assert_close(got, expected)
            self.optimizer(reference).step(), self.optimizer(subject).step()
            for (_, mine), theirs in zip(full_params(subject).items(), reference.parameters(), strict=True):
                torch.testing.assert_close(mine, theirs.detach())

    def test_overflow_on_one_rank(self) -> None:
        """An infinite gradient in one rank's shard skips the step on all, and lowers the scale everywhere."""
        subject = sharded(chain())
        optimizer = self.optimizer(subject)
        scaler = ShardedGradScaler("cpu", init_scale=4.0)
        before = full_params(subject)
        scaler.scale(forward_sum(subject, batch(self.rank))).backward()
        if self.rank == 1:
            next(p for p in subject.parameters() if p.grad is not None and p.grad.numel()).grad.fill_(torch.inf)  # type: ignore[union-attr]
        scaler.step(optimizer)
        scaler.update()
        self.assertEqual(2.0, scaler.get_scale())
        for name, value in full_params(subject).items():
            self.assertTrue(torch.equal(before[name], value))

    def test_communication_hook(self) -> None:
        """A hook sees every unit's gradient and writes the shard; what it writes is what is stepped on."""
        model = chain()
        reference = DistributedDataParallel(copy.deepcopy(model))
        subject = sharded(model)
        calls: list[int] = []

        def average(state: object, gradient: Tensor, shard: Tensor) -> None:
            calls.append(gradient.numel())
            dist.all_reduce(gradient)
            shard.copy_(gradient.chunk(2)[self.rank] / 2)

        subject.register_comm_hook(None, average)
        with self.assertRaises(TrainingStateError):
            subject.module[0].register_comm_hook(None, average)  # type: ignore[index]
        self.train(reference, steps=2), self.train(subject, steps=2)
        self.assertEqual(8, len(calls))
        self.assert_same_params(reference.module, subject)


class TestState(ShardedTestCase):
    """Values in, values out."""

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
        with self.assertRaisesRegex(ParameterReplaced, r"0\.linear\.weight is missing.*; spare is there"):
            subject.load_state_dict({"spare": torch.zeros(1)})

    def test_summon_writeback(self) -> None:
        """What is written inside is kept if it is to be; gradients are there on request."""
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
        from fsdp_conformance.engine.optimizer_state import full_optimizer_state, load_optimizer_state

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


class TestRefusals(ShardedTestCase):
    """What raises."""

    def test_written_between_forward_and_backward(self) -> None:
        """A parameter that is written when its backward is still to come is refused by name, and training goes on."""
        subject = sharded(chain())
        loss = forward_sum(subject, batch(self.rank))
        with torch.no_grad():
            for parameter in subject.parameters():
                parameter.mul_(1)
        with self.assertRaisesRegex(ParameterReplaced, "3.bias was written between forward and backward"):
            loss.backward()
        self.train(subject, steps=1)

    def test_shards_in_a_state_dict(self) -> None:
        """A plain module around units does not give shards as if they were parameters."""
        for wrap in (FullyShardedDataParallel, fully_shard):
            outer = nn.Module()
            inner = Stage()
            wrapped: Any = wrap(inner)
            outer.inner = wrapped if isinstance(wrapped, nn.Module) else inner
            with self.assertRaisesRegex(Unsupported, "full_state_dict"):
                outer.state_dict()

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
        with self.assertRaisesRegex(ConfigError, "sharding_strategy='full'.*cpu_offload=3"):
            FullyShardedDataParallel(nn.Linear(2, 2), sharding_strategy="full", cpu_offload=3)  # type: ignore[arg-type]
        with self.assertRaisesRegex(ConfigError, "a shard group and a replica group"):
            FullyShardedDataParallel(nn.Linear(2, 2), sharding_strategy=ShardingStrategy.HYBRID_SHARD)
        with self.assertRaisesRegex(ConfigError, "wrapped once"):
            FullyShardedDataParallel(FullyShardedDataParallel(nn.Linear(2, 2)))


class TestPrecision(ShardedTestCase):
    """Low precision while unsharded."""

    def test_dtypes(self) -> None:
        """Forward computes in bfloat16; shards and their gradients stay float32, and are reduced in what was asked."""
        for reduce_dtype in (None, torch.float32):
            policy = MixedPrecision(param_dtype=torch.bfloat16, reduce_dtype=reduce_dtype)
            subject = sharded(chain(), mixed_precision=policy)
            self.schedule()
            output = subject(batch(self.rank))
            self.assertEqual(torch.bfloat16, output.dtype)
            output.float().sum().backward()
            for parameter in subject.parameters():
                self.assertEqual(torch.float32, parameter.dtype)
                assert parameter.grad is not None, "every parameter was used"
                self.assertEqual(torch.float32, parameter.grad.dtype)
            wire = "bfloat16" if reduce_dtype is None else "float32"
            reductions = [line for line in self.schedule() if "reduce_scatter" in line]
            self.assertTrue(reductions and all(wire in line for line in reductions), msg=str(reductions))

    def test_accumulates_in_the_dtype_of_the_reduction(self) -> None:
        """Micro-batches that are not reduced add up in float32: 257 times one is not 256."""
        model = nn.Linear(1, 1, bias=False)
        subject = FullyShardedDataParallel(
            model, mixed_precision=MixedPrecision(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
        )
        x = torch.ones(1, 1)
        with subject.no_sync():
            for _ in range(256):
                subject(x).sum().backward()
        subject(x).sum().backward()
        gradients = [p.grad for p in subject.parameters() if p.grad is not None and p.grad.numel()]
        self.assertEqual([257.0] * len(gradients), [gradient.item() for gradient in gradients])

    def test_full_precision_in_eval(self) -> None:
        """In eval mode, on request, a unit computes in float32; training goes on in bfloat16. A graph is refused."""
        policy = MixedPrecision(param_dtype=torch.bfloat16, full_precision_in_eval=True)
        model = chain()
        plain = copy.deepcopy(model)
        subject = sharded(model, mixed_precision=policy)
        subject.eval()
        with torch.no_grad():
            self.assertTrue(torch.equal(plain(batch(self.rank)), subject(batch(self.rank))))
        with self.assertRaises(Unsupported):
            subject(batch(self.rank))
        subject.train()
        self.assertEqual(torch.bfloat16, subject(batch(self.rank)).dtype)


class TestReports(ShardedTestCase):
    """What a user can ask."""

    def test_reports(self) -> None:
        """A line for each unit, and what it holds."""
        subject = sharded(chain())
        self.assertEqual(5, len(subject.memory_report().splitlines()))
        self.assertIn("0: sharded", subject.memory_report())
        self.assertIn("all-gather", subject.plan())
