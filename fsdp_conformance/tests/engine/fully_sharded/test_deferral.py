"""Deferred reductions unit by unit, parameters kept between micro-batches, and what is refused meanwhile."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from fsdp_conformance.engine.errors import ParameterReplaced, TrainingStateError
from fsdp_conformance.engine.fully_sharded.wrapper import FullyShardedDataParallel
from fsdp_conformance.engine.sharding_strategy import ShardingStrategy
from fsdp_conformance.tests.engine.fully_sharded.sharded_ranks import (
    LEARNING_RATE,
    ShardedTestCase,
    batch,
    chain,
    forward_sum,
    sharded,
)


def _inner(model: FullyShardedDataParallel) -> list[FullyShardedDataParallel]:
    """The wrappers inside."""
    return [each for each in model.modules() if isinstance(each, FullyShardedDataParallel) and each is not model]


class TestDeferral(ShardedTestCase):
    """Three stages and a root with its own layer."""

    def _reductions(self) -> int:
        return sum("reduce_scatter" in line for line in self.schedule())

    def _gathers(self) -> int:
        return sum("all_gather" in line for line in self.schedule())

    def _backward(self, model: nn.Module, step: int = 0) -> None:
        model(batch(self.rank, step)).sum().backward()

    def test_one_unit_alone(self) -> None:
        """Without recursion the root alone is deferred, and its inner units are reduced after each backward."""
        model = sharded(chain())
        self.schedule()
        with model.no_sync(recurse=False):
            self._backward(model)
        self.assertEqual(3, self._reductions())
        self._backward(model, 1)
        self.assertEqual(4, self._reductions())
        expected = sharded(chain())
        for step in range(2):
            self._backward(expected, step)
        for mine, theirs in zip(model.parameters(), expected.parameters(), strict=True):
            torch.testing.assert_close(mine.grad, theirs.grad, rtol=0, atol=0)

    def test_an_inner_unit(self) -> None:
        """An inner unit's own context defers that unit alone."""
        model = sharded(chain())
        self.schedule()
        with _inner(model)[1].no_sync():
            self._backward(model)
        self.assertEqual(3, self._reductions())

    def test_nesting_is_refused(self) -> None:
        """A second context, for the whole or for a unit, raises and leaves the first one on; contexts apart do not."""
        model = sharded(chain())
        with model.no_sync():
            for wrapper, names in ((model, "the root"), (_inner(model)[0], "0")):
                with (
                    self.assertRaisesRegex(TrainingStateError, f"no_sync is already on for .*{names}"),
                    wrapper.no_sync(),
                ):
                    pass
            self.assertFalse(any(unit.sync_gradients for unit in model.units))
        with model.no_sync(recurse=False), _inner(model)[0].no_sync():
            pass
        self.assertTrue(all(unit.sync_gradients for unit in model.units))

    def test_steps_are_refused(self) -> None:
        """An optimizer that has deferred parameters may not step; one of another model may, and both may afterwards."""
        model, other = sharded(chain()), nn.Linear(2, 2)
        optimizer = self.optimizer(model)
        before = [parameter.detach().clone() for parameter in model.parameters()]
        with model.no_sync():
            self._backward(model)
            self.optimizer(other).step()
            with self.assertRaisesRegex(TrainingStateError, "an optimizer steps inside no_sync"):
                optimizer.step()
        for parameter, value in zip(model.parameters(), before, strict=True):
            self.assertTrue(torch.equal(parameter, value))
        self._backward(model, 1)
        optimizer.step()
        self.assertFalse(all(torch.equal(p, value) for p, value in zip(model.parameters(), before, strict=True)))

    def test_clipping_is_refused(self) -> None:
        """The norm of gradients that have yet to be reduced is unknown: neither 0 nor this rank's."""
        model = sharded(chain())
        with model.no_sync():
            self._backward(model)
            with self.assertRaisesRegex(TrainingStateError, "2, 1, 0, the root have yet to be reduced"):
                model.clip_grad_norm_(1.0)
        with self.assertRaisesRegex(TrainingStateError, "outside of no_sync"):
            model.clip_grad_norm_(1.0)
        self._backward(model, 1)
        self.assertGreater(model.clip_grad_norm_(1.0).item(), 0.0)

    def test_kept_gathered(self) -> None:
        """Parameters are gathered once for several micro-batches, freed by the last, and gathered after a step."""
        model = sharded(chain(), sharding_strategy=ShardingStrategy.SHARD_GRAD_OP)
        optimizer = self.optimizer(model)
        for _ in range(2):
            self.schedule()
            with model.keep_gathered():
                self._backward(model)
                self.assertTrue(all(unit.is_unsharded for unit in model.units))
            self._backward(model, 1)
            self.assertFalse(any(unit.is_unsharded for unit in model.units))
            self.assertEqual(4, self._gathers())
            optimizer.step()
            optimizer.zero_grad()

    def test_kept_across_a_step(self) -> None:
        """Parameters that were kept are gathered again once the optimizer has written."""
        model, expected = (sharded(chain(), sharding_strategy=ShardingStrategy.SHARD_GRAD_OP) for _ in range(2))
        with model.keep_gathered():
            losses = self.train(model)
        self.assertEqual(losses, self.train(expected))

    @pytest.mark.slow
    def test_whatever_the_optimizer_does(self) -> None:
        """
        Gathered parameters are gathered again after a step of any of torch's optimizers, fused ones too, which do not
        count as writes for autograd. So are those of a unit that an earlier forward or a user has gathered.
        """

        def build(model: nn.Module, *, fused: bool) -> torch.optim.Optimizer:
            return torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE, fused=fused, foreach=False)

        def step(model: nn.Module, optimizer: torch.optim.Optimizer, *, leaves_gathered: bool) -> Tensor:
            loss = forward_sum(model, batch(self.rank))
            loss.backward()
            if leaves_gathered:
                forward_sum(model, batch(self.rank))
                for unit in FullyShardedDataParallel.fsdp_modules(model):
                    unit.unshard(async_op=True)
            optimizer.step()
            optimizer.zero_grad()
            return loss.detach()

        for fused in (True, False):
            model, expected = (sharded(chain()) for _ in range(2))
            optimizers = [build(each, fused=fused) for each in (model, expected)]
            for _ in range(3):
                kept = step(model, optimizers[0], leaves_gathered=True)
                self.assertEqual(step(expected, optimizers[1], leaves_gathered=False), kept)

    def test_a_step_between_forward_and_backward(self) -> None:
        """It raises, by whatever optimizer; one that has only parameters without a gradient writes nothing."""
        for fused in (True, False):
            model = sharded(chain())
            optimizer = torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE, fused=fused, foreach=False)
            loss = forward_sum(model, batch(self.rank))
            optimizer.step()
            loss.backward()
            loss = forward_sum(model, batch(self.rank))
            optimizer.step()
            with self.assertRaisesRegex(ParameterReplaced, "modified between forward and backward"):
                loss.backward()
            model.recover()

    @pytest.mark.slow
    def test_a_hook_may_write_anything(self) -> None:
        """A communication hook that fills a shard with zeros gives gradients of zeros, not an error about order."""
        model = sharded(chain())

        def clear(state: object, gradient: Tensor, shard: Tensor) -> None:
            shard.zero_()

        model.register_comm_hook(None, clear)
        self._backward(model)
        self.assertEqual(0.0, sum(p.grad.abs().sum().item() for p in model.parameters() if p.grad is not None))
