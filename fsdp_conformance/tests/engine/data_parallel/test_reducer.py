"""Gradients are averaged bucket by bucket, in order, exactly once, over exactly the ranks that should take part."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from fsdp_conformance.engine.bucketing.bucket_assignment import MIB
from fsdp_conformance.engine.data_parallel.reducer import Phase, Reducer, ReducerConfig
from fsdp_conformance.engine.errors import GradientRefused, ReductionError
from fsdp_conformance.errors import ConfigError
from fsdp_conformance.harness.context import log
from fsdp_conformance.history.collective import Op
from fsdp_conformance.tests.engine.data_parallel.reducer_ranks import (
    KINDS,
    Coded,
    ReducerTestCase,
    code,
    mean_code,
    pattern,
)


class Order(ReducerTestCase):
    """Buckets are issued in a fixed order, whatever the order of readiness."""

    def test_mean_of_every_rank(self) -> None:
        """Each element is averaged once and is in the right place, in consecutive steps."""
        for kind in KINDS:
            module = Coded()
            reducer = self.reducer_of(module, **kind)
            for step in range(3):
                self.forward(reducer, module, step).backward()
                self.assert_means(module, step=step)
                module.zero_grad()

    def test_issued_in_order_although_ready_in_another(self) -> None:
        """
        The last parameter's bucket comes first, so all others wait although they are ready before it.

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
        """The first bucket is sent before the last gradient is ready."""
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
        self.assertEqual((64, 64, 64), reducer._queue.limits)
        self.assert_means(module)

    def test_the_first_bucket_is_small(self) -> None:
        """With the default limits the last parameters, of 1 MiB, go first; the rest waits for 25 MiB."""
        module = Coded([(MIB // 4,)] * 4)
        reducer = Reducer(module.named_parameters())

        self.assertEqual([["p3"], ["p2", "p1", "p0"]], reducer.bucket_names)

    def test_averaged_before_the_sum(self) -> None:
        """float16 gradients of 2**15 on both ranks stay finite, although their sum would not."""
        module = Coded([(1,)], dtype=torch.float16)
        reducer = self.reducer_of(module)
        reducer.prepare_for_forward()
        output = (module.p0 * 2.0**15).sum()
        reducer.prepare_for_backward([output])
        output.backward()

        assert module.p0.grad is not None
        self.assertEqual([2.0**15], module.p0.grad.tolist())

    def test_what_cannot_be_reduced_is_refused_when_it_is_made(self) -> None:
        """Two devices, a repeated name, an unknown sparse name: all in one error."""
        parameter = nn.Parameter(torch.zeros(1))
        with self.assertRaises(ConfigError) as caught:
            Reducer(
                [("a", parameter), ("a", parameter), ("b", nn.Parameter(torch.zeros(1, device="meta")))], sparse=["c"]
            )

        self.assertEqual(4, len(caught.exception.problems), caught.exception.problems)
        with self.assertRaisesRegex(ConfigError, "bucket_limits must be"):
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
        """Rank 1 is ready in another order and adopts that of rank 0: one broadcast, before the second forward."""
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
        self.assertEqual((1, 50, 50), reducer._queue.limits)

    def test_not_where_unused_parameters_are_looked_for(self) -> None:
        """With unused parameters, readiness tells nothing about the next backward."""
        module = Coded()
        reducer = self.reducer_of(module, find_unused_parameters=True)
        begin = self.mark()
        for step in range(3):
            self.forward(reducer, module, step).backward()

        self.assertFalse(reducer._rebuilt)
        self.assertEqual([], self.since(begin, Op.BROADCAST))

    def test_gradients_survive_it(self) -> None:
        """Gradients that were averaged in the first step, and kept, are added to in the second."""
        for kind in KINDS:
            module = Coded()
            reducer = self.reducer_of(module, **kind)
            for step in range(3):
                self._chain(reducer, module, step, (2, 0, 1, 3)).backward()

            for parameter in module.parameters():
                self.assert_mean(parameter, sum(mean_code(2, step) for step in range(3)))

    def test_a_wrong_count_is_an_error_on_every_rank(self) -> None:
        """Rank 0 misses a parameter: every rank raises instead of continuing with different buckets."""
        module = Coded()
        reducer = self.reducer_of(module)
        self.forward(reducer, module).backward()
        if self.rank == 0:
            assert reducer._rebuild_order is not None
            reducer._rebuild_order.pop()
        with self.assertRaisesRegex(ReductionError, "ready in the first backward: expected 4, got 3"):
            reducer.prepare_for_forward()


class Accumulation(ReducerTestCase):
    """Tests of when gradients are reduced, and what they are added to."""

    def test_deferred_gradients_are_reduced_with_the_next(self) -> None:
        """First local sums, then their mean, in any interleaving from the first forward on."""
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
        """Each backward goes through its own graph; parameters that only the other one reaches stay unused in it."""
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
        """The sum is reduced once, including parameters that only one of the forwards uses."""
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
        """Each is averaged, and the second is added to the first."""
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
        """It is forgotten, by a normal iteration and by a deferred one, which stays local."""
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
        """Modules that share nothing have one reduction, which ends with the second backward."""
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
        with self.assertRaisesRegex(GradientRefused, "the gradient of (weight|bias): it has a graph"):
            output.backward(create_graph=True)
