"""Parameters that take no part in a backward, on some of two or three ranks or on all."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd import Function
from torch.utils.checkpoint import checkpoint

from fsdp_conformance.engine.data_parallel.reducer import Phase
from fsdp_conformance.engine.errors import ReductionUnfinished
from fsdp_conformance.tests.engine.data_parallel.reducer_ranks import (
    KINDS,
    Coded,
    ReducerTestCase,
    code,
    mean_code,
    pattern,
)

c10d: Any = dist  # names that it does not export


class _NoGradient(Function):
    """Passes a value on, but no gradient back."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        return None


class Unused(ReducerTestCase):
    """Unused parameters are found and agreed on; those that no rank used are left alone."""

    def test_unused_without_being_asked_for(self) -> None:
        """The next forward raises and names them; the one after that works."""
        module = Coded()
        reducer = self.reducer_of(module)
        self.forward(reducer, module, use=(0, 2, 3)).backward()
        self.assertIs(Phase.REDUCING, reducer.phase)
        with self.assertRaises(ReductionUnfinished) as caught:
            reducer.prepare_for_forward()
        self.assertIn("the last backward produced no gradient for p1 (index 1)", str(caught.exception))
        self.assertIn("find_unused_parameters=True", str(caught.exception))

        module.zero_grad()
        self.forward(reducer, module).backward()
        self.assert_means(module)

    def test_names_are_listed_by_detail_level(self) -> None:
        """Twenty names at most, or all of them."""
        module = Coded([(1,)] * 30)
        reducer = self.reducer_of(module)
        for level, expected in ((c10d.DebugLevel.OFF, "and 9 more"), (c10d.DebugLevel.DETAIL, r"p29 \(index 29\)")):
            c10d.set_debug_level(level)
            self.forward(reducer, module, use=(0,)).backward()
            with self.assertRaisesRegex(ReductionUnfinished, rf"p1 \(index 1\).*{expected}"):
                reducer.prepare_for_forward()
            module.zero_grad()
        c10d.set_debug_level(c10d.DebugLevel.OFF)

    def test_the_used_flags_are_summed_once_and_awaited_by_who_asks(self) -> None:
        """One all-reduce of a flag per parameter, after the buckets. A rank that used all never waits for it."""
        module = Coded()
        reducer = self.reducer_of(module, find_unused_parameters=True)
        begin = self.mark()
        self.forward(reducer, module, use=None if self.rank == 0 else (0, 1, 2)).backward()

        self.assertEqual([44, 28, 20, 12, 16], self.since(begin))
        self.assertEqual(self.rank == 1, reducer._used._global is not None)
        self.assert_mean(module.p3, ranks=(0,))

    def test_a_use_under_deferral_counts(self) -> None:
        """A parameter that a deferred backward used counts as used, even if the synchronised one does not use it."""
        for kind in KINDS:
            module = Coded()
            reducer = self.reducer_of(module, find_unused_parameters=True, **kind)
            self.forward(reducer, module, use=(0, 1), sync=False).backward()
            self.forward(reducer, module, use=(1, 2)).backward()

            self.assert_mean(module.p0)
            self.assert_mean(module.p1, 2 * mean_code(2))
            self.assert_mean(module.p2)
            self.assertIsNone(module.p3.grad)

    def test_an_undefined_gradient_is_no_use(self) -> None:
        """A function that returns None for it leaves the parameter unused, although the graph reaches it."""
        module = Coded()
        reducer = self.reducer_of(module, find_unused_parameters=True)
        reducer.prepare_for_forward()
        output = module(code(self.rank), (0, 1)) + _NoGradient.apply(module.p2).sum()
        reducer.prepare_for_backward([output])
        output.backward()

        self.assert_mean(module.p0)
        self.assertIsNone(module.p2.grad)
        self.assertIsNone(module.p3.grad)

    def test_an_output_that_the_loss_does_not_use(self) -> None:
        """The graph reaches its parameters, but they get no gradient: None stays None, and nothing waits for them."""
        module = Coded()
        reducer = self.reducer_of(module, find_unused_parameters=True)
        for step in range(2):
            reducer.prepare_for_forward()
            seen, unseen = module(code(self.rank, step), (0, 1)), module(code(self.rank, step), (2, 3))
            reducer.prepare_for_backward([seen, unseen])
            seen.backward()

            self.assert_mean(module.p0, step=step)
            self.assert_mean(module.p1, step=step)
            self.assertIsNone(module.p2.grad)
            module.zero_grad()

    def test_unused_buckets_go_early(self) -> None:
        """Parameters that no living forward reaches are marked at the first gradient: later buckets need not wait."""
        module = Coded()
        reducer = self.reducer_of(module, find_unused_parameters=True)
        begin = self.mark()
        issued: list[int] = []
        module.p0.register_hook(lambda _: issued.append(len(self.since(begin))))
        reducer.prepare_for_forward()
        total: Tensor = torch.zeros(())
        for index in (0, 2):  # 2 is ready first; 3, before it in the order, is unused
            parameter = module.get_parameter(f"p{index}")
            total = total + (parameter * pattern(parameter.shape)).sum() * code(self.rank)
        reducer.prepare_for_backward([total])
        total.backward()

        # p3, p2 and p1 are sent before p0's gradient is ready.
        self.assertEqual([3], issued)

    def test_reentrant_checkpoints_hide_their_graph(self) -> None:
        """Parameters inside are not taken for unused: the reference raises here."""
        module = Coded()
        reducer = self.reducer_of(module, find_unused_parameters=True)
        for step in range(2):
            reducer.prepare_for_forward()
            x = torch.tensor(code(self.rank, step), requires_grad=True)
            inner = checkpoint(lambda x: module.terms(1.0, (1,))[0] * x, x, use_reentrant=True)
            output = module(code(self.rank, step), (0,)) + inner
            reducer.prepare_for_backward([output])
            output.backward()

            self.assert_mean(module.p0, step=step)
            self.assert_mean(module.p1, step=step)
            self.assertIsNone(module.p2.grad)
            module.zero_grad()

    def test_a_parameter_as_output(self) -> None:
        """A parameter that forward returns counts as used."""
        module = Coded()
        reducer = self.reducer_of(module, find_unused_parameters=True)
        for step in range(3):
            reducer.prepare_for_forward()
            reducer.prepare_for_backward([module.p0])
            (module.p0 * pattern((3,)) * code(self.rank, step)).sum().backward()

            self.assert_mean(module.p0, step=step)
            module.zero_grad()
        # Hooks on a leaf outlive its forward: that of the last forward is left, besides the reducer's.
        self.assertEqual(2, len(module.p0._backward_hooks or {}))

    def test_the_answer_is_each_steps_own(self) -> None:
        """Used, unused and used again: flags do not carry over to the next reduction."""
        module = Coded()
        reducer = self.reducer_of(module, find_unused_parameters=True)
        for step, use in enumerate(((0, 1), (1, 2), (0, 3))):
            self.forward(reducer, module, step, use=use).backward()
            for index in range(4):
                parameter = module.get_parameter(f"p{index}")
                if index in use:
                    self.assert_mean(parameter, step=step)
                else:
                    self.assertIsNone(parameter.grad, f"step {step} p{index}")
            module.zero_grad()


class ThreeRanks(ReducerTestCase):
    """An odd world: the reciprocal is rounded."""

    @property
    def world_size(self) -> int:
        return 3

    @pytest.mark.nightly
    def test_mean(self) -> None:
        """3, 6 and 12 make 7."""
        for kind in KINDS:
            module = Coded()
            reducer = self.reducer_of(module, **kind)
            self.forward(reducer, module).backward()

            self.assertEqual(7.0, mean_code(3))
            self.assert_means(module)

    def test_unused_on_some_ranks(self) -> None:
        """The other ranks count as zero, and every rank gets the gradient, whatever it had before."""
        for kind in KINDS:
            module = Coded()
            reducer = self.reducer_of(module, find_unused_parameters=True, **kind)
            use = {0: (0, 1), 1: (1, 2), 2: (0, 1, 2)}[self.rank]
            self.forward(reducer, module, use=use).backward()

            self.assert_mean(module.p0, ranks=(0, 2))
            self.assert_mean(module.p1)
            self.assert_mean(module.p2, ranks=(1, 2))
            self.assertIsNone(module.p3.grad)

    def test_unused_everywhere_is_left_as_it_was(self) -> None:
        """
        None stays None, and an old value keeps its bits although it took part in the sum.

        A rounded third of 0.7, three times, is not 0.7: the reference's views into buckets show it.
        """
        for kind in KINDS:
            module = Coded()
            reducer = self.reducer_of(module, find_unused_parameters=True, **kind)
            self.forward(reducer, module, use=(1, 3)).backward()
            old = torch.tensor([0.1, 0.3, 0.5, 0.7, 0.9])
            assert module.p1.grad is not None
            module.p1.grad.copy_(old)
            self.assertFalse(torch.equal(old, old * (1 / 3) + old * (1 / 3) + old * (1 / 3)))
            module.p3.grad = None
            self.forward(reducer, module, use=(0, 3)).backward()

            self.assertTrue(torch.equal(old, module.p1.grad), msg=f"{kind} {module.p1.grad}")
            self.assertIsNone(module.p2.grad)
            self.assert_mean(module.p0)
            self.assert_mean(module.p3)

    @pytest.mark.slow
    def test_an_old_value_is_part_of_what_others_average(self) -> None:
        """Ranks 1 and 2 do not use p0 this time: the mean of their old values and of rank 0's sum is kept."""
        for kind in KINDS:
            module = Coded()
            reducer = self.reducer_of(module, find_unused_parameters=True, **kind)
            self.forward(reducer, module, use=(0, 1)).backward()
            self.forward(reducer, module, use=(0, 1) if self.rank == 0 else (1,)).backward()

            self.assert_mean(module.p0, mean_code(3) + code(0) / 3)
