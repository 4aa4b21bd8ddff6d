"""When the callbacks of a reduce-scatter bucketer run, and what they may do: start more, wait, raise."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from fsdp_conformance.engine.errors import DataPending
from fsdp_conformance.tests.engine.bucketing.bucketer_ranks import BucketerTestCase, inputs_of, num_in_flight


class CallbackTest(BucketerTestCase):
    """Four ranks. Callbacks note the results, in the order in which they run."""

    def test_callbacks_run_in_wait_only(self) -> None:
        """Callbacks wait for wait() even if the collective is fast: nothing that they do depends on timing."""
        bucketer = self.start(0.0)
        for tag in range(4):
            self.give(bucketer, tag, 3)
        dist.barrier()
        bucketer.flush()
        self.assertEqual(([], 4), (self.tags(), num_in_flight(bucketer)))
        bucketer.wait()
        self.assertEqual([0, 1, 2, 3], self.tags())

    @pytest.mark.nightly
    def test_a_callback_that_starts_more(self) -> None:
        """
        The same wait finishes what a callback starts; what it puts into a bucket waits for the next flush. Nothing is
        lost, and nothing runs twice.
        """
        bucketer = self.start()

        def more(result: Tensor) -> None:
            self.results.append((0, result))
            self.give(bucketer, 2, 4)
            self.give(bucketer, 3, 17)

        bucketer.reduce_scatter(inputs_of(self.rank, 0, (2,)), callback=more)
        self.give(bucketer, 1, 3)
        bucketer.flush()
        bucketer.wait()
        self.assertEqual(([0, 1, 3], 1), (self.tags(), bucketer.num_pending))
        with self.assertRaises(DataPending):
            bucketer.teardown()
        bucketer.flush()
        bucketer.teardown()

        self.check_results({0: (2,), 1: (3,), 2: (4,), 3: (17,)})

    @pytest.mark.slow
    def test_a_callback_that_flushes_and_waits(self) -> None:
        """It may: the callbacks after it run inside, in order, each once."""
        bucketer = self.start()

        def drain(result: Tensor) -> None:
            self.results.append((0, result))
            self.give(bucketer, 4, 5)
            bucketer.flush()
            bucketer.wait()
            self.results.append((9, result))

        bucketer.reduce_scatter(inputs_of(self.rank, 0, (2,)), callback=drain)
        for tag in (1, 2):
            self.give(bucketer, tag, 3)
        bucketer.flush()
        self.give(bucketer, 3, 17)
        bucketer.wait()

        self.assertEqual([0, 1, 2, 3, 4, 9], self.tags())
        del self.results[-1]
        self.check_results({0: (2,), 1: (3,), 2: (3,), 3: (17,), 4: (5,)})

    @pytest.mark.slow
    def test_a_callback_that_raises(self) -> None:
        """The others still run before it is raised, and the bucketer continues normally."""
        bucketer = self.start()

        def fail(result: Tensor) -> None:
            raise ArithmeticError(f"no {result.numel()}")

        bucketer.reduce_scatter(inputs_of(self.rank, 0, (2,)), callback=fail)
        self.give(bucketer, 1, 3)
        bucketer.flush()
        self.give(bucketer, 2, 17)
        with self.assertRaisesRegex(ArithmeticError, "no 2"):
            bucketer.wait()
        self.assertEqual([1, 2], self.tags())
        bucketer.wait()
        self.give(bucketer, 3, 3)
        bucketer.flush()
        bucketer.teardown()

        self.check_results({1: (3,), 2: (17,), 3: (3,)})

    def test_two_callbacks_that_raise(self) -> None:
        """Both exceptions are raised."""
        bucketer = self.start()

        def fail(result: Tensor) -> None:
            raise ArithmeticError(f"no {result.numel()}")

        for tag, numel in ((0, 2), (1, 3)):
            bucketer.reduce_scatter(inputs_of(self.rank, tag, (numel,)), callback=fail)
        bucketer.flush()
        with self.assertRaises(ExceptionGroup) as caught:
            bucketer.wait()

        self.assertEqual(["no 2", "no 3"], [str(error) for error in caught.exception.exceptions])

    def test_gradients_of_graphs(self) -> None:
        """Inputs that require a gradient are summed; the result does not require one."""
        bucketer = self.start()
        given = [row.requires_grad_() for row in inputs_of(self.rank, 0, (2,))]
        bucketer.reduce_scatter(given, callback=self.note(0))
        bucketer.reduce_scatter(torch.cat(inputs_of(self.rank, 1, (20,))).requires_grad_(), callback=self.note(1))
        bucketer.flush()
        bucketer.wait()

        self.assertEqual([False, False], [result.requires_grad for _, result in self.results])
        self.check_results({0: (2,), 1: (20,)})
