"""Sparse gradients are averaged like dense ones."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.futures import Future

from fsdp_conformance.engine.data_parallel.communication_hook import GradientBucket
from fsdp_conformance.engine.errors import GradientRefused
from fsdp_conformance.harness.context import log
from fsdp_conformance.history.collective import Op
from fsdp_conformance.tests.engine.data_parallel.reducer_ranks import ReducerTestCase, code, pattern


class Sparse(ReducerTestCase):
    """Sparse gradients are averaged like dense ones."""

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
        gradients: list[Tensor | None] = []
        for step in range(steps):
            module.zero_grad()
            reducer.prepare_for_forward()
            output = (module.dense * pattern((5,))).sum() * code(self.rank, step)
            if skip is None or not skip(step):
                # Rank 1 has more ids: some twice, some that rank 0 has as well.
                ids = torch.tensor([[2, 5, 2], [5, 7, 10, 0, 7]][self.rank])
                output = output + (module.embedding(ids) * pattern((len(ids), 3)) * code(self.rank, step)).sum()
            reducer.prepare_for_backward([output])
            output.backward()
            self.assert_mean(module.dense, step=step)
            grad = module.embedding.weight.grad
            if grad is not None:
                self.assertEqual(torch.sparse_coo if sparse else torch.strided, grad.layout)
                grad = grad.to_dense().clone()
            gradients.append(grad)
        return gradients

    def _assert_equal(self, mine: list[Tensor | None], twins: list[Tensor | None]) -> None:
        for one, other in zip(mine, twins, strict=True):
            if other is None:
                self.assertIsNone(one)
            else:
                assert one is not None
                self.assertTrue(torch.equal(one, other), msg=f"expected {other}, got {one}")

    def test_equal_to_dense(self) -> None:
        """Sparse gradients average like dense ones, with different numbers of rows on the ranks."""
        self._assert_equal(self._gradients(sparse=True), self._gradients(sparse=False))

    def test_in_a_bucket_of_its_own(self) -> None:
        """It sends sizes at its place in the order; indices and values follow when all buckets are issued."""
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
        # Sizes of 16 bytes per rank, the dense bucket, then two rows per rank: indices of 8 bytes and values of 12.
        self.assertEqual(
            [(Op.ALL_GATHER, 32), (Op.ALL_REDUCE, 32), (Op.ALL_GATHER, 32), (Op.ALL_GATHER, 48)],
            [(record.op, record.nbytes) for record in log().records[begin:]],
        )

    def test_unused_on_one_rank_or_on_both(self) -> None:
        """A rank without a gradient counts as zero, and None stays None, as for a dense one."""
        rank = self.rank

        def skip(step: int) -> bool:
            return step == 1 or (step == 2 and rank == 0)

        sparse = self._gradients(sparse=True, find_unused=True, skip=skip)
        self._assert_equal(sparse, self._gradients(sparse=False, find_unused=True, skip=skip))
        self.assertIsNone(sparse[1])
        self.assertIsNotNone(sparse[2])

    def test_accumulation(self) -> None:
        """A second backward is added, and existing gradients are averaged with it."""
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
        """A sparse gradient in a dense bucket, and a dense one in a sparse bucket."""
        for announced, actual in ((False, True), (True, False)):
            module = nn.Embedding(11, 3, sparse=actual)
            reducer = self.reducer_of(module, sparse=["weight"] if announced else [])
            reducer.prepare_for_forward()
            output = module(torch.tensor([1])).sum()
            reducer.prepare_for_backward([output])
            with self.assertRaisesRegex(GradientRefused, "gradient of weight: expected torch.(strided|sparse_coo)"):
                output.backward()

    def test_hook_of_a_sparse_bucket(self) -> None:
        """The hook gets the sparse gradient undivided, and its result becomes the gradient."""
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
