"""Ranks with different numbers of inputs."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks
from torch.distributed.algorithms.join import Join, Joinable, JoinHook
from torch.distributed.distributed_c10d import _get_default_group
from torch.distributed.optim import ZeroRedundancyOptimizer

from fsdp_conformance.engine.data_parallel.data_parallel import DataParallel
from fsdp_conformance.errors import Unsupported
from fsdp_conformance.harness.context import log
from fsdp_conformance.history.collective import Op
from fsdp_conformance.tests.engine.data_parallel.reducer_ranks import (
    Coded,
    ReducerTestCase,
    code,
    coded,
    mean_code,
    pattern,
)


class Joining(ReducerTestCase):
    """Ranks with different numbers of inputs."""

    def test_zeros_of_a_rank_that_has_joined(self) -> None:
        """Rank 0 has one input fewer: in the third iteration its gradient counts as zero, and both take the step."""
        for kind in ({}, {"gradient_as_bucket_view": True}, {"find_unused_parameters": True}, {"static_graph": True}):
            module = Coded()
            model = DataParallel(module, **kind)  # type: ignore[arg-type]
            inputs = 2 + self.rank
            seen = []
            with model.join():
                for step in range(inputs):
                    self.train(model, step)
                    assert module.p1.grad is not None
                    seen.append(float(module.p1.grad[0]))
                    with torch.no_grad():
                        for parameter in module.parameters():
                            assert parameter.grad is not None
                            parameter.sub_(parameter.grad)
                    model.zero_grad()

            expected = [mean_code(2), mean_code(2, 1), code(1, 2) / 2]
            self.assertEqual(expected[:inputs], seen, str(kind))
            # Both have the model of the rank that left last.
            for parameter in module.parameters():
                self.assertTrue(torch.equal(pattern(parameter.shape) * -sum(expected), parameter.detach()))

    def test_division_by_the_ranks_that_are_left(self) -> None:
        """divide_by_initial_world_size=False: rank 1 alone keeps its own gradient."""
        module = Coded()
        model = DataParallel(module)
        with model.join(divide_by_initial_world_size=False):
            for step in range(2 + self.rank):
                self.train(model, step)
                if step == 2:
                    self.assert_mean(module.p0, code(1, 2))
                else:
                    self.assert_mean(module.p0, step=step)
                model.zero_grad()
        # Outside the context, gradients are divided by the size of the group again, and no roll is called.
        begin = self.mark()
        self.train(model)
        self.assert_means(model)
        self.assertEqual(1, len(log().records[begin:]))

    def test_a_rank_without_any_input(self) -> None:
        """The first rank joined before its order of readiness was known: buckets are rebuilt anyway."""
        module = Coded()
        model = DataParallel(module, bucket_cap_mb=0)
        with model.join():
            for step in range(4 * self.rank):
                self.train(model, step)
                self.assert_mean(module.p3, code(1, step) / 2)
                model.zero_grad()

        self.assertTrue(all(self.on_every_rank(model.reducer._rebuilt)))
        for step in range(2):
            self.train(model, step)
            self.assert_means(model, step=step)
            model.zero_grad()

    def test_a_static_graph_that_one_rank_never_saw(self) -> None:
        """It learns the graph when it trains again, without asking the others."""
        module = Coded()
        model = DataParallel(module, static_graph=True)
        with model.join():
            for step in range(2 * self.rank):
                self.train(model, step, use=(0, 1, 2))
                self.assert_mean(module.p0, code(1, step) / 2)
                model.zero_grad()
        for step in range(3):
            self.train(model, step, use=(0, 1, 2))
            self.assert_mean(module.p2, step=step)
            self.assertIsNone(module.p3.grad)
            model.zero_grad()

    def test_deferral_and_evaluation(self) -> None:
        """Iterations without a reduction are shadowed without one, and buffers come from a rank with inputs."""
        module = nn.Sequential(nn.Linear(2, 3), nn.BatchNorm1d(3))
        model = DataParallel(module, bucket_cap_mb=0)
        draw = torch.Generator().manual_seed(self.rank)
        with model.join():
            for step in range(2 + 3 * self.rank):
                x = torch.randn(4, 2, generator=draw)
                if step % 2:
                    with torch.no_grad():
                        model(x)
                if step % 3 == 1:
                    with model.no_sync():
                        model(x).square().sum().backward()
                else:
                    model(x).square().sum().backward()
                    model.zero_grad()

        states = self.on_every_rank({name: value.tolist() for name, value in model.state_dict().items()})
        self.assertEqual(states[0], states[1])
        self.assertEqual(5 + 2, int(model.state_dict()["module.1.num_batches_tracked"]))

    def test_communication_hook_and_sparse_gradients(self) -> None:
        """A rank that has joined runs the hook on zeros, and gathers nothing."""
        module = nn.Sequential(nn.Embedding(5, 2, sparse=True), nn.Linear(2, 1))
        model = DataParallel(module)
        with model.join():
            for _ in range(1 + 2 * self.rank):
                model(torch.tensor([1, 3])).sum().backward()
        for parameter in module.parameters():
            assert parameter.grad is not None
            self.assertTrue(bool(parameter.grad.to_dense().abs().sum() > 0))
        hooked = DataParallel(Coded())
        hooked.register_comm_hook(_get_default_group(), default_hooks.allreduce_hook)
        with hooked.join():
            for step in range(1 + 2 * self.rank):
                hooked.zero_grad()
                self.train(hooked, step)
        if self.rank == 1:
            self.assert_mean(coded(hooked).p0, code(1, 2) / 2)

    def test_early_end_for_all(self) -> None:
        """throw_on_early_termination: every rank raises when the first has no inputs left."""
        model = DataParallel(Coded())
        with self.assertRaisesRegex(RuntimeError, "exhausted"), model.join(throw_on_early_termination=True):
            for step in range(1 + 2 * self.rank):
                self.train(model, step)

    def test_beside_other_joinables(self) -> None:
        """It works after a joinable that gets the context's notification instead, and before a sharded optimizer."""
        model = DataParallel(Coded())
        first = _Silent()
        optimizer = ZeroRedundancyOptimizer(model.parameters(), optimizer_class=torch.optim.SGD, lr=1.0)
        with Join([first, model, optimizer], divide_by_initial_world_size=False):
            for step in range(1 + self.rank):
                Join.notify_join_context(first)
                self.train(model, step)
                self.assert_mean(coded(model).p0, code(1, 1) if step else mean_code(2))
                optimizer.step()
                optimizer.zero_grad()

        # In the last step the optimizer updates the parameters whose state rank 1 holds; both end with rank 1's model.
        states = self.on_every_rank([parameter.tolist() for parameter in model.parameters()])
        self.assertEqual(states[0], states[1])
        self.assertIn(-(mean_code(2) + code(1, 1)), [values[0] for values in states[0]])

    def test_freezing_is_refused_inside(self) -> None:
        """A rank that has joined could not follow."""
        model = DataParallel(Coded())
        with self.assertRaisesRegex(Unsupported, "frozen_dynamic"), model.join():
            self.train(model)
            coded(model).p0.requires_grad_(False)
            self.train(model)

    def test_switched_off(self) -> None:
        """enable=False costs nothing."""
        model = DataParallel(Coded())
        begin = self.mark()
        with model.join(enable=False):
            self.train(model)

        self.assertEqual([Op.ALL_REDUCE], [record.op for record in log().records[begin:]])


class _Silent(Joinable):
    """Communicates nothing itself."""

    def __init__(self) -> None:
        super().__init__()

    def join_hook(self, **kwargs: Any) -> JoinHook:
        return JoinHook()

    @property
    def join_device(self) -> torch.device:
        return torch.device("cpu")

    @property
    def join_process_group(self) -> Any:
        return _get_default_group()
