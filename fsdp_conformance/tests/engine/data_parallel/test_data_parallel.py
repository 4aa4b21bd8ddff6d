"""The engine's data-parallel mode is bitwise equal to torch's, and correct where torch's is silently wrong."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks
from torch.distributed.distributed_c10d import _get_default_group
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint

from fsdp_conformance.engine.data_parallel.data_parallel import DataParallel
from fsdp_conformance.engine.errors import ReductionUnfinished, StructureMismatch
from fsdp_conformance.errors import ConfigError, Unsupported
from fsdp_conformance.harness.context import log
from fsdp_conformance.tests.engine.data_parallel.reducer_ranks import (
    Coded,
    ReducerTestCase,
    code,
    coded,
    mean_code,
    raise_on_purpose,
)


class Wrapping(ReducerTestCase):
    """Tests of wrapping: checks, broadcasts and rejections."""

    def test_state_of_the_first_rank(self) -> None:
        """Parameters and buffers of every dtype and layout, from the first rank of the group."""
        module: Any = nn.BatchNorm1d(3)
        module.register_parameter("turned", nn.Parameter((torch.arange(6.0) + self.rank).view(2, 3).t()))
        module.register_parameter("frozen", nn.Parameter(torch.full((2,), 5.0 + self.rank), requires_grad=False))
        module.register_buffer("flags", torch.tensor([self.rank == 0, True]))
        module.register_buffer("complex", torch.tensor([1j + self.rank]))
        module.register_buffer("gone", torch.full((2,), 7.0 + self.rank), persistent=False)
        module.running_mean += self.rank
        DataParallel(module)

        self.assertTrue(torch.equal(torch.arange(6.0).view(2, 3).t(), module.turned))
        self.assertEqual([5.0, 5.0], module.frozen.tolist())
        self.assertEqual([True, True], module.flags.tolist())
        self.assertEqual([1j], module.complex.tolist())
        self.assertEqual([7.0, 7.0], module.gone.tolist())
        self.assertEqual([0.0] * 3, module.running_mean.tolist())

    def test_parameters_that_differ_raise_on_every_rank(self) -> None:
        """The reference raises on rank 1 alone, and rank 0 hangs."""
        with self.assertRaisesRegex(
            StructureMismatch, r"rank 1: shape of p1: expected \(5,\), as on rank 0, got \(6,\)"
        ):
            DataParallel(Coded([(3,), (5 + self.rank,)]))

    def test_nothing_is_sent_where_that_is_asked(self) -> None:
        """With sync_module_states=False the caller makes parameters equal."""
        begin = self.mark()
        model = DataParallel(Coded(), sync_module_states=False)
        self.assertEqual([], log().records[begin:])
        self.train(model)

        self.assert_means(model)

    def test_a_module_cannot_be_wrapped_twice(self) -> None:
        """A wrapped module, and a module inside another wrapper, cannot be wrapped."""
        inner = DataParallel(Coded())
        for module in (inner, nn.Sequential(nn.Linear(2, 2), inner), DistributedDataParallel(Coded())):
            with self.assertRaisesRegex(ConfigError, "must not average gradients already, as"):
                DataParallel(module)

    def test_a_container_without_forward(self) -> None:
        """Its wrapper's forward would never run."""
        for container in (nn.ModuleList([nn.Linear(2, 2)]), nn.ModuleDict({"a": nn.Linear(2, 2)})):
            with self.assertRaisesRegex(ConfigError, "must have a forward"):
                DataParallel(container)

    def test_attributes_of_the_module(self) -> None:
        """Data and items are available; methods that would bypass the wrapper are not."""
        module = nn.Sequential(nn.Linear(2, 2))
        vars(module).update(id="mine", config={"width": 2}, device="mine too")
        model = DataParallel(module)

        self.assertEqual(("mine", {"width": 2}, "mine too"), (model.id, model.config, model.device))
        self.assertIs(module[0], model[0])
        for name in ("append", "0"):
            with self.assertRaisesRegex(AttributeError, f"{name} of Sequential bypasses DataParallel"):
                getattr(model, name)
        with self.assertRaisesRegex(AttributeError, "no attribute 'nothing'"):
            _ = model.nothing

    def test_devices(self) -> None:
        """Parameters on two devices or without values, and lazy ones, are rejected by name."""
        module = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2, device="meta"))
        with self.assertRaises(ConfigError) as caught:
            DataParallel(module)
        problem = "parameters must be on one device, got 2: 0.weight, 0.bias on cpu; 1.weight, 1.bias on meta"
        self.assertIn(problem, str(caught.exception))
        self.assertIn("got 1.weight, 1.bias on the meta device", str(caught.exception))
        with self.assertRaisesRegex(Unsupported, "weight, bias have no shape yet"):
            DataParallel(nn.LazyLinear(3))
        with self.assertRaisesRegex(ConfigError, "device_id must be a torch.device .*, got 3"):
            DataParallel(Coded(), device_id=3)

    def test_options_out_of_range(self) -> None:
        """One error lists all problems of a kind."""
        with self.assertRaisesRegex(ConfigError, "bucket_cap_mb must be .*, got -1"):
            DataParallel(Coded(), bucket_cap_mb=-1)
        with self.assertRaisesRegex(ConfigError, r"ignored_names must be .*, got \['missing'\]"):
            DataParallel(Coded(), ignored_names=["missing", "p0"])

    def test_bucket_limits_in_mib(self) -> None:
        """One number applies to every bucket including the first; several apply one after the other."""
        mib = 1024 * 1024
        module = Coded([(mib // 4,)] * 4)
        names = [DataParallel(module, bucket_cap_mb=caps).reducer.bucket_names for caps in (None, 1, (2, 1), 0.5)]

        self.assertEqual(
            [
                [["p3"], ["p2", "p1", "p0"]],
                [["p3"], ["p2"], ["p1"], ["p0"]],
                [["p3", "p2"], ["p1"], ["p0"]],
                [["p3"], ["p2"], ["p1"], ["p0"]],
            ],
            names,
        )

    def test_ignored_names(self) -> None:
        """Ignored parameters and buffers are neither sent nor averaged."""
        module = Coded()
        with torch.no_grad():
            module.p1.fill_(float(self.rank))
        model = DataParallel(module, ignored_names=["p1"])
        self.train(model)

        self.assertEqual([float(self.rank)] * 5, module.p1.tolist())
        self.assert_mean(module.p1, code(self.rank))
        self.assert_mean(module.p0)

    def test_a_module_without_trainable_parameters(self) -> None:
        """A module without trainable parameters runs without communication; the reference rejects it."""
        for module in (nn.Flatten(), nn.Linear(2, 2).requires_grad_(False)):
            model = DataParallel(module)
            begin = self.mark()
            x = torch.ones(1, 2, requires_grad=True)
            model(x).sum().backward()

            self.assertEqual([], log().records[begin:])
            self.assertIsNotNone(x.grad)

    def test_in_a_group_of_its_own(self) -> None:
        """Means are over the group, even if its first rank is not 0."""
        groups = [dist.new_group([rank]) for rank in range(2)]
        model = DataParallel(Coded(), groups[self.rank])
        self.train(model)

        self.assert_mean(coded(model).p0, code(self.rank))


@dataclass
class _Output:
    logits: Tensor
    extra: dict[str, Any]


class _Branches(nn.Module):
    """Two linear layers and an output for each, in a dataclass."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.left, self.right = nn.Linear(3, 2), nn.Linear(3, 2)

    def forward(self, x: Tensor, *, with_right: bool = True) -> _Output:
        right = self.right(x) if with_right else None
        return _Output(self.left(x), {"right": [right], "detached": x.detach(), "number": 3})


class Iterations(ReducerTestCase):
    """The forwards and backwards that a user may run."""

    def _inputs(self, step: int = 0) -> Tensor:
        return torch.randn(4, 3, generator=torch.Generator().manual_seed(10 * step + self.rank))

    def test_nested_outputs(self) -> None:
        """A dataclass is passed on unchanged. Parameters behind its tensors are found, even on a branch not taken."""
        model = DataParallel(_Branches(), find_unused_parameters=True)
        assert isinstance(model.module, _Branches)
        for step, with_right in enumerate((True, self.rank == 0, False, True)):
            output = model(self._inputs(step), with_right=with_right)
            self.assertIs(_Output, type(output))
            self.assertEqual(3, output.extra["number"])
            right = output.extra["right"][0]
            loss = output.logits.sum() if right is None else output.logits.sum() + right.sum()
            loss.backward()
            grads = [None if p.grad is None else p.grad.tolist() for p in model.parameters()]
            first, second = self.on_every_rank(grads)
            self.assertEqual(first, second)
            self.assertEqual(step == 2, model.module.right.weight.grad is None)
            model.zero_grad()

    def test_a_backward_for_each_output(self) -> None:
        """Both branches are averaged, with outputs that need no gradient among them."""
        model = DataParallel(_Branches())
        for step in range(3):
            output = model(self._inputs(step))
            output.logits.sum().backward()
            output.extra["right"][0].square().sum().backward()
            gradients = self.on_every_rank([p.grad.tolist() for p in model.parameters() if p.grad is not None])
            self.assertEqual(4, len(gradients[0]))
            self.assertEqual(gradients[0], gradients[1])
            model.zero_grad()

    def test_forwards_without_a_graph(self) -> None:
        """They may run under no_grad and in inference mode, before and between iterations, and after an exception."""
        model = DataParallel(Coded(), broadcast_buffers=False)
        begin = self.mark()
        for step in range(3):
            with torch.no_grad():
                model(1.0)
            with torch.inference_mode():
                model(1.0)
            self.train(model, step)
            self.assert_means(model, step=step)
            model.zero_grad()
        self.assertEqual(3, len(self.since(begin)))

        self.train(model, use=(0, 1))
        with torch.no_grad():
            model(1.0)
        with self.assertRaises(ReductionUnfinished):
            model(1.0)

    def test_inside_of_a_checkpoint(self) -> None:
        """The wrapper's forward runs again in backward: gradients are averaged once, with the same result."""
        gradients = []
        for reentrant in (None, False, True):
            model = DataParallel(_Branches(), bucket_cap_mb=0)
            for step in range(3):
                x = self._inputs(step).requires_grad_()

                def loss(x: Tensor, model: DataParallel = model) -> Tensor:
                    output = model(x)
                    value: Tensor = output.logits.square().sum() + output.extra["right"][0].sum()
                    return value

                begin = self.mark()
                value: Any = loss(x) if reentrant is None else checkpoint(loss, x, use_reentrant=reentrant)
                value.backward()
                self.assertEqual(4, len(self.since(begin)))
                gradients.append([p.grad.tolist() for p in model.parameters() if p.grad is not None])
                model.zero_grad()

        self.assertEqual(4, len(gradients[0]))
        self.assertEqual(gradients[:3], gradients[3:6])
        self.assertEqual(gradients[:3], gradients[6:])

    def test_deferral_ends_with_its_block(self) -> None:
        """The deferral ends even if an exception leaves the block, and blocks nest."""
        model = DataParallel(Coded())
        with self.assertRaises(ZeroDivisionError), model.no_sync():
            self.train(model, step=self.rank // 0)
        with model.no_sync():
            with model.no_sync():
                self.train(model)
            self.train(model)
        self.assert_mean(coded(model).p0, 2 * code(self.rank))
        self.train(model)

        for parameter in model.parameters():
            self.assert_mean(parameter, 3 * mean_code(2))

    def test_after_an_exception(self) -> None:
        """The iteration after an exception in forward or backward, on every rank, is right."""
        model = DataParallel(Coded())
        self.train(model)
        model.zero_grad()
        with self.assertRaises(TypeError):
            model("not a number")
        for failing in ("p3", "p0"):
            output = model(code(self.rank))
            handle = model.module.get_parameter(failing).register_hook(raise_on_purpose)
            with self.assertRaisesRegex(RuntimeError, "on purpose"):
                output.backward()
            handle.remove()
            model.zero_grad()
            self.train(model, 3)
            self.assert_means(model, step=3)
            model.zero_grad()

    def test_communication_hook(self) -> None:
        """A hook that is registered on the wrapper stays when the reducer is replaced."""
        model = DataParallel(Coded())
        model.register_comm_hook(_get_default_group(), default_hooks.fp16_compress_hook)
        self.train(model)
        self.assert_means(model)
        model.zero_grad()
        begin = self.mark()
        coded(model).p2.requires_grad_(False)
        self.train(model, 1)

        self.assert_mean(coded(model).p0, step=1)
        self.assertEqual([2 * (3 + 5 + 11)], self.since(begin))

    def test_inputs_are_moved_where_a_device_is_named(self) -> None:
        """Nested inputs arrive unchanged."""
        model = DataParallel(nn.Identity(), device_id=torch.device("cpu"))
        x = torch.ones(2)
        output = model({"a": [x, "text"]})

        self.assertEqual("text", output["a"][1])
        self.assertTrue(torch.equal(x, output["a"][0]))


class Buffers(ReducerTestCase):
    """Buffers are broadcast from the first rank before forwards that follow a synchronised one."""

    class _Counting(nn.Module):
        """A buffer to which each forward adds a step that differs between ranks. The output depends on its value."""

        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.zeros(1))
            self.register_buffer("seen", torch.zeros(1))
            self.seen: Tensor

        def forward(self, step: float) -> Tensor:
            self.seen += step
            return self.weight * 2 + self.seen

    def _seen(self, kind: type[DataParallel] | type[DistributedDataParallel]) -> list[list[float]]:
        """This rank's buffer after each of several forwards."""
        model = kind(self._Counting())
        step, seen = 1.0 + self.rank, []
        for action in ("train", "train", "defer", "defer", "train", "eval", "eval", "train", "train", "idle", "train"):
            if action == "eval":
                with torch.no_grad():
                    model(step)
            elif action == "defer":
                with model.no_sync():
                    model(step).backward()
            elif action == "idle":
                model(step)
            else:
                model(step).backward()
            seen.append([float(value) for value in model.module.seen])  # type: ignore[union-attr]
        return seen

    def test_as_the_reference_does(self) -> None:
        """Equal after training, deferred and evaluation forwards, and forwards without backward."""
        self.assertEqual(self._seen(DistributedDataParallel), self._seen(DataParallel))

    def test_two_forwards_before_their_backwards(self) -> None:
        """The second forward's broadcast does not invalidate what the first one's graph has saved."""
        module = nn.BatchNorm1d(3)
        model = DataParallel(module)
        outputs = [model(torch.randn(4, 3)) for _ in range(2)]
        for output in outputs:
            output.square().sum().backward()

        first, second = self.on_every_rank(module.weight.grad.tolist())  # type: ignore[union-attr]
        self.assertEqual(first, second)

    def test_left_alone_where_that_is_asked(self) -> None:
        """Each rank keeps its own buffers."""
        module = self._Counting()
        model = DataParallel(module, broadcast_buffers=False)
        for _ in range(3):
            model(1.0 + self.rank).backward()

        self.assertEqual([3.0 * (1 + self.rank)], module.seen.tolist())

    def test_a_buffer_that_forward_replaces(self) -> None:
        """The buffers that are registered at that time are sent."""
        module = self._Counting()
        model = DataParallel(module)
        model(1.0 + self.rank).backward()
        module.seen = module.seen * 10
        model(0.0).backward()

        self.assertEqual([10.0], module.seen.tolist())
