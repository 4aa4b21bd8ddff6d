"""Tests of the fully sharded module beyond the cases of the suites: checkpoints, hooks, scaling, errors, reports."""

from __future__ import annotations

import copy
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any, cast
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import ProcessGroup
from torch.distributed.algorithms._comm_hooks import default_hooks
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.optim.apply_optimizer_in_backward import _apply_optimizer_in_backward
from torch.nn.parallel import DistributedDataParallel
from torch.testing._internal.common_distributed import spawn_threads_and_init_comms
from torch.utils.checkpoint import checkpoint

from fsdp_conformance.engine import communication
from fsdp_conformance.engine.chunks import gradients as chunk_gradients
from fsdp_conformance.engine.errors import (
    TrainingStateError,
)
from fsdp_conformance.engine.fully_sharded.construction import synchronise
from fsdp_conformance.engine.fully_sharded.fully_shard import fully_shard
from fsdp_conformance.engine.fully_sharded.gradient_scaler import ShardedGradScaler
from fsdp_conformance.engine.fully_sharded.sharding_groups import ShardingGroups
from fsdp_conformance.engine.fully_sharded.wrapper import FullyShardedDataParallel
from fsdp_conformance.engine.sharding_strategy import BackwardPrefetch, MixedPrecision, ShardingStrategy
from fsdp_conformance.errors import ConfigError
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


class Box:
    """An object that holds a tensor."""

    def __init__(self, content: Tensor) -> None:
        self.content = content


class Wrapping(Stage):
    """Returns an object."""

    def forward(self, x: Tensor) -> Any:
        return Box(super().forward(x))


class Unwrapping(Stage):
    """Takes one."""

    def forward(self, x: Any) -> Tensor:
        return super().forward(x.content)


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

    @pytest.mark.slow
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

    def test_reduces_once_after_an_evaluation(self) -> None:
        """A unit that is called twice is reduced once, also with an evaluation between the forward and its backward."""
        model = _CalledTwice(checkpoints=False)
        subject = sharded(copy.deepcopy(model))
        x = batch(self.rank, 0)
        for _ in range(2):
            loss = forward_sum(subject, x)
            with torch.no_grad():
                subject(x)
            self.schedule()
            loss.backward()
            # The root owns nothing.
            units = [unit for unit in subject.units if unit.flats]
            self.assertEqual(len(units), sum("reduce_scatter" in line for line in self.schedule()))


class TestRecovery(ShardedTestCase):
    """Tests of training after an exception."""

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
    """Tests of ways to train."""

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

    @pytest.mark.nightly
    @pytest.mark.slow
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

    def test_clipping_with_experts(self) -> None:
        """A unit on this rank alone counts in the norm of every rank, and all ranks scale by the same coefficient."""
        own, _ = dist.new_subgroups(group_size=1)
        for norm_type in (2.0, float("inf")):
            expert = FullyShardedDataParallel(Stage(), process_group=own)
            subject = sharded(nn.Sequential(Stage(), expert), units=["0"])
            forward_sum(subject, batch(self.rank)).backward()
            shared, mine = self.gradients(subject, "0."), self.gradients(subject, "1.")
            everyone = [torch.empty_like(mine) for _ in range(self.world_size)]
            dist.all_gather(everyone, mine)
            self.assertFalse(torch.equal(everyone[0], everyone[1]))
            expected = torch.linalg.vector_norm(torch.cat([shared, *everyone]), norm_type)
            torch.testing.assert_close(subject.clip_grad_norm_(0.25, norm_type), expected)
            for before, prefix in ((shared, "0."), (mine, "1.")):
                torch.testing.assert_close(self.gradients(subject, prefix), before * (0.25 / (expected + 1e-6)))

    def gradients(self, model: nn.Module, prefix: str) -> Tensor:
        """The full gradients of some parameters, flat."""
        with FullyShardedDataParallel.summon_full_params(model, writeback=False, with_grads=True):
            grads = [p.grad for name, p in model.named_parameters() if name.startswith(prefix)]
            return torch.cat([grad.flatten().clone() for grad in grads if grad is not None])

    def test_replicas_that_wait(self) -> None:
        """
        Gradients reduced without the replicas are reduced over them by the next backward, whatever that one uses.

        Shard groups of one rank: the two ranks are replicas.
        """
        for policy in (None, MixedPrecision(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)):
            mesh = init_device_mesh("cpu", (2, 1), mesh_dim_names=("replicate", "shard"))
            options: dict[str, Any] = {
                "sharding_strategy": ShardingStrategy.HYBRID_SHARD, "device_mesh": mesh, "mixed_precision": policy
            }  # fmt: skip
            expected, subject = sharded(chain(), **options), sharded(chain(), **options)
            for model, deferred in ((expected, nullcontext), (subject, subject.no_all_reduce)):
                with deferred():
                    model(batch(self.rank)).float().sum().backward()
                    if model is subject:
                        self.assertEqual([None] * 8, [parameter.grad for parameter in model.parameters()])
                with model.no_sync():
                    model(batch(self.rank, 1)).float().sum().backward()
                # The last backward runs one unit alone.
                model.module.get_submodule("0")(batch(self.rank, 2)).float().sum().backward()
            for (name, theirs), got in zip(expected.named_parameters(), subject.parameters(), strict=True):
                self.assertEqual(theirs.grad, got.grad, rtol=0, atol=0, msg=name)

    def test_gathered_by_hand(self) -> None:
        """A handle gives whole parameters once, before the first forward, too; a unit that does not run is freed."""
        model = nn.Sequential(Stage(), nn.Hardtanh(), Stage(WIDTH, 3))
        subject = sharded(copy.deepcopy(model), units=["0", "1", "2"])
        wrappers = [each for each in subject.modules() if isinstance(each, FullyShardedDataParallel)]
        handles = [wrapper.unshard(async_op=True) for wrapper in wrappers]
        for handle in [*handles, *handles]:
            handle.wait()
        for (name, expected), got in zip(model.named_parameters(), subject.parameters(), strict=True):
            self.assertTrue(torch.equal(expected, got), msg=name)
        late = wrappers[1].unshard(async_op=True)
        wrappers[1].reshard()
        late.wait()
        self.assertFalse(wrappers[1].unit.is_unsharded)
        self.train(subject, steps=1)
        self.assertEqual([], [unit.label for unit in subject.units if unit.is_unsharded])

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
        with self.assertRaisesRegex(TrainingStateError, "must have no communication hook"):
            subject.register_comm_hook(None, average)
        self.train(reference, steps=2), self.train(subject, steps=2)
        self.assertEqual(8, len(calls))
        self.assert_same_params(reference.module, subject)

    def test_a_communication_hook_gets_deferred_sums(self) -> None:
        """Gradients kept by `no_all_reduce` are reduced by a hook that is registered afterwards."""
        model = chain()
        reference = DistributedDataParallel(copy.deepcopy(model))
        subject = sharded(model, sharding_strategy=ShardingStrategy.NO_SHARD)
        with reference.no_sync():
            forward_sum(reference, batch(self.rank, 0)).backward()
        with subject.no_all_reduce():
            forward_sum(subject, batch(self.rank, 0)).backward()
        subject.register_comm_hook(
            default_hooks.DefaultState(dist.distributed_c10d._get_default_group()), default_hooks.allreduce_hook
        )
        for model_ in (reference, subject):
            forward_sum(model_, batch(self.rank, 1)).backward()
        for (name, expected), got in zip(reference.module.named_parameters(), subject.parameters(), strict=True):
            torch.testing.assert_close(got.grad, expected.grad, msg=name)
        subject.clip_grad_norm_(1.0)

    def test_hooks_of_parameters(self) -> None:
        """Hooks see the whole gradient, whether they were registered before or after wrapping."""
        model, shapes = chain(), []
        first = next(model.parameters())
        first.register_hook(lambda gradient: shapes.append(gradient.shape))
        shape = first.shape
        subject = sharded(model)
        first.register_hook(lambda gradient: shapes.append(gradient.shape))
        forward_sum(subject, batch(self.rank)).backward()
        self.assertEqual([shape, shape], shapes)

    def test_torchs_communication_hooks(self) -> None:
        """Torch's own hooks fill shards, and reduce in place where nothing is sharded; then optimizers may step."""
        for strategy, hook in (
            (ShardingStrategy.FULL_SHARD, default_hooks.reduce_scatter_hook),
            (ShardingStrategy.NO_SHARD, default_hooks.allreduce_hook),
        ):
            model = chain()
            reference = DistributedDataParallel(copy.deepcopy(model))
            subject = sharded(model, sharding_strategy=strategy)
            subject.register_comm_hook(default_hooks.DefaultState(dist.distributed_c10d._get_default_group()), hook)
            stepped: list[Tensor] = []
            for parameter in subject.parameters():
                parameter.register_post_accumulate_grad_hook(stepped.append)
            self.train(reference, steps=2), self.train(subject, steps=2)
            self.assert_same_params(reference.module, subject)
            self.assertEqual(2 * len(list(subject.parameters())), len(stepped))

    @pytest.mark.slow
    def test_an_optimizer_in_backward_waits_for_all_calls_of_a_unit(self) -> None:
        """Its backward ends once for each call: under a reentrant checkpoint, or in two forwards with one backward."""

        def twice(model: nn.Module, x: Tensor) -> Tensor:
            return forward_sum(model, x) + forward_sum(model, x.flip(0))

        for build, forward in ((_CalledTwice, forward_sum), (chain, twice)):
            for persist_numel in (0, WIDTH):
                self._assert_steps_once(build(), forward, persist_numel=persist_numel)

    def _assert_steps_once(
        self, model: nn.Module, forward: Callable[[nn.Module, Tensor], Tensor], *, persist_numel: int
    ) -> None:
        expected = copy.deepcopy(model)
        subject = sharded(model, persist_numel=persist_numel)
        updated: list[Tensor] = []

        def step(parameter: Tensor) -> None:
            updated.append(parameter)
            torch.optim.SGD([parameter], lr=LEARNING_RATE).step()
            parameter.grad = None

        for parameter in subject.parameters():
            parameter.register_post_accumulate_grad_hook(step)
        for number in range(2):
            for rank in range(2):
                (forward(expected, batch(rank, number).requires_grad_()) / 2).backward()
            torch.optim.SGD(expected.parameters(), lr=LEARNING_RATE).step()
            expected.zero_grad()
            forward(subject, batch(self.rank, number).requires_grad_()).backward()
        self.assertEqual(2 * len(list(subject.parameters())), len(updated))
        self.assert_same_params(expected, subject)

    def test_torchs_optimizers_in_backward(self) -> None:
        """Optimizers that torch attaches to parameters step once each gradient is reduced, and drop it."""
        for register_hook in (False, True):
            expected, subject = sharded(chain()), sharded(chain())
            optimizer = torch.optim.SGD(expected.parameters(), lr=LEARNING_RATE)
            _apply_optimizer_in_backward(
                torch.optim.SGD, subject.parameters(), {"lr": LEARNING_RATE}, register_hook=register_hook
            )
            for step in range(2):
                forward_sum(expected, batch(self.rank, step)).backward()
                optimizer.step()
                optimizer.zero_grad()
                forward_sum(subject, batch(self.rank, step)).backward()
                self.assertTrue(all(parameter.grad is None for parameter in subject.parameters()))
            for (name, mine), theirs in zip(full_params(subject).items(), full_params(expected).values(), strict=True):
                self.assertTrue(torch.equal(mine, theirs), msg=name)


class _CalledTwice(nn.Module):
    """Calls a stage at the beginning and at the end, with or without reentrant checkpoints."""

    def __init__(self, *, checkpoints: bool = True) -> None:
        super().__init__()
        self.checkpoints = checkpoints
        self.shared = Stage()
        self.stages = nn.ModuleList(Stage() for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        x = self._shared(x)
        for stage in self.stages:
            x = stage(x)
        return self._shared(x)

    def _shared(self, x: Tensor) -> Tensor:
        output: Tensor = checkpoint(self.shared, x, use_reentrant=True) if self.checkpoints else self.shared(x)
        return output


class _HalfUsed(Stage):
    """A stage with a parameter that no forward uses."""

    def __init__(self) -> None:
        super().__init__()
        self.spare = nn.Parameter(torch.ones(WIDTH))


class _Picking(nn.Module):
    """Multiplies its input by one of three parameters."""

    def __init__(self) -> None:
        super().__init__()
        self.factors = nn.ParameterList(torch.ones(WIDTH) for _ in range(3))

    def forward(self, which: int, x: Tensor) -> Tensor:
        product: Tensor = self.factors[which] * x
        return product.sum()


class TestSignsOfZero(ShardedTestCase):
    """The engine tells from (-0) + (-0) being -0 that no rank used a parameter."""

    def test_kept_and_lost(self) -> None:
        """If a reduction loses the sign, such a parameter gets a gradient of zeros, and no other changes."""

        def losing(shard: Tensor, inputs: Tensor, group: ProcessGroup) -> dist.Work:
            return communication.reduce_scatter(shard, inputs.add_(0.0), group)

        gradients = []
        for lost in (False, True):
            subject = sharded(nn.Sequential(_HalfUsed(), Stage(WIDTH, 3)), units=["0", "1"])
            with patch.object(chunk_gradients, "reduce_scatter", losing) if lost else nullcontext():
                forward_sum(subject, batch(self.rank)).backward()
            gradients.append({name: parameter.grad for name, parameter in subject.named_parameters()})
        with_sign, lost_sign = gradients
        for name, parameter in subject.named_parameters():
            expected, got = with_sign[name], cast(Tensor, lost_sign[name])
            if name.endswith("spare") and parameter.numel():
                self.assertIsNone(expected)
                expected = torch.zeros_like(parameter)
            self.assertTrue(torch.equal(cast(Tensor, expected), got), msg=name)

    def test_gradients_of_inputs_alone(self) -> None:
        """torch.autograd.grad of an input gives no parameter a gradient, also not an empty one where a shard is."""
        subject = sharded(nn.Sequential(nn.Linear(WIDTH, 1, bias=False), nn.Linear(1, WIDTH)), units=["0", "1"])
        calls: list[Tensor] = []
        for parameter in subject.parameters():
            parameter.register_post_accumulate_grad_hook(calls.append)
        x = batch(self.rank).requires_grad_()
        (gradient,) = torch.autograd.grad(forward_sum(subject, x), [x])

        self.assertTrue(gradient.any())
        self.assertTrue(any(not parameter.numel() for parameter in subject.parameters()) or self.rank == 0)
        self.assertEqual([parameter.grad for parameter in subject.parameters()], [None] * 3)
        self.assertEqual(calls, [])
        forward_sum(subject, x).backward()
        self.assertTrue(all(parameter.grad is not None for parameter in subject.parameters()))

    def test_used_only_while_replicas_wait(self) -> None:
        """
        A parameter used only by a backward inside `no_all_reduce` gets its gradient from the next one outside, even one
        of negative zeros. Shard groups of one rank: the two ranks are replicas.
        """
        for value in (1.0, 0.0, -0.0):
            mesh = init_device_mesh("cpu", (2, 1), mesh_dim_names=("replicate", "shard"))
            subject = sharded(_Picking(), sharding_strategy=ShardingStrategy.HYBRID_SHARD, device_mesh=mesh)
            for _ in range(2):
                with subject.no_all_reduce():
                    # The second micro-batch inside must not forget the first, and the second step not see the first.
                    subject(0, torch.full((WIDTH,), value, requires_grad=True)).backward()
                    subject(1, torch.ones(WIDTH, requires_grad=True)).backward()
                subject(1, torch.ones(WIDTH, requires_grad=True)).backward()
                early, late, never = (parameter.grad for parameter in subject.parameters())
                self.assertEqual(torch.full((WIDTH,), value), early, msg=f"{value}: {early}")
                self.assertEqual(torch.full((WIDTH,), 2.0), late)
                self.assertIsNone(never)
                subject.zero_grad()
            subject(1, torch.ones(WIDTH, requires_grad=True)).backward()
            self.assertIsNone(next(subject.parameters()).grad)


class TestOutputs(ShardedTestCase):
    """Outputs that no engine can look into."""

    def test_unknown_object(self) -> None:
        """Units that return an object of the user's train as others do, and are resharded in the end."""
        for strategy in (ShardingStrategy.FULL_SHARD, ShardingStrategy.SHARD_GRAD_OP):
            model = nn.Sequential(Stage(), Wrapping(), Unwrapping(), Stage(WIDTH, 3))
            subject = self.assert_trains_as_ddp(
                model, units=["0", "1", "2", "3"], sharding_strategy=strategy, step=forward_sum
            )
            self.assertEqual([], [unit.label for unit in subject.units if unit.is_unsharded])

    @pytest.mark.slow
    def test_unknown_object_of_a_frozen_unit(self) -> None:
        """So does one with frozen parameters, and one whose parameters begin to train later."""
        for tuned in ("weight", "bias"):
            plain = nn.Sequential(Stage(), Wrapping(), Unwrapping(), Stage(WIDTH, 3))
            subject = sharded(copy.deepcopy(plain), units=["0", "1", "2", "3"])
            losses = []
            for model in (plain, subject):
                optimizer = self.optimizer(model)
                for step, trains in enumerate((False, True, False, True)):
                    for name, parameter in model.named_parameters():
                        parameter.requires_grad_(trains or not name.endswith(f"linear.{tuned}"))
                    # A reducer of DDP keeps what trained when it was made.
                    called = model if model is subject else DistributedDataParallel(model)
                    losses += self.train(called, steps=1, first=step, optimizer=optimizer)
            self.assertEqual(losses[:4], losses[4:])
            self.assert_same_params(plain, subject)


class TestReports(ShardedTestCase):
    """Tests of reports and questions of users."""

    def test_reports(self) -> None:
        """A line for each unit, and what it holds."""
        subject = sharded(chain())
        self.assertEqual(5, len(subject.memory_report().splitlines()))
        self.assertIn("0: sharded", subject.memory_report())
        self.assertIn("all-gather", subject.plan())


class _OnGpusOnly:
    """A group of two ranks, as of NCCL's backend alone."""

    _device_types = (torch.device("cuda"),)

    def size(self) -> int:
        return 2


def test_what_cannot_be_broadcast_is_said_before() -> None:
    """A module on the CPU in a group of NCCL's: where it is, where it should be, and what to do."""
    groups = ShardingGroups(cast("Any", _OnGpusOnly()), None)
    expected = (
        r"sync_module_states needs a module on a device of its process group \(cuda\), got cpu: move it there "
        r"first, or pass device_id"
    )

    with pytest.raises(ConfigError, match=expected):
        synchronise([torch.ones(2)], groups)
    with pytest.raises(ConfigError, match="got cpu"):
        synchronise([torch.ones(2, device="meta"), torch.ones(2)], groups)


@spawn_threads_and_init_comms(world_size=2)
def _synchronised_in_threads(means: dict[int, float]) -> None:
    rank = dist.get_rank()
    module = nn.Linear(2, 2)
    nn.init.constant_(module.weight, rank + 1.0)
    model = FullyShardedDataParallel(module, sync_module_states=True)
    means[rank] = full_params(model)["weight"].mean().item()


def test_group_that_names_no_devices() -> None:
    """A process group written in Python is its own backend, and is asked: here torch's for threads."""
    means: dict[int, float] = {}

    _synchronised_in_threads(means)

    assert means == {0: 1.0, 1: 1.0}
