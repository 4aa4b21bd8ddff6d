"""The chunks of a model on one pool: which tensor is where, who may be accessed, statistics over all ranks."""

from __future__ import annotations

import math

import torch
from torch import nn

from fsdp_conformance.engine.chunks.chunk import Chunk, ChunkConfig
from fsdp_conformance.engine.chunks.group import ChunkGroup
from fsdp_conformance.engine.chunks.memory_pool import BlockKind, MemoryPool
from fsdp_conformance.engine.chunks.storage import StorageState
from fsdp_conformance.engine.chunks.tensor_state import TensorState
from fsdp_conformance.engine.errors import (
    ChunkError,
    ChunkStateError,
    IllegalTransition,
    PoolExhausted,
    TensorRefused,
)
from fsdp_conformance.tests.engine.chunks.chunk_ranks import (
    SHAPES,
    ChunkTestCase,
    allocate,
    coded,
    gradients,
    to_ready,
)

PUBLIC = ChunkConfig(block=BlockKind.PUBLIC)
FUSED = ChunkConfig(block=BlockKind.PRIVATE)


class GroupTest(ChunkTestCase):
    """A group of two public chunks and a fused one, on a pool with one public block."""

    def filled(self, *, num_blocks: int = 1) -> tuple[ChunkGroup, list[Chunk]]:
        """The group and its chunks, of 32 elements each."""
        pool = MemoryPool("cpu")
        pool.allocate_public(num_blocks, 32, torch.float32)
        pool.allocate_private([(32, torch.float32)])
        group = ChunkGroup(pool)
        configs = (PUBLIC, PUBLIC, FUSED)
        return group, [allocate(group, config) for config in configs]

    def test_chunks_of_tensors(self) -> None:
        """Each chunk once, in the order in which they were made; a tensor that is in none is named."""
        group, (first, second, fused) = self.filled()
        tensors = [fused.tensors[0], second.tensors[1], first.tensors[0], second.tensors[0]]

        self.assertEqual([first, second, fused], group.chunks_of(tensors))
        with self.assertRaisesRegex(TensorRefused, r"tensor \(2, 9\) is in no chunk.*tensor \(9,\) is in no chunk"):
            group.chunks_of([first.tensors[0], torch.ones(2, 9), torch.ones(9)])

    def test_a_tensor_is_in_one_chunk(self) -> None:
        """A second chunk with it is refused, and the group is as before."""
        group, (first, *_) = self.filled()
        with self.assertRaisesRegex(TensorRefused, "tensor .* is in Chunk"):
            group.close(Chunk.of(group.pool, [first.tensors[0].requires_grad_(False)], config=ChunkConfig()))
        self.assertEqual(3, len(group.chunks))
        self.assertEqual([first], group.chunks_of(first.tensors[:1]))

    def test_a_new_chunk_fits_the_pool(self) -> None:
        """A public chunk of another size or dtype is refused, unless the pool has no public blocks yet."""
        group, _ = self.filled()
        for numel, dtype in ((64, torch.float32), (32, torch.bfloat16)):
            with self.assertRaisesRegex(ChunkError, "expected the size of the public blocks"):
                group.open(numel, dtype, config=PUBLIC)
        empty = ChunkGroup(MemoryPool("cpu"))
        chunk = empty.open(64, torch.float32, config=PUBLIC)
        chunk.append(nn.Parameter(torch.ones(3)))
        self.assertEqual([], empty.chunks)
        empty.close(chunk)

        self.assertEqual([chunk], empty.chunks)
        with self.assertRaises(PoolExhausted):
            empty.access(chunk)

    def test_foreign_chunks(self) -> None:
        """A chunk of another pool, or one that is in already, is not taken in; one of another group is not accessed."""
        group, (first, *_) = self.filled()
        other, (foreign, *_) = self.filled()
        with self.assertRaisesRegex(ChunkError, "another memory pool than the group"):
            group.close(foreign)
        with self.assertRaisesRegex(ChunkError, "already in the group"):
            group.close(first)
        for call in (group.access, group.release, group.can_access):
            with self.assertRaisesRegex(ChunkError, "is not in the group"):
                call(foreign)
        self.assertEqual([], other.accessed)

    def test_access_and_release(self) -> None:
        """An accessed chunk is not accessed again; without a free block the next is refused; a fused one needs none."""
        group, (first, second, fused) = self.filled()
        self.assertTrue(all(group.can_access(chunk) for chunk in (first, second, fused)))
        self.assertIsNotNone(group.access(first))
        self.assertIsNone(group.access(first))
        self.assertEqual([True, False, True], [group.can_access(chunk) for chunk in (first, second, fused)])
        with self.assertRaises(PoolExhausted):
            group.access(second)
        group.access(fused)
        self.assertEqual([first, fused], group.accessed)
        with self.assertRaisesRegex(ChunkStateError, "expected state GATHERING or UNSHARDED, got SHARDED"):
            group.release(second)
        with self.assertRaisesRegex(ChunkStateError, "cannot release a fused chunk"):
            group.release(fused)
        group.release(first)

        self.assertIsNotNone(group.access(second))
        self.assert_equal(coded(0, SHAPES[0]), second.tensors[0].detach())

    def test_room_for_resized_chunks(self) -> None:
        """Their room is what the pool's limit leaves."""
        group = ChunkGroup(MemoryPool("cpu", limit_bytes=200))
        first, second = (allocate(group) for _ in range(2))
        group.access(first)
        self.assertEqual([True, False], [group.can_access(chunk) for chunk in (first, second)])
        with self.assertRaises(PoolExhausted):
            group.access(second)
        self.assertIs(StorageState.SHARDED, second.state)

    def test_moves(self) -> None:
        """Tensors of several chunks are moved by themselves; a chunk in use is not released."""
        group, (first, second, _) = self.filled(num_blocks=2)
        group.access(first)
        group.move([first.tensors[1], second.tensors[2]], TensorState.COMPUTE)
        self.assertEqual([1, 1], [chunk.states.count(TensorState.COMPUTE) for chunk in (first, second)])
        with self.assertRaisesRegex(ChunkStateError, "tensor 1 is COMPUTE"):
            group.release(first)
        with self.assertRaises(IllegalTransition):
            group.move([first.tensors[1]], TensorState.FREE)
        with self.assertRaises(TensorRefused):
            group.move([torch.ones(2)], TensorState.COMPUTE)

    def test_reduce_returns_the_block(self) -> None:
        """After it another chunk can be accessed; before all gradients are there it is refused."""
        group, (first, second, _) = self.filled()
        group.access(first)
        with self.assertRaisesRegex(ChunkStateError, "expected READY_FOR_REDUCE"):
            first.reduce()
        first.gradients.put_all(gradients(self.rank, 4))
        to_ready(first)
        first.reduce()
        self.assertEqual([], group.accessed)
        group.access(second)

        self.assertEqual([second], group.accessed)

    def test_the_total_norm(self) -> None:
        """
        The squared norms of all chunks on all ranks add up to that of the reduced gradients: one all-reduce of two
        numbers, whatever the number of chunks. Elements of padding count nothing.
        """
        group, chunks = self.filled()
        with self.assertRaisesRegex(ChunkStateError, "has no statistics"):
            group.statistics()
        for times, chunk in enumerate(chunks, 1):
            chunk.gradients.put_all(gradients(self.rank, 4, times=times))
            to_ready(chunk)
            chunk.reduce()
        self.schedule()
        total = group.statistics()

        squares = sum(float((coded(index, shape).double() ** 2).sum()) for index, shape in enumerate(SHAPES))
        expected = squares * 15**2 * (1 + 4 + 9)
        self.assertEqual(["all_reduce 8B float32 SUM [0,1,2,3]"], self.schedule())
        torch.testing.assert_close(total.squared_norm.item(), expected, rtol=1e-6, atol=0)
        self.assertFalse(total.overflow)

    def test_an_overflow_anywhere_is_one_everywhere(self) -> None:
        """NaN in one element of one rank's shard of one chunk: every rank skips the step."""
        group, chunks = self.filled()
        for chunk in chunks:
            chunk.gradients.put_all(gradients(self.rank, 4))
            to_ready(chunk)
        if self.rank == 3:
            chunks[1].gradients.views[0][2, 4] = math.nan
        for chunk in chunks:
            chunk.reduce()

        self.assertTrue(group.statistics().overflow)

    def test_norms_over_several_groups(self) -> None:
        """A chunk sharded over a pair adds its own sum over the pair: one all-reduce for each group."""
        pool = MemoryPool("cpu")
        group = ChunkGroup(pool)
        whole = allocate(group)
        pair = allocate(group, process_group=self.pair_group())
        for chunk, size in ((whole, 4), (pair, 2)):
            chunk.gradients.put_all(gradients(chunk.layout.rank, size))
            to_ready(chunk)
            chunk.reduce()
        self.schedule()
        total = group.statistics()

        squares = sum(float((coded(index, shape).double() ** 2).sum()) for index, shape in enumerate(SHAPES))
        self.assertEqual(2, len(self.schedule()))
        torch.testing.assert_close(total.squared_norm.item(), squares * (15**2 + 3**2), rtol=1e-6, atol=0)
