"""Reductions in flight: overlapping, given up, failed, measured."""

from __future__ import annotations

import math
from unittest import mock

import torch

from fsdp_conformance.engine.chunks import chunk as chunk_module
from fsdp_conformance.engine.chunks import gradients as chunk_gradients
from fsdp_conformance.engine.chunks.chunk import shard_statistics
from fsdp_conformance.engine.chunks.memory_pool import MemoryPool
from fsdp_conformance.engine.chunks.storage import StorageState
from fsdp_conformance.engine.chunks.tensor_state import TensorState
from fsdp_conformance.engine.errors import ChunkStateError
from fsdp_conformance.tests.engine.chunks.chunk_ranks import (
    SHAPES,
    ChunkTestCase,
    coded,
    gradients,
    mean_gradient,
    to_ready,
)

S = TensorState


class AsyncTest(ChunkTestCase):
    """Tests of the time between the start and the end of a reduction."""

    def test_async_reduction(self) -> None:
        """
        The block of the unsharded chunk is back at once; the gradient is there after wait, a second wait gives the
        same; the next gradients go into another buffer meanwhile.
        """
        chunk = self.chunk_of()
        chunk.access()
        self.put(chunk)
        handle = chunk.reduce(async_op=True)
        self.assertIs(StorageState.SHARDED, chunk.state)
        self.assertEqual((0, None), (chunk.pool.counters.resized_leased, handle.result))
        chunk.access()
        chunk.gradients.put_all(gradients(self.rank, 4, times=8))
        first = handle.wait()
        self.assertIs(first, handle.wait())
        to_ready(chunk)
        second = chunk.reduce(release=False).wait()

        self.assert_equal(self.expected_shard(mean_gradient(4, 32)), first)
        self.assert_equal(self.expected_shard(mean_gradient(4, 32) * 8), second)
        self.assertIs(StorageState.UNSHARDED, chunk.state)

    def test_reductions_overlap_in_order(self) -> None:
        """
        Several chunks' reductions are on their way at once; `advance` starts the all-reduce without waiting for it;
        each ends with its own result.
        """
        pair, across = self.pair_group(), self.replica_group()
        pool = MemoryPool("cpu")
        chunks = [self.chunk_of(group=pair, replica_group=across, pool=pool) for _ in range(3)]
        handles = []
        for times, chunk in enumerate(chunks, 1):
            self.put(chunk, times=times)
            handles.append(chunk.reduce(async_op=True))
            for handle in handles[:-1]:
                handle.advance()

        for times, handle in reversed(list(enumerate(handles, 1))):
            self.assert_equal(self.expected_shard(mean_gradient(4, 32) * times, pair), handle.wait())
        self.assertEqual(0, pool.counters.leased_bytes)

    def test_the_chunk_does_not_keep_the_result(self) -> None:
        """
        When the caller lets go of gradient and handle, its memory is free: the chunk's bytes are those of its shard.
        """
        chunk = self.chunk_of()
        self.put(chunk)
        handle = chunk.reduce(async_op=True)
        gradient = handle.wait()
        use_count = torch._C._storage_Use_Count(gradient.untyped_storage()._cdata)
        del handle

        self.assertEqual(use_count, torch._C._storage_Use_Count(gradient.untyped_storage()._cdata))
        self.assertIsNone(chunk._reductions.under_way)
        chunk.pool.trim()
        self.assertEqual((0, {"cpu": 32}), (chunk.pool.counters.held_bytes, chunk.memory_usage))

    def test_gradients_are_opened_once(self) -> None:
        """A second buffer while there is one is refused."""
        chunk = self.chunk_of()
        chunk.open_gradients()
        with self.assertRaisesRegex(ChunkStateError, "gradients are already open"):
            chunk.open_gradients()

    def test_discarded_gradients(self) -> None:
        """zero_grad between two reductions: what was accumulated is gone, and so is its memory."""
        chunk = self.chunk_of()
        chunk.gradients.put_all(gradients(self.rank, 4, times=64))
        chunk.discard_gradients()
        chunk.discard_gradients()
        self.assertEqual(0, chunk.pool.counters.leased_bytes)
        self.put(chunk)

        self.assert_equal(self.expected_shard(mean_gradient(4, 32)), chunk.reduce().wait())
        chunk.access()
        self.assert_equal(coded(0, SHAPES[0]), chunk.views[0])

    def test_reset_after_an_exception(self) -> None:
        """The next step is right whatever the last one left: states, blocks, gradients, a reduction under way."""
        chunk = self.chunk_of()
        self.put(chunk, times=32)
        handle = chunk.reduce(async_op=True)
        chunk.access(async_op=True)
        chunk.move_all(S.COMPUTE)
        chunk.gradients.put(0, gradients(self.rank, 4)[0])
        chunk.reset()
        self.assertEqual((0, True), (chunk.pool.counters.leased_bytes, handle.done))
        self.assertEqual((StorageState.SHARDED, 5), (chunk.state, chunk.states.count(S.HOLD)))
        chunk.reset()
        chunk.access()
        self.assert_equal(coded(0, SHAPES[0]), chunk.views[0])
        self.put(chunk)

        self.assert_equal(self.expected_shard(mean_gradient(4, 32)), chunk.reduce().wait())

    def test_a_collective_that_cannot_be_started(self) -> None:
        """The exception comes through, the blocks are back, and the next reduction is right."""
        chunk = self.chunk_of()
        chunk.access()
        self.put(chunk, times=32)
        with (
            mock.patch.object(chunk_gradients, "reduce_scatter", side_effect=RuntimeError("no route")),
            self.assertRaisesRegex(RuntimeError, "no route"),
        ):
            chunk.reduce(async_op=True)
        self.assertEqual((0, None), (chunk.pool.counters.leased_bytes, chunk._reductions.under_way))
        self.put(chunk)

        self.assert_equal(self.expected_shard(mean_gradient(4, 32)), chunk.reduce().wait())

    def test_statistics_cover_valid_elements_once(self) -> None:
        """
        The squared norm is that of this rank's valid elements; an infinity on one rank is an overflow of the shard that
        it lands in, and of no other; both are measured once a reduction, and forgotten when the next one begins.
        """
        chunk = self.chunk_of()
        self.assertIsNone(chunk.statistics)
        self.put(chunk)
        with mock.patch.object(chunk_module, "shard_statistics", wraps=shard_statistics) as measured:
            handle = chunk.reduce(async_op=True)
            self.assertIsNone(chunk.statistics)
            gradient = handle.wait()
            handle.wait()
        assert chunk.statistics is not None
        valid = chunk.layout.valid_numel

        self.assertEqual([(valid,)], [tuple(call.args[0].shape) for call in measured.call_args_list])
        torch.testing.assert_close(chunk.statistics.squared_norm, (gradient[:valid] ** 2).sum())
        self.assertFalse(chunk.statistics.overflow)

        chunk.gradients.put_all(gradients(self.rank, 4))
        if self.rank == 1:
            chunk.gradients.view(1)[2] = math.inf  # element 17 of the chunk, which is in shard 2
        to_ready(chunk)
        chunk.reduce()
        assert chunk.statistics is not None
        self.assertEqual(self.rank == 2, bool(chunk.statistics.overflow))
