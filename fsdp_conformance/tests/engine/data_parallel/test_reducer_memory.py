"""Layout and memory of gradients: who owns them after a backward, and what is left when they are dropped."""

from __future__ import annotations

import gc
import weakref
from typing import Any

import torch
from torch import nn
from torch.multiprocessing.reductions import StorageWeakRef

from fsdp_conformance.engine.errors import ReductionError
from fsdp_conformance.harness.context import log
from fsdp_conformance.tests.engine.data_parallel.reducer_ranks import (
    KINDS,
    Coded,
    ReducerTestCase,
    code,
    mean_code,
    pattern,
)
from fsdp_conformance.tests.engine.gloo_release import one_gloo_thread, wait_for_release


class Memory(ReducerTestCase):
    """Layout, and who owns the memory of a gradient."""

    def test_layout_of_the_parameter(self) -> None:
        """Channels-last and transposed parameters have gradients with the same strides and the right elements."""
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
            if step:  # buckets are rebuilt after the first step
                addresses |= storages
            self.assert_means(module, step=step)
            module.zero_grad(set_to_none=step == 1)

        self.assertEqual(1, len(addresses))

    def test_a_view_cannot_be_detached_in_place(self) -> None:
        """torch reports that; a gradient that is not a view of a bucket can be detached."""
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
        """It is not written again once it is dropped from the parameter."""
        module = Coded()
        reducer = self.reducer_of(module, bucket_limits=(10_000,))
        gradients = []
        for step in range(3):
            self.forward(reducer, module, step).backward()
            gradients.append(module.p1.grad)
            module.zero_grad(set_to_none=True)

        for step, grad in enumerate(gradients):
            assert grad is not None
            self.assertTrue(torch.equal(pattern((5,)) * mean_code(2, step), grad))

    def test_a_gradient_that_exists_is_written_in_place(self) -> None:
        """If it is zeroed, not dropped, it remains the same tensor, as with an unwrapped module."""
        for kind in KINDS:
            module = Coded()
            reducer = self.reducer_of(module, **kind)
            for step in range(2):
                self.forward(reducer, module, step).backward()
                module.zero_grad(set_to_none=False)
            gradient = module.p1.grad
            self.forward(reducer, module, 3).backward()

            self.assertIs(gradient, module.p1.grad)
            self.assert_means(module, step=3)

    def test_a_reducer_that_is_dropped_leaves_nothing_behind(self) -> None:
        """It leaves no hooks and is not kept alive; gradients stay local afterwards."""
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
        """Gradients are averaged once; the first reducer raises."""
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
        """Replacing and restoring its data gives a parameter a new AccumulateGrad node, which changes nothing."""
        module = Coded()
        reducer = self.reducer_of(module, find_unused_parameters=True)
        self.forward(reducer, module).backward()
        module.zero_grad()
        module.double().float()
        self.forward(reducer, module, 1).backward()

        self.assert_means(module, step=1)


class Release(ReducerTestCase):
    """The tensors that the reducer and gloo hold after a backward."""

    def init_rank(self) -> None:
        with one_gloo_thread():
            super().init_rank()

    def test_nothing_is_held_beside_the_gradients(self) -> None:
        """After a backward a bucket's buffer belongs to the gradients and is freed with them."""
        module = Coded()
        reducer = self.reducer_of(module, bucket_limits=(10_000,))
        self.forward(reducer, module).backward()
        assert module.p1.grad is not None
        storage = StorageWeakRef(module.p1.grad.untyped_storage())
        self.assertFalse(storage.expired())
        module.zero_grad()
        wait_for_release()
        self.assertTrue(storage.expired())
