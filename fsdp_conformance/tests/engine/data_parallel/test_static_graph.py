"""A parameter gets one gradient in a backward, or as many as in the first backward of a static graph."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from fsdp_conformance.engine.data_parallel.reducer import Reducer
from fsdp_conformance.engine.errors import GraphChanged, MarkedReadyTwice, ReductionUnfinished
from fsdp_conformance.tests.engine.data_parallel.reducer_ranks import KINDS, Coded, ReducerTestCase, code, mean_code


class Twice(ReducerTestCase):
    """A parameter's gradient is taken once."""

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

    @pytest.mark.slow
    def test_a_second_gradient_raises_and_names_the_parameter(self) -> None:
        """Two reentrant checkpoints share it; the error suggests static_graph."""
        module = Coded()
        reducer = self.reducer_of(module)
        with self.assertRaises(MarkedReadyTwice) as caught:
            self._reentrant(reducer, module).backward()

        self.assertIn("parameter p0 (index 0) got a second gradient in one reduction", str(caught.exception))
        self.assertIn("static_graph=True", str(caught.exception))

    @pytest.mark.nightly
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
            self.assertTrue(reducer._rebuilt)

    def test_wrongly_taken_for_unused(self) -> None:
        """An output inside an opaque object: the gradient is unexpected, and the error explains why."""
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
    """The first backward shows a graph that never changes."""

    def test_unused_parameters_are_learnt(self) -> None:
        """A parameter that no rank uses stays None; one that some rank uses is averaged. Flags are summed only once."""
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
        """Buckets are rebuilt even if some parameters are unused; those come last."""
        module = Coded()
        reducer = self.reducer_of(module, static_graph=True)
        for step in range(2):
            self.forward(reducer, module, step, use=(3, 0)).backward()
            module.zero_grad()

        self.assertTrue(reducer._rebuilt)
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
        with self.assertRaisesRegex(
            GraphChanged, "gradients of parameter p3 .*expected 0, as in the first backward, got 1"
        ):
            self.forward(reducer, module).backward()

    def test_a_graph_that_shrinks_is_refused(self) -> None:
        """A parameter that the first backward used gets none: the next forward raises."""
        module = Coded()
        reducer = self.reducer_of(module, static_graph=True)
        self.forward(reducer, module).backward()
        module.zero_grad()
        self.forward(reducer, module, use=(0, 1, 2)).backward()
        with self.assertRaisesRegex(ReductionUnfinished, r"p3 \(index 3\).*static_graph=True"):
            reducer.prepare_for_forward()
