"""Reductions of a chunk: the mean shard, where gradients are collected, how they are divided and measured."""

from __future__ import annotations

import math
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from fsdp_conformance.engine.chunks import gradients as chunk_gradients
from fsdp_conformance.engine.chunks.chunk import shard_statistics
from fsdp_conformance.engine.chunks.gradients import DivideFactors, divide_factors
from fsdp_conformance.engine.chunks.memory_pool import BlockKind
from fsdp_conformance.engine.chunks.storage import StorageState
from fsdp_conformance.engine.chunks.tensor_state import TensorState
from fsdp_conformance.engine.communication import reduce_scatter
from fsdp_conformance.engine.errors import ChunkStateError, TensorRefused
from fsdp_conformance.tests.engine.chunks.chunk_ranks import (
    SHAPES,
    ChunkTestCase,
    coded,
    flat_of,
    gradients,
    mean_gradient,
    parameters,
    to_ready,
)

S = TensorState


@pytest.mark.parametrize(
    ("num_ranks", "dtype", "factors"),
    [
        (4, torch.float32, (1, 4)),
        (4, torch.bfloat16, (1, 4)),
        (4, torch.float16, (4, 1)),
        (3, torch.float16, (3, 1)),
    ],
)
def test_divide_factors(num_ranks: int, dtype: torch.dtype, factors: tuple[float, float]) -> None:
    """float16 is divided before, so that no sum overflows; what has a wider exponent after, on the shard alone."""
    assert DivideFactors(*factors) == divide_factors(num_ranks, dtype)


def test_statistics_of_a_shard() -> None:
    """
    3-4-12 has a squared norm of 169; nothing has 0; one infinity or NaN is an overflow, a large finite value is not.
    """
    assert (169, False) == tuple(value.item() for value in shard_statistics(torch.tensor([3.0, -4.0, 12.0])))
    assert (0, False) == tuple(value.item() for value in shard_statistics(torch.empty(0)))
    for bad in (math.inf, -math.inf, math.nan):
        assert shard_statistics(torch.tensor([1.0, bad, 2.0])).overflow
    large = shard_statistics(torch.tensor([3e38, 3e38]))
    assert (math.inf, False) == (large.squared_norm.item(), large.overflow.item())
    half = shard_statistics(torch.full((4,), 300, dtype=torch.float16))
    assert (360000.0, torch.float32) == (half.squared_norm.item(), half.squared_norm.dtype)
    assert torch.float64 == shard_statistics(torch.ones(1, dtype=torch.float64)).squared_norm.dtype


class ReduceTest(ChunkTestCase):
    """Tests of one reduction."""

    def test_mean_shard(self) -> None:
        """
        The result is this rank's part of the mean, on groups of any size; every tensor is HOLD, every block is back,
        and the shard of the parameters is as it was.
        """
        for group in (self.own_group(), self.pair_group(), None):
            for kind in (BlockKind.RESIZED, BlockKind.PUBLIC):
                chunk = self.chunk_of(group=group, block=kind)
                chunk.access()
                self.put(chunk)
                gradient = chunk.reduce().wait()

                size = chunk.layout.world_size
                self.assert_equal(self.expected_shard(mean_gradient(size, chunk.numel), group), gradient)
                self.assertEqual(len(SHAPES), chunk.states.count(S.HOLD))
                self.assertIs(StorageState.SHARDED, chunk.state)
                self.assertEqual(0, chunk.pool.counters.leased_bytes)
                self.assert_equal(self.expected_shard(flat_of(parameters(), chunk.numel), group), chunk.shard)

    def test_one_collective_straight_from_the_buffer(self) -> None:
        """
        One reduce-scatter of the padded bytes, from the buffer's memory into the result's; nothing in a group of one.
        """
        chunk = self.chunk_of()
        self.put(chunk)
        buffer = chunk.gradients.payload.data_ptr()
        self.schedule()
        with mock.patch.object(chunk_gradients, "reduce_scatter", wraps=reduce_scatter) as issued:
            gradient = chunk.reduce().wait()
        ((shard, inputs, _),) = [call.args for call in issued.call_args_list]

        self.assertEqual(["reduce_scatter 128B float32 SUM [0,1,2,3]"], self.schedule())
        self.assertEqual((buffer, gradient.data_ptr()), (inputs.data_ptr(), shard.data_ptr()))

        alone = self.chunk_of(group=self.own_group())
        self.put(alone)
        buffer = alone.gradients.payload.data_ptr()
        self.schedule()
        self.assertEqual(buffer, alone.reduce().wait().data_ptr())
        self.assertEqual([], self.schedule())

    def test_only_when_all_are_ready(self) -> None:
        """A tensor whose gradient is not there stops the reduction, by name; nothing is sent, and nothing is lost."""
        chunk = self.chunk_of()
        self.put(chunk)
        chunk.move(chunk.tensors[2], S.HOLD)
        self.schedule()
        with self.assertRaisesRegex(ChunkStateError, "tensor 2 is HOLD, expected READY_FOR_REDUCE"):
            chunk.reduce()
        self.assertEqual([], self.schedule())
        for state in (S.COMPUTE, S.HOLD_AFTER_BWD, S.READY_FOR_REDUCE):
            chunk.move(chunk.tensors[2], state)

        self.assert_equal(self.expected_shard(mean_gradient(4, 32)), chunk.reduce().wait())

    def test_what_got_no_gradient_is_zero(self) -> None:
        """
        A tensor without a gradient on this rank counts as zero here; padding and gaps are zero whatever was there.
        """
        chunk = self.chunk_of(align=8)
        chunk.gradients.payload.fill_(math.nan)
        mine = gradients(self.rank, 4)
        chunk.gradients.put_all([None if index % 4 == self.rank else mine[index] for index in range(len(SHAPES))])
        to_ready(chunk)
        gradient = chunk.reduce().wait()
        whole = [torch.empty_like(gradient) for _ in range(4)]
        dist.all_gather(whole, gradient)
        means = chunk.layout.views(torch.cat(whole))

        for index, shape in enumerate(SHAPES):
            self.assert_equal(coded(index, shape) * (15 - 2 ** (index % 4)), means[index])
        covered = [(slot.offset, slot.end) for slot in chunk.layout.slots]
        for begin, end in zip([end for _, end in covered], [begin for begin, _ in covered[1:]] + [40], strict=True):
            self.assert_equal(torch.zeros(end - begin), torch.cat(whole)[begin:end])

    def test_a_rank_without_gradients_takes_part(self) -> None:
        """Without any gradient it sends zeros: all ranks issue the same collective."""
        chunk = self.chunk_of()
        if self.rank == 2:
            to_ready(chunk)
        else:
            self.put(chunk)
        self.schedule()

        self.assert_equal(self.expected_shard(flat_of(parameters(), 32) * (15 - 4)), chunk.reduce().wait())
        self.assertEqual(["reduce_scatter 128B float32 SUM [0,1,2,3]"], self.schedule())

    def test_gradients_that_arrive_in_pieces(self) -> None:
        """A first piece is copied, others are added; so are the gradients of further backwards (no_sync)."""
        chunk = self.chunk_of()
        chunk.gradients.payload.fill_(math.nan)
        for times in (1, 2, 4):
            mine = gradients(self.rank, 4, times=times)
            for index, gradient in enumerate(mine):
                if index % 2:
                    chunk.gradients.put(index, gradient)
            chunk.gradients.put_all([None if index % 2 else gradient for index, gradient in enumerate(mine)])
        to_ready(chunk)

        self.assert_equal(self.expected_shard(mean_gradient(4, 32) * 7), chunk.reduce().wait())

    def test_views_of_the_buffer(self) -> None:
        """Autograd accumulates in place into `grad` that is a view; a view starts at zero, and keeps what arrived."""
        weight = nn.Parameter(coded(0, (3, 5)))
        chunk = self.chunk_of([weight])
        chunk.access()
        (view,) = chunk.views
        leaf = view.detach().requires_grad_()
        chunk.gradients.payload.fill_(math.nan)
        leaf.grad = chunk.gradients.view(0)
        for _ in range(2):
            (leaf * 2**self.rank * 4).sum().backward()
        self.assertEqual(chunk.gradients.payload.data_ptr(), leaf.grad.data_ptr())
        self.assert_equal(leaf.grad, chunk.gradients.view(0))
        to_ready(chunk)

        self.assert_equal(self.expected_shard(flat_of([torch.full((3, 5), 30.0)], 16)), chunk.reduce().wait())

    def test_gradients_that_do_not_fit(self) -> None:
        """Sparse ones, other shapes, another number of them: typed errors that name all, and nothing was put."""
        chunk = self.chunk_of()
        good = gradients(self.rank, 4)
        sparse = torch.zeros(7).to_sparse()
        with self.assertRaisesRegex(
            TensorRefused,
            r"gradient 0: expected \(3, 5\) .* got \(5, 3\).*gradient 1: expected torch.strided",
        ):
            chunk.gradients.put_all([good[0].t(), sparse, *good[2:]])
        with self.assertRaisesRegex(TensorRefused, "expected 5 gradients, one per tensor, got 4"):
            chunk.gradients.put_all(good[:4])
        with self.assertRaisesRegex(TensorRefused, "gradient 1: expected torch.strided, got torch.sparse_coo"):
            chunk.gradients.put(1, sparse)
        self.assertEqual([False] * 5, chunk.gradients.present)

    def test_a_partial_sum_that_does_not_fit(self) -> None:
        """Another length or dtype is refused before anything is sent."""
        chunk = self.chunk_of()
        self.put(chunk)
        self.schedule()
        for partial, text in (
            (torch.zeros(7), r"partial: expected .*\(8,\) of torch.float32 .* got \(7,\) of torch.float32"),
            (torch.zeros(8, dtype=torch.float64), r"got \(8,\) of torch.float64"),
        ):
            with self.assertRaisesRegex(TensorRefused, text):
                chunk.reduce(partial=partial)
        self.assertEqual([], self.schedule())
        self.assert_equal(self.expected_shard(mean_gradient(4, 32)), chunk.reduce().wait())

    def test_reduction_in_a_wider_dtype(self) -> None:
        """
        bfloat16 gradients are summed in float32 buffers, over backwards and over ranks, and sent as float32: 256 + 1,
        which bfloat16 cannot say, on each of four ranks, twice, is a mean of 514.
        """
        chunk = self.chunk_of(compute_dtype=torch.bfloat16, reduce_dtype=torch.float32)
        self.schedule()
        for value in (256.0, 1.0, 256.0, 1.0):
            chunk.gradients.put_all([torch.full(shape, value, dtype=torch.bfloat16) for shape in SHAPES])
        to_ready(chunk)
        gradient = chunk.reduce().wait()

        self.assertEqual(["reduce_scatter 128B float32 SUM [0,1,2,3]"], self.schedule())
        self.assert_equal(torch.full((8,), 514.0)[: chunk.layout.valid_numel], gradient[: chunk.layout.valid_numel])

    def test_reduction_in_a_narrower_dtype(self) -> None:
        """
        bfloat16 goes over the wire, is divided as such, and is cast to the dtype of the shard.
        """
        chunk = self.chunk_of(compute_dtype=torch.bfloat16)
        self.schedule()
        chunk.gradients.put_all([torch.full(shape, 2.0**self.rank, dtype=torch.bfloat16) for shape in SHAPES])
        to_ready(chunk)
        gradient = chunk.reduce().wait()

        self.assertEqual(["reduce_scatter 64B bfloat16 SUM [0,1,2,3]"], self.schedule())
        self.assert_equal(torch.full((8,), 3.75)[: chunk.layout.valid_numel], gradient[: chunk.layout.valid_numel])

    def test_half_precision_does_not_overflow(self) -> None:
        """The largest float16, and 2**15, on all four ranks keep their mean; so does the smallest quarter there is."""
        for value in (65504.0, 2.0**15, 2.0**-22):
            chunk = self.chunk_of(parameters(dtype=torch.float16))
            chunk.gradients.put_all([torch.full(shape, value, dtype=torch.float16) for shape in SHAPES])
            to_ready(chunk)
            valid = chunk.layout.valid_numel

            self.assert_equal(torch.full((valid,), value, dtype=torch.float16), chunk.reduce().wait()[:valid])

    def test_hybrid(self) -> None:
        """
        Reduce-scattered in pairs, all-reduced across them, averaged over all four; the wire shows no other
        collective.
        """
        pair, across = self.pair_group(), self.replica_group()
        chunk = self.chunk_of(group=pair, replica_group=across)
        self.put(chunk)
        self.schedule()
        gradient = chunk.reduce().wait()

        self.assert_equal(self.expected_shard(mean_gradient(4, 32), pair), gradient)
        pairs = {True: ("[0,1]", "[0,2]"), False: ("[2,3]", "[1,3]")}
        shards = pairs[self.rank < 2][0]
        replicas = "[0,2]" if self.rank % 2 == 0 else "[1,3]"
        self.assertEqual(
            [f"reduce_scatter 128B float32 SUM {shards}", f"all_reduce 64B float32 SUM {replicas}"], self.schedule()
        )

    def test_hybrid_with_the_all_reduce_left_for_later(self) -> None:
        """Partial sums of several reductions are all-reduced with the last, once; the result is the mean of all."""
        pair, across = self.pair_group(), self.replica_group()
        chunk = self.chunk_of(group=pair, replica_group=across)
        partial: Tensor | None = None
        for times in (1, 2):
            self.put(chunk, times=times)
            partial = chunk.reduce(all_reduce=False, partial=partial).wait()
            self.assertIsNone(chunk.statistics)
        self.put(chunk, times=4)
        self.schedule()
        gradient = chunk.reduce(partial=partial).wait()

        self.assert_equal(self.expected_shard(mean_gradient(4, 32) * 7, pair), gradient)
        self.assertEqual(["reduce_scatter", "all_reduce"], [line.split()[0] for line in self.schedule()])

    def test_replicas_without_shards(self) -> None:
        """A shard group of one: no gather, and an all-reduce alone."""
        chunk = self.chunk_of(group=self.own_group(), replica_group=dist.group.WORLD, alias_whole=True)
        self.schedule()
        chunk.access()
        self.put(chunk)
        gradient = chunk.reduce().wait()

        self.assertEqual(["all_reduce 124B float32 SUM [0,1,2,3]"], self.schedule())
        self.assert_equal(mean_gradient(4, 31), gradient)
