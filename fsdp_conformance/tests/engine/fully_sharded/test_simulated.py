"""
The fully sharded module on the simulated accelerator: bitwise as on the CPU, and without a hazard.

What the suites ask there is not asked again: here are the parts of the engine that they do not know.
"""

from __future__ import annotations

import gc
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from fsdp_conformance.engine.errors import ExecutionOrderError, ParameterMoved
from fsdp_conformance.engine.fully_sharded.model_state import full_state_dict, load_full_state_dict, sharded_state_dict
from fsdp_conformance.engine.fully_sharded.optimizer_state import full_optimizer_state
from fsdp_conformance.engine.fully_sharded.wrapper import FullyShardedDataParallel
from fsdp_conformance.engine.sharding_strategy import CPUOffload, MixedPrecision, ShardingStrategy
from fsdp_conformance.simulator import checker
from fsdp_conformance.simulator.device import process_group
from fsdp_conformance.tests.engine.fully_sharded.sharded_ranks import (
    LEARNING_RATE,
    WIDTH,
    Stage,
    batch,
    chain,
    full_params,
    sharded,
)
from fsdp_conformance.tests.simulator.simulator_ranks import OnSim, compiled

pytestmark = [compiled, pytest.mark.slow]

Program = Callable[[FullyShardedDataParallel, list[Tensor]], None]


class _Recomputed(nn.Module):
    """Runs what it wraps under a checkpoint."""

    def __init__(self, module: nn.Module, *, reentrant: bool) -> None:
        super().__init__()
        self.module = module
        self.reentrant = reentrant

    def forward(self, x: Tensor) -> Tensor:
        output: Tensor = checkpoint(self.module, x, use_reentrant=self.reentrant, preserve_rng_state=False)
        return output


class TestOnSim(OnSim):
    """Programs that run on the CPU and on the simulated device, in two ranks."""

    @pytest.mark.nightly
    def test_checkpointing(self) -> None:
        """Units recomputed by a checkpoint train as on the CPU."""
        for reentrant in (False, True):
            self.assert_same(plain, build=partial(_recomputed, reentrant))

    def test_optimizer_in_backward(self) -> None:
        """Optimizers that step in hooks of gradients train as on the CPU."""
        self.assert_same(in_backward)

    @pytest.mark.nightly
    def test_two_forwards(self) -> None:
        """Two forwards followed by two backwards train as on the CPU."""
        for strategy in (ShardingStrategy.FULL_SHARD, ShardingStrategy.SHARD_GRAD_OP, ShardingStrategy.NO_SHARD):
            self.assert_same(two_forwards, sharding_strategy=strategy)

    @pytest.mark.nightly
    def test_state_between_steps(self) -> None:
        """Whole parameters are read and written between steps, and state dicts are taken and loaded."""
        self.assert_same(with_state)
        self.assert_same(with_state, cpu_offload=CPUOffload(offload_params=True))

    def test_precision_and_offload(self) -> None:
        """Low precision with gradients reduced in float32, offloaded or not, deferred or not."""
        policy = MixedPrecision(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
        for offload in (False, True):
            self.assert_same(deferred, mixed_precision=policy, cpu_offload=CPUOffload(offload_params=offload))

    @pytest.mark.nightly
    def test_full_precision_in_eval(self) -> None:
        """Steps in training mode, in eval mode, and evaluations between them, offloaded or not."""
        policy = MixedPrecision(
            param_dtype=torch.bfloat16,
            buffer_dtype=torch.bfloat16,
            cast_forward_inputs=True,
            full_precision_in_eval=True,
        )
        for offload in (False, True):
            options = {"mixed_precision": policy, "cpu_offload": CPUOffload(offload_params=offload)}
            self.assert_same(in_both_modes, build=_buffered, **options)

    def test_small_parameters_that_stay(self) -> None:
        """Biases are replicated and weights are sharded."""
        self.assert_same(plain, persist_numel=WIDTH)

    def test_evaluated_and_written(self) -> None:
        """Offloaded shards are written by the host after a forward without a graph, which has read them."""
        self.assert_same(evaluated, cpu_offload=CPUOffload(offload_params=True))

    @pytest.mark.nightly
    def test_smaller_group(self) -> None:
        """Parameters are kept in parts between forward and backward."""
        for ranks in (1, 2):
            self.assert_same(plain, reshard_after_forward=ranks)
            self.assert_same(deferred, reshard_after_forward=ranks)

    @pytest.mark.nightly
    def test_gathers_by_hand(self) -> None:
        """Gathers that a user starts, and waits for or not."""
        for strategy in (ShardingStrategy.FULL_SHARD, ShardingStrategy.SHARD_GRAD_OP):
            self.assert_same(by_hand, sharding_strategy=strategy)

    @pytest.mark.nightly
    def test_integers(self) -> None:
        """Parameters of integers are gathered beside others, in low precision and offloaded or not."""
        policy = MixedPrecision(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
        for offload in (False, True):
            for dtype in (torch.uint8, torch.int16):
                options = {"mixed_precision": policy, "cpu_offload": CPUOffload(offload_params=offload)}
                self.assert_same(plain, build=partial(_with_integers, dtype), **options)

    def test_optimizer_state(self) -> None:
        """Its counters stay where an optimizer has them, also of parameters of which this rank has no element."""
        for offload in (False, True):
            subject = sharded(
                chain(), device_id=torch.device(self.device), cpu_offload=CPUOffload(offload_params=offload)
            )
            optimizer = torch.optim.Adam(subject.parameters())
            counting = torch.optim.SGD(subject.parameters(), lr=LEARNING_RATE, momentum=0.5)
            _backward(subject, batch(self.rank, 0).to(self.device))
            optimizer.step()
            for parameter in subject.parameters():
                counting.state[parameter] = {"count": torch.ones((), device=parameter.device)}
            for each, key, device in (
                (optimizer, "step", "cpu"),
                (counting, "count", "cpu" if offload else "sim"),
            ):
                with checker.suspended():
                    state = full_optimizer_state(subject, each)["state"]
                    self.assertEqual({1.0}, {entries[key].item() for entries in state.values()})
                self.assertEqual({device}, {entries[key].device.type for entries in state.values()})

    @pytest.mark.nightly
    def test_after_an_exception(self) -> None:
        """A backward that raised leaves nothing behind."""
        self.assert_same(interrupted)

    def test_recovery_gives_memory_back(self) -> None:
        """After an exception in backward and the recovery, as many bytes are in use as after the step before."""
        device = torch.device(self.device)
        memory: Any = torch.get_device_module("sim")
        subject = sharded(chain(), device_id=device)
        x = batch(self.rank).to(device)
        plain(subject, [x, x])
        gc.collect()
        before = memory.memory_allocated(device)
        _break_off(subject, x)
        subject.recover()
        gc.collect()
        # The process group lets go of a gather for which no one waited when it communicates again.
        for _ in range(5):
            memory.synchronize(device)
            dist.barrier()
        self.assertLessEqual(memory.memory_allocated(device), before)

    def test_root_with_shared_parameters_alone(self) -> None:
        """A root that has no parameters but those that its units share computes where the units do."""
        for offload in (False, True):
            subject = sharded(_tied().to(self.device), cpu_offload=CPUOffload(offload_params=offload))
            plain(subject, [batch(self.rank).to(self.device)] * 2)
            whole = sharded(_tied())
            plain(whole, [batch(self.rank)] * 2)
            with checker.suspended():
                got = {name: value.cpu() for name, value in full_params(subject).items()}
            self.assertEqual(full_params(whole), got)
        self.assertEqual([], self.found())

    def test_order(self) -> None:
        """A rank that runs another unit than its peers is told, the last one too, which gathers its own tag."""
        for odd in range(self.world_size):
            for offload in (False, True):
                for first in (True, False):
                    subject = sharded(_Branched(), device_id=torch.device(self.device), cpu_offload=offload)
                    x = batch(self.rank).to(self.device)
                    if not first:
                        subject(x, 0).sum().backward()
                    if self.rank == odd:
                        with self.assertRaisesRegex(ExecutionOrderError, "expected unit .* (gathered|averaged) unit"):
                            subject(x, 1).sum().backward()
                    elif first:
                        with suppress(ExecutionOrderError):
                            subject(x, 0).sum().backward()
                    else:
                        subject(x, 0).sum().backward()
        self.found()

    def test_units_of_other_sizes(self) -> None:
        """The rank that comes second raises instead of issuing a collective that does not match its peer's."""
        for begun in (False, True):
            subject = sharded(_Branched(), device_id=torch.device(self.device))
            x = batch(self.rank).to(self.device)
            if begun:
                subject(x, 0).sum().backward()
            message = ""
            try:
                subject(x, 1 + self.rank).sum().backward()
            except ExecutionOrderError as error:
                message = str(error)
                # The peer waits for this one to gather the same.
                subject(x, 2 - self.rank).sum().backward()
            messages: list[Any] = [None] * self.world_size
            dist.all_gather_object(messages, message)
            (error_text,) = filter(None, messages)
            self.assertRegex(
                error_text, r"about to issue the gather \(\d+ elements a rank\) of unit \d+ \(branches\.[12]"
            )
            self.assertRegex(
                error_text, r"another rank has issued the gather \(\d+ elements a rank\) of unit \d+ \(branches"
            )
        self.found()

    def test_on_the_cpu_in_a_group_of_the_device(self) -> None:
        """A module that its group cannot reach is told where to go, and trains once it is there."""
        group = dist.new_group(backend=process_group.BACKEND)
        subject = sharded(chain(), process_group=group)
        with self.assertRaisesRegex(
            ParameterMoved, r"must be on a device of its process group \(sim\), got cpu.*device_id"
        ):
            subject(batch(self.rank))
        subject.to(self.device)
        plain(subject, [batch(self.rank).to(self.device)])

    def test_inputs_to_the_cpu(self) -> None:
        """A unit that computes on the CPU waits for inputs from the device, also in another dtype."""
        for policy in (None, MixedPrecision(param_dtype=torch.float64)):
            subject = sharded(chain(), device_id=torch.device("cpu"), mixed_precision=policy)
            twin = sharded(chain(), device_id=torch.device("cpu"), mixed_precision=policy)
            got, expected = subject(batch(self.rank).to(self.device)), twin(batch(self.rank))
            self.assertTrue(torch.equal(expected, got), msg=f"expected {expected}, got {got}")
        self.assertEqual([], self.found())

    def test_control(self) -> None:
        """The checker could have seen a hazard: without waits it sees one."""
        subject = sharded(chain(), device_id=torch.device(self.device))
        inputs = [batch(self.rank, number).to(self.device) for number in range(2)]
        with checker.without_waits():
            plain(subject, inputs)
        self.assertNotEqual([], self.found())

    def assert_same(self, program: Program, *, build: Callable[[], nn.Module] = chain, **options: Any) -> None:
        """The parameters after `program` are those that it leaves on the CPU, and no access was unordered."""
        checker.set_reuse(checker.Reuse.WORST_CASE)
        params = []
        for device in ("cpu", self.device):
            subject = sharded(build(), device_id=torch.device(device), **options)
            inputs = [batch(self.rank, number).to(device) for number in range(4)]
            program(subject, inputs)
            with checker.suspended():
                params.append({name: value.cpu() for name, value in full_params(subject).items()})
        self.assertEqual([], self.found())
        for name, value in params[0].items():
            self.assertTrue(torch.equal(value, params[1][name]), msg=f"{name}: expected {value}, got {params[1][name]}")


class _Branched(nn.Module):
    """Two units of one size and one of another, of which each forward runs one."""

    def __init__(self) -> None:
        super().__init__()
        self.branches = nn.ModuleList([Stage(), Stage(), Stage(WIDTH, 3)])

    def forward(self, x: Tensor, branch: int) -> Tensor:
        output: Tensor = self.branches[branch](x)
        return output


def _recomputed(reentrant: bool) -> nn.Module:
    return nn.Sequential(_Recomputed(nn.Sequential(Stage(), Stage()), reentrant=reentrant), Stage(WIDTH, 3))


def _tied() -> nn.Module:
    """Two units that share all their parameters, and one between them."""
    model = nn.Sequential(Stage(), Stage(), Stage())
    model[2].linear = model[0].linear
    return model


def _with_integers(dtype: torch.dtype) -> nn.Module:
    model = chain()
    for stage in model.children():
        stage.codes = nn.Parameter(torch.arange(7).to(dtype), requires_grad=False)
        stage.register_forward_hook(lambda module, _, output: output * module.codes[2])
    return model


def _buffered() -> nn.Module:
    model = chain()
    for number, stage in enumerate(model.children()):
        stage.register_buffer("factor", torch.tensor(1 + 2.0**-12 * number))
        stage.register_forward_hook(lambda module, _, output: (output * module.factor).to(output.dtype))
    return model


def _sgd(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=LEARNING_RATE, momentum=0.5)


def _backward(model: nn.Module, x: Tensor) -> None:
    model(x.requires_grad_()).float().sum().backward()


def plain(model: FullyShardedDataParallel, inputs: list[Tensor]) -> None:
    """Plain steps."""
    optimizer = _sgd(model)
    for x in inputs:
        _backward(model, x)
        optimizer.step()
        optimizer.zero_grad()


def in_backward(model: FullyShardedDataParallel, inputs: list[Tensor]) -> None:
    """Optimizers that step in hooks of gradients train as on the CPU."""
    optimizers = {parameter: torch.optim.SGD([parameter], lr=LEARNING_RATE) for parameter in model.parameters()}

    def step(parameter: Tensor) -> None:
        optimizers[parameter].step()  # type: ignore[index]
        parameter.grad = None

    for parameter in model.parameters():
        parameter.register_post_accumulate_grad_hook(step)
    for x in inputs:
        _backward(model, x)


def two_forwards(model: FullyShardedDataParallel, inputs: list[Tensor]) -> None:
    """Two forwards, then two backwards."""
    optimizer = _sgd(model)
    for pair in (inputs[:2], inputs[2:]):
        for loss in [model(x).sum() for x in pair]:
            loss.backward()
        optimizer.step()
        optimizer.zero_grad()


def deferred(model: FullyShardedDataParallel, inputs: list[Tensor]) -> None:
    """A deferred micro-batch before each that is reduced, and clipping."""
    optimizer = _sgd(model)
    for pair in (inputs[:2], inputs[2:]):
        with model.no_sync():
            _backward(model, pair[0])
        _backward(model, pair[1])
        model.clip_grad_norm_(0.5)
        optimizer.step()
        optimizer.zero_grad()


def by_hand(model: FullyShardedDataParallel, inputs: list[Tensor]) -> None:
    """Steps before which units are gathered: one is waited for, one is not, one is resharded while it arrives."""
    optimizer = _sgd(model)
    wrappers = [each for each in model.modules() if isinstance(each, FullyShardedDataParallel)]
    for x in inputs:
        handles = [wrapper.unshard(async_op=True) for wrapper in wrappers]
        wrappers[-1].reshard()
        for handle in (handles[0], handles[-1]):
            handle.wait()
        _backward(model, x)
        optimizer.step()
        optimizer.zero_grad()


def in_both_modes(model: FullyShardedDataParallel, inputs: list[Tensor]) -> None:
    """Steps in turns in training mode and in eval mode, after a forward in the other, with an evaluation inside."""
    optimizer = _sgd(model)
    for number, x in enumerate(inputs):
        model.train(number % 2 == 1)(x)
        loss = model.train(number % 2 == 0)(x.requires_grad_()).float().sum()
        with torch.no_grad():
            model.eval()(x)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()


def evaluated(model: FullyShardedDataParallel, inputs: list[Tensor]) -> None:
    """Forwards without a graph, and writes to shards between them."""
    for x in inputs:
        with torch.no_grad():
            model(x)
            for parameter in model.parameters():
                parameter.mul_(0.5)


def with_state(model: FullyShardedDataParallel, inputs: list[Tensor]) -> None:
    """Whole parameters and state dicts between steps."""
    optimizer = _sgd(model)
    for x in inputs:
        _backward(model, x)
        optimizer.step()
        optimizer.zero_grad()
        with model.summon_full_params(model):
            for parameter in model.parameters():
                parameter.detach().mul_(0.5)
        state = full_state_dict(model)
        sharded_state_dict(model)
        load_full_state_dict(model, {name: value * 2 for name, value in state.items()})


def interrupted(model: FullyShardedDataParallel, inputs: list[Tensor]) -> None:
    """A backward that raises, then plain steps."""
    _break_off(model, inputs[0])
    plain(model, inputs)


def _break_off(model: FullyShardedDataParallel, x: Tensor) -> None:
    """A backward that raises, and no gradients."""

    def refuse(_: Tensor) -> None:
        raise ValueError("on purpose")

    handle = model.module[1].module.linear.register_full_backward_hook(lambda *_: refuse(torch.empty(0)))  # type: ignore[index]
    try:
        _backward(model, x)
    except ValueError:
        handle.remove()
    for parameter in model.parameters():
        parameter.grad = None
