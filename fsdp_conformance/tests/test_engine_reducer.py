"""Gradients are averaged bucket by bucket, in order, exactly once, over exactly the ranks that should take part."""

from __future__ import annotations

import dataclasses
import gc
import weakref
from collections import OrderedDict, deque
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any, NamedTuple, cast

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.autograd import Function
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks
from torch.distributed.distributed_c10d import _get_default_group
from torch.futures import Future
from torch.multiprocessing.reductions import StorageWeakRef
from torch.nn.utils.rnn import pack_sequence
from torch.utils.checkpoint import checkpoint

from fsdp_conformance.engine.bucket_assignment import MIB
from fsdp_conformance.engine.communication_hook import GradientBucket, checked_hook
from fsdp_conformance.engine.errors import (
    GradientRefused,
    GraphChanged,
    HookMisuse,
    MarkedReadyTwice,
    ReductionError,
    ReductionUnfinished,
    StructureMismatch,
)
from fsdp_conformance.engine.gradient_bucket import BucketParameter, DenseBucket, SparseBucket
from fsdp_conformance.engine.reducer import Phase, Reducer, ReducerConfig
from fsdp_conformance.engine.streams import Streams
from fsdp_conformance.engine.structures import tensors_in, with_tensors
from fsdp_conformance.engine.verification import verify_parameters
from fsdp_conformance.errors import ConfigError
from fsdp_conformance.harness.collective_log import log
from fsdp_conformance.history.collective import Op
from fsdp_conformance.tests.reducer_ranks import (
    SHAPES,
    Coded,
    ReducerTestCase,
    code,
    mean_code,
    pattern,
)

c10d: Any = dist  # names that it does not list

#: Both ways of keeping gradients.
KINDS: tuple[dict[str, Any], ...] = ({"gradient_as_bucket_view": False}, {"gradient_as_bucket_view": True})


class _NoGradient(Function):
    """Passes a value on, and no gradient back."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        return None


class Order(ReducerTestCase):
    """Buckets are issued in their order, whatever the order of readiness."""

    def test_mean_of_every_rank(self) -> None:
        """Each element is averaged once and stands where it belongs, in steps one after the other."""
        for kind in KINDS:
            module = Coded()
            reducer = self.reducer_of(module, **kind)
            for step in range(3):
                self.forward(reducer, module, step).backward()
                self.assert_means(module, step=step)
                module.zero_grad()

    def test_issued_in_order_although_ready_in_another(self) -> None:
        """
        The last parameter's bucket comes first, and waits for it although all others are ready before it.

        The chain of the forward makes p3 (44 bytes) the last to be ready.
        """
        module = Coded()
        reducer = self.reducer_of(module)
        ready: list[str] = []
        for name, parameter in module.named_parameters():
            parameter.register_post_accumulate_grad_hook(lambda _, name=name: ready.append(name))
        begin = self.mark()
        reducer.prepare_for_forward()
        x = torch.tensor(code(self.rank), requires_grad=True)
        for index in (3, 2, 1, 0):  # a chain: the gradient of p3 needs those of all others
            parameter = module.get_parameter(f"p{index}")
            x = x * 1.0 + (parameter * pattern(parameter.shape)).sum() * code(self.rank)
        reducer.prepare_for_backward([x])
        x.backward()

        self.assertEqual(["p0", "p1", "p2", "p3"], ready)
        self.assertEqual([["p3"], ["p2"], ["p1"], ["p0"]], reducer.bucket_names)
        self.assertEqual([44, 28, 20, 12], self.since(begin))
        self.assert_means(module)

    def test_buckets_are_issued_while_backward_runs(self) -> None:
        """The first bucket is on the wire before the last gradient is there."""
        module = Coded()
        reducer = self.reducer_of(module)
        begin = self.mark()
        issued: list[int] = []
        module.p0.register_hook(lambda _: issued.append(len(self.since(begin))))
        reducer.prepare_for_forward()
        total: Tensor = torch.zeros(())
        for index in (0, 1, 2, 3):
            parameter = module.get_parameter(f"p{index}")
            total = total + (parameter * pattern(parameter.shape)).sum() * code(self.rank)
        reducer.prepare_for_backward([total])
        total.backward()

        self.assertEqual([3], issued)
        self.assert_means(module)

    def test_several_dtypes_and_buckets(self) -> None:
        """A bucket has one dtype; each is averaged."""
        module = Coded()
        module.register_parameter("p4", nn.Parameter(torch.zeros(3, dtype=torch.float64)))
        module.register_parameter("p5", nn.Parameter(torch.zeros(2, dtype=torch.float64)))
        begin = self.mark()
        reducer = self.reducer_of(module, bucket_limits=(64,))
        self.forward(reducer, module).backward()

        self.assertEqual([["p3", "p2"], ["p5", "p4"], ["p1", "p0"]], reducer.bucket_names)
        self.assertEqual([72, 40, 32], self.since(begin))
        self.assertEqual((64, 64, 64), reducer.bucket_limits)
        self.assertEqual([72, 40, 32], reducer.bucket_nbytes)
        self.assert_means(module)

    def test_the_first_bucket_is_small(self) -> None:
        """With the default limits the last parameters, of 1 MiB, go first; the rest waits for 25 MiB."""
        module = Coded([(MIB // 4,)] * 4)
        reducer = Reducer(module.named_parameters())

        self.assertEqual([["p3"], ["p2", "p1", "p0"]], reducer.bucket_names)

    def test_averaged_before_the_sum(self) -> None:
        """float16 gradients of 2**15 on both ranks stay finite: their sum would not."""
        module = Coded([(1,)], dtype=torch.float16)
        reducer = self.reducer_of(module)
        reducer.prepare_for_forward()
        output = (module.p0 * 2.0**15).sum()
        reducer.prepare_for_backward([output])
        output.backward()

        assert module.p0.grad is not None
        self.assertEqual([2.0**15], module.p0.grad.tolist())

    def test_a_bucket_has_one_kind_of_member(self) -> None:
        """Two dtypes, no member, or two sparse members are refused."""
        members = [
            BucketParameter(0, "single", nn.Parameter(torch.zeros(1))),
            BucketParameter(1, "double", nn.Parameter(torch.zeros(1, dtype=torch.float64))),
        ]
        with self.assertRaisesRegex(ConfigError, "bucket of single, double .*but should be of one dtype"):
            DenseBucket(0, 1, members, gradient_as_view=False)
        with self.assertRaisesRegex(ConfigError, "bucket of nothing"):
            DenseBucket(0, 1, [], gradient_as_view=False)
        with self.assertRaisesRegex(ConfigError, "bucket of single, double, but should be one parameter with sparse"):
            SparseBucket(0, 1, members)

    def test_what_cannot_be_reduced_is_refused_when_it_is_made(self) -> None:
        """Two devices, a name twice, a sparse name that nobody has: all in one error."""
        parameter = nn.Parameter(torch.zeros(1))
        with self.assertRaises(ConfigError) as caught:
            Reducer(
                [("a", parameter), ("a", parameter), ("b", nn.Parameter(torch.zeros(1, device="meta")))], sparse=["c"]
            )

        self.assertEqual(4, len(caught.exception.problems), caught.exception.problems)
        with self.assertRaisesRegex(ConfigError, "bucket_limits="):
            ReducerConfig(bucket_limits=())

    def test_no_parameters(self) -> None:
        """Nothing to reduce is legal, and nothing is communicated."""
        begin = self.mark()
        reducer = Reducer([])
        reducer.prepare_for_forward()
        x = torch.ones(2, requires_grad=True)
        reducer.prepare_for_backward([x * 2])
        (x * 2).sum().backward()
        reducer.prepare_for_forward()

        self.assertEqual([], log().records[begin:])
        self.assertIs(Phase.IDLE, reducer.phase)


class ThreeRanks(ReducerTestCase):
    """An odd world: the reciprocal is rounded."""

    @property
    def world_size(self) -> int:
        return 3

    def test_mean(self) -> None:
        """3, 6 and 12 make 7."""
        for kind in KINDS:
            module = Coded()
            reducer = self.reducer_of(module, **kind)
            self.forward(reducer, module).backward()

            self.assertEqual(7.0, mean_code(3))
            self.assert_means(module)

    def test_unused_on_some_ranks(self) -> None:
        """Zeros of the others count, and every rank has the gradient, whatever it had before."""
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
        None stays None, and an old value stays bit for bit, though it took part in the sum.

        A third of 0.7, rounded, is not 0.7 when it is taken three times: the reference's views into buckets show it.
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

    def test_an_old_value_is_part_of_what_others_average(self) -> None:
        """Ranks 1 and 2 do not use p0 this time: the mean of their old values and of rank 0's sum is kept."""
        for kind in KINDS:
            module = Coded()
            reducer = self.reducer_of(module, find_unused_parameters=True, **kind)
            self.forward(reducer, module, use=(0, 1)).backward()
            self.forward(reducer, module, use=(0, 1) if self.rank == 0 else (1,)).backward()

            self.assert_mean(module.p0, mean_code(3) + code(0) / 3)


class Unused(ReducerTestCase):
    """Parameters that take no part are found, agreed on, and left alone where nobody used them."""

    def test_unused_without_being_asked_for(self) -> None:
        """The next forward raises and names them; the one after that goes on."""
        module = Coded()
        reducer = self.reducer_of(module)
        self.forward(reducer, module, use=(0, 2, 3)).backward()
        self.assertIs(Phase.REDUCING, reducer.phase)
        with self.assertRaises(ReductionUnfinished) as caught:
            reducer.prepare_for_forward()
        self.assertIn("the last backward gave no gradient to p1 (index 1), but should", str(caught.exception))
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
        """One all-reduce of a flag for each parameter, after the buckets; a rank that used all never waits for it."""
        module = Coded()
        reducer = self.reducer_of(module, find_unused_parameters=True)
        begin = self.mark()
        self.forward(reducer, module, use=None if self.rank == 0 else (0, 1, 2)).backward()

        self.assertEqual([44, 28, 20, 12, 16], self.since(begin))
        self.assertEqual(self.rank == 1, reducer._used.asked)
        self.assert_mean(module.p3, ranks=(0,))

    def test_a_use_under_deferral_counts(self) -> None:
        """What was used in a deferred backward is not unused, although the synchronised one does not use it."""
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
        """Its parameters are reached by the graph and get no gradient: None stays None, and nothing waits for them."""
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
        """What no living forward can reach is marked at the first gradient, so the buckets behind it need not wait."""
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

        # p3, p2 and p1 are on the wire before p0's own gradient is handed over.
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
        """A parameter that is returned as it is counts as used."""
        module = Coded()
        reducer = self.reducer_of(module, find_unused_parameters=True)
        for step in range(3):
            reducer.prepare_for_forward()
            reducer.prepare_for_backward([module.p0])
            (module.p0 * pattern((3,)) * code(self.rank, step)).sum().backward()

            self.assert_mean(module.p0, step=step)
            module.zero_grad()
        # Hooks on a leaf outlive its forward: one is left, of the last forward, beside the reducer's own.
        self.assertEqual(2, len(module.p0._backward_hooks or {}))

    def test_the_answer_is_each_steps_own(self) -> None:
        """Used, unused and used again: flags of one reduction are not those of the next."""
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


class Twice(ReducerTestCase):
    """A parameter's gradient is handed over once."""

    def _reentrant(self, reducer: Reducer, module: Coded, step: int = 0) -> Tensor:
        """The same parameter in two reentrant checkpoints: it gets a gradient in each."""
        reducer.prepare_for_forward()
        x = torch.tensor(code(self.rank, step), requires_grad=True)
        output: Tensor = module(code(self.rank, step), (1, 2, 3))
        for _ in range(2):
            inner: Tensor = checkpoint(lambda x: module.terms(1.0, (0,))[0] * x, x, use_reentrant=True)
            output = output + inner
        reducer.prepare_for_backward([output])
        return output

    def test_a_second_gradient_raises_and_names_the_parameter(self) -> None:
        """Two reentrant checkpoints share it; the error tells of static_graph."""
        module = Coded()
        reducer = self.reducer_of(module)
        with self.assertRaises(MarkedReadyTwice) as caught:
            self._reentrant(reducer, module).backward()

        self.assertIn("parameter p0 (index 0) got a second gradient in one reduction", str(caught.exception))
        self.assertIn("static_graph=True", str(caught.exception))

    def test_a_static_graph_allows_it(self) -> None:
        """Both gradients are summed, then averaged, in the first step and in later ones."""
        for kind in KINDS:
            module = Coded()
            reducer = self.reducer_of(module, static_graph=True, **kind)
            for step in range(4):
                self._reentrant(reducer, module, step).backward()

                self.assert_mean(module.p0, 2 * mean_code(2, step))
                self.assert_mean(module.p3, step=step)
                module.zero_grad()
            self.assertTrue(reducer.rebuilt)

    def test_wrongly_taken_for_unused(self) -> None:
        """An output in an object that is not looked into: the gradient comes unexpectedly, and the error says why."""
        module = Coded()
        reducer = self.reducer_of(module, find_unused_parameters=True)
        reducer.prepare_for_forward()
        hidden, shown = module(code(self.rank), (0,)), module(code(self.rank), (1,))
        reducer.prepare_for_backward([shown])
        with self.assertRaisesRegex(MarkedReadyTwice, "p0.*taken for unused"):
            (hidden + shown).backward()

    def test_training_goes_on_after_it(self) -> None:
        """Once every rank has raised, the next step is right."""
        module = Coded()
        reducer = self.reducer_of(module)
        with self.assertRaises(MarkedReadyTwice):
            self._reentrant(reducer, module).backward()
        module.zero_grad()
        self.forward(reducer, module, 1).backward()

        self.assert_means(module, step=1)


class Static(ReducerTestCase):
    """A graph that never changes is learnt in the first backward."""

    def test_unused_parameters_are_learnt(self) -> None:
        """Used nowhere: None for ever; used on one rank: averaged. Flags are summed in the first step only."""
        module = Coded()
        reducer = self.reducer_of(module, static_graph=True)
        use = (0, 2) if self.rank == 0 else (0,)
        for step in range(4):
            begin = self.mark()
            self.forward(reducer, module, step, use=use).backward()

            self.assert_mean(module.p0, step=step)
            self.assert_mean(module.p2, step=step, ranks=(0,))
            self.assertIsNone(module.p1.grad)
            self.assertEqual(5 if step == 0 else 4, len(self.since(begin)))
            module.zero_grad()

    def test_buckets_follow_the_first_backward(self) -> None:
        """They are rebuilt although some parameters are unused; those come last."""
        module = Coded()
        reducer = self.reducer_of(module, static_graph=True)
        for step in range(2):
            self.forward(reducer, module, step, use=(3, 0)).backward()
            module.zero_grad()

        self.assertTrue(reducer.rebuilt)
        self.assertEqual({"p1", "p2"}, {name for names in reducer.bucket_names[2:] for name in names})

    def test_deferred_backwards_come_first(self) -> None:
        """no_sync before the first synchronised backward: the reference asserts here."""
        module = Coded()
        reducer = self.reducer_of(module, static_graph=True)
        for step in range(3):
            self.forward(reducer, module, step, sync=False).backward()
            self.forward(reducer, module, step).backward()

            for parameter in module.parameters():
                self.assert_mean(parameter, 2 * mean_code(2, step))
            module.zero_grad()

    def test_a_graph_that_changes_is_refused(self) -> None:
        """A parameter that the first backward did not use gets a gradient."""
        module = Coded()
        reducer = self.reducer_of(module, static_graph=True)
        self.forward(reducer, module, use=(0, 1, 2)).backward()
        with self.assertRaisesRegex(GraphChanged, "parameter p3 got 1 gradients.*should get 0 as in the first"):
            self.forward(reducer, module).backward()

    def test_a_graph_that_shrinks_is_refused(self) -> None:
        """A parameter that the first backward used gets none: the next forward says so."""
        module = Coded()
        reducer = self.reducer_of(module, static_graph=True)
        self.forward(reducer, module).backward()
        module.zero_grad()
        self.forward(reducer, module, use=(0, 1, 2)).backward()
        with self.assertRaisesRegex(ReductionUnfinished, r"p3 \(index 3\).*declared static"):
            reducer.prepare_for_forward()


class Rebuild(ReducerTestCase):
    """After the first backward buckets follow the readiness of the first rank."""

    def _chain(self, reducer: Reducer, module: Coded, step: int, order: tuple[int, ...]) -> Tensor:
        """A forward in which the parameters become ready in this order."""
        reducer.prepare_for_forward()
        x: Tensor = torch.zeros(())
        for index in reversed(order):
            parameter = module.get_parameter(f"p{index}")
            x = x + (parameter * pattern(parameter.shape)).sum() * code(self.rank, step)
        reducer.prepare_for_backward([x])
        return x

    def test_the_order_is_that_of_the_first_rank(self) -> None:
        """Rank 1 is ready in another order, and takes over rank 0's: one broadcast, before the second forward."""
        module = Coded()
        reducer = self.reducer_of(module)
        order = (1, 3, 0, 2) if self.rank == 0 else (0, 1, 2, 3)
        begin = self.mark()
        for step in range(4):
            self._chain(reducer, module, step, order).backward()
            self.assert_means(module, step=step)
            module.zero_grad()

        self.assertEqual([["p1"], ["p3"], ["p0"], ["p2"]], reducer.bucket_names)
        self.assertEqual([4 * 8], self.since(begin, Op.BROADCAST))
        self.assertEqual([44, 28, 20, 12] + [20, 44, 12, 28] * 3, self.since(begin))

    def test_limits_hold_in_the_new_order(self) -> None:
        """The first bucket is the small one again."""
        module = Coded()
        reducer = self.reducer_of(module, bucket_limits=(1, 50))
        self._chain(reducer, module, 0, (1, 3, 0, 2)).backward()
        self._chain(reducer, module, 1, (1, 3, 0, 2)).backward()

        self.assertEqual([["p1"], ["p3", "p0"], ["p2"]], reducer.bucket_names)
        self.assertEqual((1, 50, 50), reducer.bucket_limits)

    def test_not_where_unused_parameters_are_looked_for(self) -> None:
        """Readiness says nothing there."""
        module = Coded()
        reducer = self.reducer_of(module, find_unused_parameters=True)
        begin = self.mark()
        for step in range(3):
            self.forward(reducer, module, step).backward()

        self.assertFalse(reducer.rebuilt)
        self.assertEqual([], self.since(begin, Op.BROADCAST))

    def test_gradients_survive_it(self) -> None:
        """What was averaged in the first step, and kept, is added to in the second."""
        for kind in KINDS:
            module = Coded()
            reducer = self.reducer_of(module, **kind)
            for step in range(3):
                self._chain(reducer, module, step, (2, 0, 1, 3)).backward()

            for parameter in module.parameters():
                self.assert_mean(parameter, sum(mean_code(2, step) for step in range(3)))

    def test_a_wrong_count_is_an_error_on_every_rank(self) -> None:
        """Rank 0 lost a parameter on the way: nobody goes on with buckets that differ."""
        module = Coded()
        reducer = self.reducer_of(module)
        self.forward(reducer, module).backward()
        if self.rank == 0:
            assert reducer._rebuild_order is not None
            reducer._rebuild_order.pop()
        with self.assertRaisesRegex(ReductionError, "3 gradients were ready in the first backward, but should be 4"):
            reducer.prepare_for_forward()


class Accumulation(ReducerTestCase):
    """What is reduced, when, and what it is added to."""

    def test_deferred_gradients_are_reduced_with_the_next(self) -> None:
        """Local sums first, the mean of what has been accumulated then; any interleaving, from the first forward on."""
        for kind in KINDS:
            module = Coded()
            reducer = self.reducer_of(module, **kind)
            begin = self.mark()
            for sync in (False, False):
                self.forward(reducer, module, sync=sync).backward()
            self.assertEqual([], log().records[begin:])
            self.assert_mean(module.p0, 2 * code(self.rank))
            for sync in (True, True, False, True):
                self.forward(reducer, module, sync=sync).backward()

            for parameter in module.parameters():
                self.assert_mean(parameter, 6 * mean_code(2))

    def test_two_forwards_then_two_backwards(self) -> None:
        """Both are averaged; the reference leaves the second one local."""
        for kind in KINDS:
            for first in (0, 1):
                module = Coded()
                reducer = self.reducer_of(module, **kind)
                outputs = [self.forward(reducer, module, step) for step in (0, 1)]
                outputs[first].backward()
                outputs[1 - first].backward()

                for parameter in module.parameters():
                    self.assert_mean(parameter, mean_code(2) + mean_code(2, 1))

    def test_two_forwards_with_different_parameters(self) -> None:
        """Each backward is through its own graph; what only the other one reaches is not taken for used up."""
        for order in ((0, 1), (1, 0)):
            module = Coded()
            reducer = self.reducer_of(module, find_unused_parameters=True)
            outputs = [self.forward(reducer, module, 0, (0, 1)), self.forward(reducer, module, 1, (1, 2))]
            for index in order:
                outputs[index].backward()

            self.assert_mean(module.p0)
            self.assert_mean(module.p1, mean_code(2) + mean_code(2, 1))
            self.assert_mean(module.p2, step=1)
            self.assertIsNone(module.p3.grad)

    def test_two_forwards_in_one_backward(self) -> None:
        """One reduction of the sum, also of parameters that only one of them uses."""
        module = Coded()
        reducer = self.reducer_of(module, find_unused_parameters=True)
        first, second = self.forward(reducer, module, 0, (0, 1)), self.forward(reducer, module, 1, (1, 2))
        begin = self.mark()
        (first + second).backward()

        self.assertEqual(5, len(self.since(begin)))
        self.assert_mean(module.p0)
        self.assert_mean(module.p1, mean_code(2) + mean_code(2, 1))
        self.assert_mean(module.p2, step=1)

    def test_two_backwards_of_one_forward(self) -> None:
        """Each is averaged, and the second added to the first."""
        for kind in KINDS:
            module = Coded()
            reducer = self.reducer_of(module, **kind)
            output = self.forward(reducer, module)
            output.backward(retain_graph=True)
            output.backward()

            for parameter in module.parameters():
                self.assert_mean(parameter, 2 * mean_code(2))

    def test_a_deferred_and_a_synchronised_forward(self) -> None:
        """Each backward is treated as its own forward was, in either order."""
        for synchronised_first in (True, False):
            module = Coded()
            reducer = self.reducer_of(module)
            synchronised = self.forward(reducer, module)
            deferred = self.forward(reducer, module, sync=False)
            begin = self.mark()
            if synchronised_first:
                synchronised.backward()
                self.assertEqual(4, len(self.since(begin)))
                deferred.backward()
                self.assertEqual(4, len(self.since(begin)))
                self.assert_mean(module.p0, mean_code(2) + code(self.rank))
            else:
                deferred.backward()
                self.assertEqual(0, len(self.since(begin)))
                self.assert_mean(module.p0, code(self.rank))
                synchronised.backward()
                self.assert_mean(module.p0, 2 * mean_code(2))

    def test_a_synchronised_forward_without_backward(self) -> None:
        """It is forgotten: by a normal iteration, and by a deferred one, which stays local."""
        for find_unused in (False, True):
            module = Coded()
            reducer = self.reducer_of(module, find_unused_parameters=find_unused)
            self.forward(reducer, module)
            self.forward(reducer, module, 1).backward()
            self.assert_means(module, step=1)

            module.zero_grad()
            begin = self.mark()
            self.forward(reducer, module)
            self.forward(reducer, module, sync=False).backward()
            self.assertEqual([], self.since(begin))
            self.assert_mean(module.p0, code(self.rank))

    def test_outputs_with_a_backward_each(self) -> None:
        """Of modules that share nothing: one reduction, which ends with the second backward."""
        module = Coded()
        reducer = self.reducer_of(module)
        for step in range(3):
            reducer.prepare_for_forward()
            outputs = [module(code(self.rank, step), use) for use in ((0, 2), (1, 3))]
            reducer.prepare_for_backward(outputs)
            outputs[0].backward()
            self.assertIs(Phase.REDUCING, reducer.phase)
            outputs[1].backward()
            self.assertIs(Phase.IDLE, reducer.phase)

            self.assert_means(module, step=step)
            module.zero_grad()

    def test_gradients_of_inputs_alone_begin_nothing(self) -> None:
        """torch.autograd.grad passes the hooks of outputs, but no parameter gets a gradient."""
        for find_unused in (False, True):
            module = Coded()
            reducer = self.reducer_of(module, find_unused_parameters=find_unused)
            begin = self.mark()
            reducer.prepare_for_forward()
            x = torch.tensor(code(self.rank), requires_grad=True)
            output = module(1.0, (0, 1, 2)) * x
            reducer.prepare_for_backward([output])
            torch.autograd.grad(output, x)
            self.forward(reducer, module).backward()

            self.assertEqual(4 + find_unused, len(self.since(begin)))
            self.assert_means(module)

    def test_a_loss_beside_the_outputs(self) -> None:
        """An auxiliary loss that forward left on the module takes part in the same backward."""
        module = Coded()
        reducer = self.reducer_of(module)
        for step in range(2):
            reducer.prepare_for_forward()
            output, aside = module(code(self.rank, step), (2, 3)), module(code(self.rank, step), (0, 1))
            reducer.prepare_for_backward([output])
            (aside + output).backward()

            self.assert_means(module, step=step)
            module.zero_grad()

    def test_higher_derivatives_are_refused(self) -> None:
        """An average would not be part of the graph."""
        module = nn.Linear(2, 1)
        reducer = self.reducer_of(module)
        reducer.prepare_for_forward()
        output = module(torch.ones(1, 2)).square().sum()
        reducer.prepare_for_backward([output])
        with self.assertRaisesRegex(GradientRefused, "gradient of (weight|bias) has a graph"):
            output.backward(create_graph=True)


class Memory(ReducerTestCase):
    """Layout, and who owns the memory of a gradient."""

    def test_layout_of_the_parameter(self) -> None:
        """Channels-last and transposed parameters have gradients of their own strides, with the right elements."""
        for kind in KINDS:
            module: Any = nn.Module()
            module.last = nn.Parameter(torch.zeros(2, 3, 5, 7).to(memory_format=torch.channels_last))
            module.turned = nn.Parameter(torch.zeros(5, 3).t())
            module.gaps = nn.Parameter(torch.zeros(4, 6)[:, ::2])
            reducer = self.reducer_of(module, bucket_limits=(10_000,), **kind)
            for _ in range(2):
                reducer.prepare_for_forward()
                output = torch.stack(
                    [(p * pattern(p.shape)).sum() * code(self.rank) for p in module.parameters()]
                ).sum()
                reducer.prepare_for_backward([output])
                output.backward()

                for name, parameter in module.named_parameters():
                    self.assert_mean(parameter)
                    assert parameter.grad is not None
                    if name != "gaps":
                        self.assertEqual(parameter.stride(), parameter.grad.stride(), name)
                module.zero_grad()

    def test_views_into_a_bucket(self) -> None:
        """Gradients lie in one storage, stay in it over steps, and are written in place."""
        module = Coded()
        reducer = self.reducer_of(module, bucket_limits=(10_000,), gradient_as_bucket_view=True)
        addresses = set()
        for step in range(3):
            self.forward(reducer, module, step).backward()
            storages = {p.grad.untyped_storage().data_ptr() for p in module.parameters() if p.grad is not None}
            self.assertEqual(1, len(storages))
            if step:  # buckets are laid out anew after the first step
                addresses |= storages
            self.assert_means(module, step=step)
            module.zero_grad(set_to_none=step == 1)

        self.assertEqual(1, len(addresses))

    def test_a_view_cannot_be_detached_in_place(self) -> None:
        """torch says so; a gradient that is no view of a bucket can be."""
        for kind in KINDS:
            module = Coded()
            reducer = self.reducer_of(module, **kind)
            self.forward(reducer, module).backward()
            assert module.p0.grad is not None
            if kind["gradient_as_bucket_view"]:
                with self.assertRaisesRegex(RuntimeError, "detach"):
                    module.p0.grad.detach_()
            else:
                module.p0.grad.detach_()
                self.assert_mean(module.p0)

    def test_a_gradient_that_somebody_kept(self) -> None:
        """It is not written again once it was dropped from the parameter."""
        module = Coded()
        reducer = self.reducer_of(module, bucket_limits=(10_000,))
        kept = []
        for step in range(3):
            self.forward(reducer, module, step).backward()
            kept.append(module.p1.grad)
            module.zero_grad(set_to_none=True)

        for step, grad in enumerate(kept):
            assert grad is not None
            self.assertTrue(torch.equal(pattern((5,)) * mean_code(2, step), grad))

    def test_a_gradient_that_exists_is_written_in_place(self) -> None:
        """Zeroed, not dropped: it remains the same tensor, as with an unwrapped module."""
        for kind in KINDS:
            module = Coded()
            reducer = self.reducer_of(module, **kind)
            for step in range(2):
                self.forward(reducer, module, step).backward()
                module.zero_grad(set_to_none=False)
            kept = module.p1.grad
            self.forward(reducer, module, 3).backward()

            self.assertIs(kept, module.p1.grad)
            self.assert_means(module, step=3)

    def test_nothing_is_held_beside_the_gradients(self) -> None:
        """After a backward a bucket's buffer belongs to the gradients: with them it goes."""
        module = Coded()
        reducer = self.reducer_of(module, bucket_limits=(10_000,))
        self.forward(reducer, module).backward()
        assert module.p1.grad is not None
        storage = StorageWeakRef(module.p1.grad.untyped_storage())
        self.assertFalse(storage.expired())
        module.zero_grad()
        for _ in range(50):
            dist.barrier()  # gloo's threads, too, let go of what they reduced, some time after they have
        self.assertTrue(storage.expired())

    def test_a_reducer_that_is_dropped_leaves_nothing_behind(self) -> None:
        """Neither hooks nor itself; and the gradients stay local then."""
        module = Coded()
        reducer = self.reducer_of(module)
        self.forward(reducer, module).backward()
        forgotten = weakref.ref(reducer)
        del reducer
        gc.collect()
        self.assertIsNone(forgotten())
        module.zero_grad()
        begin = self.mark()
        module(code(self.rank)).backward()

        self.assertEqual([], log().records[begin:])
        self.assert_mean(module.p0, code(self.rank))

    def test_a_second_reducer_takes_over(self) -> None:
        """Gradients are averaged once; the first one refuses to go on."""
        module = Coded()
        first = self.reducer_of(module)
        second = self.reducer_of(module)
        begin = self.mark()
        self.forward(second, module).backward()

        self.assertEqual(4, len(self.since(begin)))
        self.assert_means(module)
        with self.assertRaisesRegex(ReductionError, "another one has taken over its parameters"):
            first.prepare_for_forward()

    def test_the_hooks_of_a_parameter_survive_a_cast(self) -> None:
        """Data that was replaced and put back gives a parameter another AccumulateGrad node, which changes nothing."""
        module = Coded()
        reducer = self.reducer_of(module, find_unused_parameters=True)
        self.forward(reducer, module).backward()
        module.zero_grad()
        module.double().float()
        self.forward(reducer, module, 1).backward()

        self.assert_means(module, step=1)


class Sparse(ReducerTestCase):
    """Sparse gradients are averaged as their dense twins are."""

    def _gradients(
        self, *, sparse: bool, find_unused: bool = False, steps: int = 3, skip: Callable[[int], bool] | None = None
    ) -> list[Tensor | None]:
        """The embedding's dense gradients, step by step."""
        torch.manual_seed(5)
        module: Any = nn.Module()
        module.embedding = nn.Embedding(11, 3, sparse=sparse)
        module.dense = nn.Parameter(torch.zeros(5))
        reducer = self.reducer_of(
            module, sparse=["embedding.weight"] if sparse else [], find_unused_parameters=find_unused
        )
        found: list[Tensor | None] = []
        for step in range(steps):
            module.zero_grad()
            reducer.prepare_for_forward()
            output = (module.dense * pattern((5,))).sum() * code(self.rank, step)
            if skip is None or not skip(step):
                # Rank 1 has more ids, some twice, some rank 0 has as well.
                ids = torch.tensor([[2, 5, 2], [5, 7, 10, 0, 7]][self.rank])
                output = output + (module.embedding(ids) * pattern((len(ids), 3)) * code(self.rank, step)).sum()
            reducer.prepare_for_backward([output])
            output.backward()
            self.assert_mean(module.dense, step=step)
            grad = module.embedding.weight.grad
            if grad is not None:
                self.assertEqual(torch.sparse_coo if sparse else torch.strided, grad.layout)
                grad = grad.to_dense().clone()
            found.append(grad)
        return found

    def _assert_equal(self, mine: list[Tensor | None], twins: list[Tensor | None]) -> None:
        for one, other in zip(mine, twins, strict=True):
            if other is None:
                self.assertIsNone(one)
            else:
                assert one is not None
                self.assertTrue(torch.equal(one, other), msg=f"{one}, but should be {other}")

    def test_equal_to_dense(self) -> None:
        """With different numbers of rows on the ranks."""
        self._assert_equal(self._gradients(sparse=True), self._gradients(sparse=False))

    def test_in_a_bucket_of_its_own(self) -> None:
        """It goes at its place in the order, as sizes; indices and values follow when all buckets are issued."""
        module: Any = nn.Module()
        module.first = nn.Parameter(torch.zeros(3))
        module.embedding = nn.Embedding(11, 3, sparse=True)
        module.last = nn.Parameter(torch.zeros(5))
        reducer = self.reducer_of(module, sparse=["embedding.weight"], bucket_limits=(10_000,))
        begin = self.mark()
        reducer.prepare_for_forward()
        output = (
            module.embedding(torch.tensor([1, 2 + self.rank])).sum() + module.first.sum() + module.last.sum()
        ) * code(self.rank)
        reducer.prepare_for_backward([output])
        output.backward()

        self.assertEqual([["embedding.weight"], ["last", "first"]], reducer.bucket_names)
        # Sizes of 16 bytes a rank, the dense bucket, then two rows a rank: indices of 8 bytes and values of 12.
        self.assertEqual(
            [(Op.ALL_GATHER, 32), (Op.ALL_REDUCE, 32), (Op.ALL_GATHER, 32), (Op.ALL_GATHER, 48)],
            [(record.op, record.nbytes) for record in log().records[begin:]],
        )

    def test_unused_on_one_rank_or_on_both(self) -> None:
        """As a dense one: zeros of the other rank count, and None stays None."""
        rank = self.rank

        def skip(step: int) -> bool:
            return step == 1 or (step == 2 and rank == 0)

        sparse = self._gradients(sparse=True, find_unused=True, skip=skip)
        self._assert_equal(sparse, self._gradients(sparse=False, find_unused=True, skip=skip))
        self.assertIsNone(sparse[1])
        self.assertIsNotNone(sparse[2])

    def test_accumulation(self) -> None:
        """A second backward is added, and what was there is averaged with it."""
        gradients = []
        for sparse in (True, False):
            module = nn.Embedding(11, 3, sparse=sparse)
            reducer = self.reducer_of(module, sparse=["weight"] if sparse else [])
            for step in range(3):
                reducer.prepare_for_forward()
                output = (module(torch.tensor([step, 3 * self.rank])) * pattern((2, 3)) * code(self.rank, step)).sum()
                reducer.prepare_for_backward([output], synchronise=step != 0)
                output.backward()
            assert module.weight.grad is not None
            gradients.append(module.weight.grad.to_dense())

        self.assertTrue(torch.equal(*gradients))

    def test_unannounced_is_refused(self) -> None:
        """A sparse gradient in a dense bucket, and a dense one where a sparse one was announced."""
        for announced, actual in ((False, True), (True, False)):
            module = nn.Embedding(11, 3, sparse=actual)
            reducer = self.reducer_of(module, sparse=["weight"] if announced else [])
            reducer.prepare_for_forward()
            output = module(torch.tensor([1])).sum()
            reducer.prepare_for_backward([output])
            with self.assertRaisesRegex(GradientRefused, "gradient of weight is .*but should be (dense|sparse)"):
                output.backward()

    def test_hook_of_a_sparse_bucket(self) -> None:
        """It gets the sparse gradient undivided, and its result is the gradient."""
        module = nn.Embedding(5, 2, sparse=True)
        reducer = self.reducer_of(module, sparse=["weight"])
        seen: list[Tensor] = []

        def double(state: object, bucket: GradientBucket) -> Future[list[Tensor]]:
            seen.append(bucket.buffer())
            future: Future[list[Tensor]] = Future()
            future.set_result([bucket.buffer() * 2])
            return future

        reducer.register_comm_hook(None, double)
        reducer.prepare_for_forward()
        output = (module(torch.tensor([1])) * code(self.rank)).sum()
        reducer.prepare_for_backward([output])
        output.backward()

        self.assertEqual([code(self.rank)] * 2, seen[0].to_dense()[1].tolist())
        assert module.weight.grad is not None
        self.assertEqual([2 * code(self.rank)] * 2, module.weight.grad.to_dense()[1].tolist())


class Hooks(ReducerTestCase):
    """A communication hook reduces in place of the all-reduce."""

    def test_it_replaces_the_average(self) -> None:
        """It gets local gradients undivided, bucket by bucket in order, and nothing is divided after it."""
        for kind in KINDS:
            module = Coded()
            reducer = self.reducer_of(module, **kind)
            seen: list[tuple[int, bool, float, int, int]] = []

            def hook(state: list[Any], bucket: GradientBucket) -> Future[Tensor]:
                state.append(
                    (
                        bucket.index(),
                        bucket.is_last(),
                        float(bucket.buffer()[0]),
                        len(bucket.gradients()),
                        bucket.parameters()[0].numel(),
                    )
                )
                future: Any = dist.all_reduce(bucket.buffer(), async_op=True).get_future()
                return cast(Future[Tensor], future.then(lambda done: done.value()[0] * 10))

            reducer.register_comm_hook(seen, hook)
            self.forward(reducer, module).backward()

            first = code(self.rank)
            self.assertEqual(
                [(0, False, first, 1, 11), (1, False, first, 1, 7), (2, False, first, 1, 5), (3, True, first, 1, 3)],
                seen,
            )
            for parameter in module.parameters():
                self.assert_mean(parameter, 10 * 2 * mean_code(2))

    def test_hooks_written_for_torch(self) -> None:
        """torch's own all-reduce and fp16 hooks work unchanged; the latter is exact on these values."""
        group = _get_default_group()
        for hook in (default_hooks.allreduce_hook, default_hooks.fp16_compress_hook):
            module = Coded()
            reducer = self.reducer_of(module, bucket_limits=(64,))
            reducer.register_comm_hook(group, hook)
            for step in range(2):
                self.forward(reducer, module, step).backward()
                self.assert_means(module, step=step)
                module.zero_grad()

    def test_with_unused_parameters(self) -> None:
        """Used nowhere stays None."""
        module = Coded()
        reducer = self.reducer_of(module, find_unused_parameters=True)
        reducer.register_comm_hook(_get_default_group(), default_hooks.allreduce_hook)
        self.forward(reducer, module, use=(0, 1) if self.rank == 0 else (1, 2)).backward()

        self.assert_mean(module.p0, ranks=(0,))
        self.assert_mean(module.p1)
        self.assertIsNone(module.p3.grad)

    def test_registered_once(self) -> None:
        """A second one is refused, and so is one in the middle of a reduction."""
        module = Coded()
        reducer = self.reducer_of(module)
        reducer.register_comm_hook(None, default_hooks.allreduce_hook)
        with self.assertRaisesRegex(HookMisuse, "registered already, but should be registered once"):
            reducer.register_comm_hook(None, default_hooks.allreduce_hook)
        other = self.reducer_of(module)
        self.forward(other, module, use=(0, 1)).backward()
        with self.assertRaisesRegex(HookMisuse, "gradients are being reduced"):
            other.register_comm_hook(None, default_hooks.allreduce_hook)

    def test_what_it_returns_is_checked(self) -> None:
        """No future, no tensor, another dtype, another size: backward raises and says what came."""
        results: list[tuple[Any, str]] = [
            (torch.zeros(3), "returned Tensor, but should return a torch.futures.Future"),
            (_done("text"), "value=str, but should be a tensor or a list of one"),
            (_done(torch.zeros(11, dtype=torch.float64)), "dtype=torch.float64, but should be torch.float32"),
            (_done(torch.zeros(7)), "numel=7, but should be 11"),
            (_done([torch.zeros(11), torch.zeros(11)]), "value=list, but should be"),
        ]
        for result, expected in results:
            module = Coded()
            reducer = self.reducer_of(module)
            reducer.register_comm_hook(result, lambda state, bucket: state)
            with self.assertRaisesRegex(HookMisuse, expected):
                self.forward(reducer, module).backward()

    def test_it_sees_unscaled_gradients_of_a_group_of_one_too(self) -> None:
        """With a hook a group of one is reduced like any other."""
        module = Coded()
        groups = [dist.new_group([rank]) for rank in range(2)]
        reducer = Reducer(module.named_parameters(), groups[self.rank])
        reducer.register_comm_hook(None, lambda state, bucket: _done(bucket.buffer() * 5))
        self.forward(reducer, module).backward()

        self.assert_mean(module.p0, 5 * code(self.rank))


class Recovery(ReducerTestCase):
    """After an exception in backward training goes on."""

    def test_after_an_exception_on_every_rank(self) -> None:
        """The next step is right, without a reset, wherever the exception came: before, between and after buckets."""
        for kind in KINDS:
            for failing in ("p3", "p1", "p0"):
                module = Coded()
                reducer = self.reducer_of(module, **kind)
                self.forward(reducer, module).backward()
                module.zero_grad()
                output = self.forward(reducer, module, 1)
                handle = module.get_parameter(failing).register_hook(_raise)
                with self.assertRaisesRegex(RuntimeError, "on purpose"):
                    output.backward()
                handle.remove()
                module.zero_grad()
                for step in (2, 3):
                    self.forward(reducer, module, step).backward()
                    self.assert_means(module, step=step)
                    module.zero_grad()

    def test_a_second_try_without_a_forward(self) -> None:
        """The same graph again, after a backward that raised: wherever it did, the second one is averaged."""
        for kind in KINDS:
            for failing in ("p3", "p1", "p0"):
                module = Coded()
                reducer = self.reducer_of(module, **kind)
                output = self.forward(reducer, module)
                handle = module.get_parameter(failing).register_hook(_raise)
                with self.assertRaisesRegex(RuntimeError, "on purpose"):
                    output.backward(retain_graph=True)
                handle.remove()
                module.zero_grad()
                output.backward()

                self.assert_means(module)
                module.zero_grad()
                self.forward(reducer, module, 1).backward()
                self.assert_means(module, step=1)

    def test_reset(self) -> None:
        """By hand, after a backward that left parameters without a gradient."""
        module = Coded()
        reducer = self.reducer_of(module)
        self.forward(reducer, module, use=(3, 2)).backward()
        reducer.reset()
        self.assertIs(Phase.IDLE, reducer.phase)
        module.zero_grad()
        self.forward(reducer, module, 1).backward()

        self.assert_means(module, step=1)

    def test_a_group_that_broke_does_not_poison_the_next(self) -> None:
        """One rank raises alone; with a new group and a new reducer, the same parameters are averaged again."""
        module = Coded()
        reducer = self.reducer_of(module)
        self.forward(reducer, module).backward()
        output = self.forward(reducer, module, 1)
        if self.rank == 1:
            module.p3.register_hook(_raise)
            with self.assertRaises(RuntimeError):
                output.backward()
            module.p3._backward_hooks.clear()  # type: ignore[union-attr]
        # Rank 0 never began its backward, as one that was stopped in time.
        module.zero_grad()
        again = Reducer(module.named_parameters(), dist.new_group([0, 1]))
        self.forward(again, module, 2).backward()

        self.assert_means(module, step=2)


class Verification(ReducerTestCase):
    """Ranks that hold different parameters are told so, all of them."""

    def _errors(self, module: nn.Module) -> list[str]:
        try:
            verify_parameters(list(module.named_parameters()), _get_default_group(), device=torch.device("cpu"))
        except StructureMismatch as error:
            text = str(error)
        else:
            text = ""
        return [str(found) for found in self.on_every_rank(text)]

    def test_equal_structures_cost_one_collective(self) -> None:
        """A digest of 32 bytes a rank."""
        begin = self.mark()
        verify_parameters(list(Coded().named_parameters()), _get_default_group(), device=torch.device("cpu"))

        self.assertEqual([(Op.ALL_GATHER, 64)], [(record.op, record.nbytes) for record in log().records[begin:]])

    def test_every_difference_raises_on_every_rank(self) -> None:
        """Number, name, shape, stride, dtype, requires_grad and order; the reference raises on rank 1 alone."""
        expected = {
            "number": "rank 1: number of parameters=3, but should be 4 as on rank 0",
            "name": "rank 1: parameters=q0, but should be p3 in their place as on rank 0",
            "shape": "rank 1: shape of p1=(6,), but should be (5,) as on rank 0",
            "stride": "rank 1: stride of p2=(1, 2), but should be (3, 1) as on rank 0",
            "dtype": "rank 1: dtype of p0=float64, but should be float32 as on rank 0",
            "requires_grad": "rank 1: requires_grad of p0=False, but should be True as on rank 0",
            "order": "rank 1: order=p1, p0, but should be p0, p1 as on rank 0",
        }
        for kind, sentence in expected.items():
            texts = self._errors(_differing(kind, changed=self.rank == 1))
            for text in texts:
                self.assertIn(sentence, text)

    def test_all_differences_at_once(self) -> None:
        """Not only the first."""
        module = Coded([(3 + self.rank,), (5 + self.rank,)])
        for text in self._errors(module):
            self.assertIn("shape of p0=(4,), but should be (3,)", text)
            self.assertIn("shape of p1=(6,), but should be (5,)", text)


def _differing(kind: str, *, changed: bool) -> nn.Module:
    """A module that differs in one way, if it is to be changed."""
    shapes: list[tuple[int, ...]] = list(SHAPES)
    if kind == "stride":
        module = Coded([(3,), (5,), (2, 3)])
        if changed:
            module.p2 = nn.Parameter(torch.zeros(3, 2).t())
        return module
    if kind == "order":
        module = Coded([])
        for index in (1, 0) if changed else (0, 1):
            module.register_parameter(f"p{index}", nn.Parameter(torch.zeros(3)))
        return module
    if not changed:
        return Coded(shapes)
    if kind == "number":
        return Coded(shapes[:3])
    if kind == "shape":
        shapes[1] = (6,)
    module = Coded(shapes)
    if kind == "dtype":
        module.p0 = nn.Parameter(torch.zeros(3, dtype=torch.float64))
    elif kind == "requires_grad":
        module.p0.requires_grad_(False)
    elif kind == "name":
        del module.p3
        module.q0 = nn.Parameter(torch.zeros(11))
    return module


def _raise(grad: Tensor) -> Tensor:
    raise RuntimeError("on purpose")


def _done(value: Any) -> Future[Any]:
    future: Future[Any] = Future()
    future.set_result(value)
    return future


# --- without ranks ---------------------------------------------------------------------------------------------------


class _Pair(NamedTuple):
    one: Tensor
    other: Any


@dataclasses.dataclass
class _Record:
    value: Tensor
    nested: Any
    text: str = "text"


def test_tensors_in_nested_structures() -> None:
    """In order, through every container that a forward may return; a container that holds itself ends."""
    tensors = [torch.tensor(float(index)) for index in range(9)]
    loop: list[Any] = [tensors[8]]
    loop.append(loop)
    packed = pack_sequence([torch.ones(2), torch.ones(1)])
    structure = {
        "list": [tensors[0], (tensors[1],)],
        "pair": _Pair(tensors[2], OrderedDict(a=tensors[3])),
        "record": _Record(tensors[4], [None, "text", 3]),
        "namespace": SimpleNamespace(a=tensors[5]),
        "deque": deque([tensors[6]]),
        "set": {tensors[7]},
        "loop": loop,
        "packed": packed,
        "class": _Record,
        "range": range(10**12),
    }

    found = list(tensors_in(structure))
    assert [float(tensor) for tensor in found[:9]] == [float(index) for index in range(9)]
    assert found[9] is packed.data


def test_structures_with_other_tensors() -> None:
    """Types and everything else stay, originals are not written into, and batch sizes are left alone."""
    packed = pack_sequence([torch.ones(1), torch.ones(2)], enforce_sorted=False)
    record = _Record(torch.ones(1), (None, "text", {3: torch.ones(1)}))
    structure = {
        "ordered": OrderedDict(a=[torch.ones(1)]),
        "pair": _Pair(torch.ones(1), {torch.ones(1)}),
        "record": record,
        "packed": packed,
    }
    changed = with_tensors(structure, lambda tensor: tensor + 1)

    assert [float(tensor.max()) for tensor in tensors_in({**changed, "packed": changed["packed"].data})] == [2.0] * 6
    assert torch.equal(packed.batch_sizes, changed["packed"].batch_sizes)
    assert [type(changed[key]) for key in ("ordered", "pair", "record")] == [OrderedDict, _Pair, _Record]
    assert changed["record"].nested[:2] == (None, "text")
    assert float(record.value) == 1.0
    assert float(record.nested[2][3]) == 1.0


@pytest.mark.parametrize(
    ("hook", "expected"),
    [
        (3, "hook=3, but should be callable"),
        (lambda bucket: None, "should take \\(state, bucket\\)"),
        (lambda state, bucket, more: None, "should take \\(state, bucket\\)"),
    ],
)
def test_hooks_of_a_wrong_shape(hook: Any, expected: str) -> None:
    """They are refused when they are registered."""
    with pytest.raises(HookMisuse, match=expected):
        checked_hook(None, hook)


def test_annotations_of_hooks() -> None:
    """Those that are there must fit, as objects or as strings; torch's own words fit too."""

    def wrong_bucket(state: object, bucket: int) -> Future[Tensor]:
        raise NotImplementedError

    def wrong_result(state: object, bucket: GradientBucket) -> Tensor:
        raise NotImplementedError

    def torchs(state: object, grad_bucket: c10d.GradBucket) -> torch.futures.Future[torch.Tensor]:
        raise NotImplementedError

    class ByCall:
        def __call__(self, state: object, bucket: GradientBucket) -> Future[Tensor]:
            raise NotImplementedError

    with pytest.raises(HookMisuse, match="annotates its bucket as int"):
        checked_hook(None, wrong_bucket)
    with pytest.raises(HookMisuse, match=r"is annotated to return .*Tensor.*, but should return"):
        checked_hook(None, wrong_result)
    assert checked_hook(3, torchs).state == 3
    assert checked_hook(None, ByCall()).state is None


class _FakeStream:
    """A stream that notes whom it waits for."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.waited: list[str] = []

    def wait_stream(self, other: _FakeStream) -> None:
        self.waited.append(other.name)


def test_order_between_streams(monkeypatch: pytest.MonkeyPatch) -> None:
    """The current stream waits for every other one, and not for itself; on the CPU there is nothing to wait for."""
    here, there = _FakeStream("here"), _FakeStream("there")
    fake = SimpleNamespace(current_stream=lambda device: here)
    monkeypatch.setattr(torch, "get_device_module", lambda device_type: fake)
    streams = Streams(torch.device("cuda", 0))
    streams.follow([here, there, None])

    assert streams.exist
    assert here.waited == ["there"]
    assert Streams(torch.device("cpu")).current() is None
