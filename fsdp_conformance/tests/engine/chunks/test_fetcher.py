"""Fetching with room for few chunks: which one is evicted, and that nothing computed is wrong."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from fsdp_conformance.engine.chunks.chunk import Chunk, ChunkConfig
from fsdp_conformance.engine.chunks.fetcher import ChunkFetcher, ChunkScheduler, FifoScheduler, NextUseScheduler
from fsdp_conformance.engine.chunks.group import ChunkGroup
from fsdp_conformance.engine.chunks.memory_pool import BlockKind, MemoryPool
from fsdp_conformance.engine.chunks.tensor_state import TensorState
from fsdp_conformance.engine.errors import IllegalTransition, PoolExhausted, TensorRefused
from fsdp_conformance.tests.engine.chunks.chunk_ranks import SHAPES, ChunkTestCase, allocate, coded, to_ready


class FetcherTestCase(ChunkTestCase):
    """Chunks A, B, C, D of 32 elements, and a pool with some public blocks."""

    def fetcher(
        self,
        num_chunks: int,
        num_blocks: int,
        scheduler: ChunkScheduler | None = None,
        *,
        steps: str = "",
    ) -> tuple[ChunkFetcher, list[Chunk]]:
        """A fetcher and its chunks. `steps` names the chunk of each operation for a next-use scheduler."""
        pool = MemoryPool("cpu")
        pool.allocate_public(num_blocks, 32, torch.float32)
        group = ChunkGroup(pool)
        config = ChunkConfig(block=BlockKind.PUBLIC)
        chunks = [allocate(group, config) for _ in range(num_chunks)]
        if steps:
            scheduler = NextUseScheduler([chunks["ABCD".index(name)]] for name in steps)
        return ChunkFetcher(group, scheduler or FifoScheduler()), chunks

    def use(self, fetcher: ChunkFetcher, chunk: Chunk, *, backward: bool = False) -> None:
        """One operation on all tensors of a chunk, which must have their values then."""
        tensors: list[Tensor] = chunk.tensors
        fetcher.fetch(fetcher.start_compute(tensors))
        for index, tensor in enumerate(tensors):
            self.assert_equal(coded(index, SHAPES[index]), tensor.detach())
        fetcher.end_compute(tensors, backward=backward)

    def names(self, chunks: list[Chunk], fetcher: ChunkFetcher) -> str:
        """The names of those that are accessed."""
        return "".join("ABCD"[chunks.index(chunk)] for chunk in fetcher.group.accessed)


class SchedulerTest(FetcherTestCase):
    """Tests of schedulers alone."""

    def accessed(self, num: int) -> list[Chunk]:
        """Chunks that can leave."""
        chunks = [self.chunk_of() for _ in range(num)]
        for chunk in chunks:
            chunk.access()
        return chunks

    def test_fifo(self) -> None:
        """The first to be added goes first; adding again keeps the place, removing what is not there does nothing."""
        first, second, third = self.accessed(3)
        scheduler = FifoScheduler()
        self.assertIsNone(scheduler.top())
        for chunk in (second, first, third, second):
            scheduler.add(chunk)
        self.assertIs(second, scheduler.top())
        self.assertIs(first, scheduler.top(keep={second}))
        scheduler.remove(second)
        scheduler.remove(second)
        self.assertIs(first, scheduler.top())
        scheduler.add(second)
        self.assertIs(first, scheduler.top(), "added again it stands at the end")
        first.release()
        self.assertIs(third, scheduler.top(), "what is released already cannot leave")
        scheduler.reset()
        self.assertIsNone(scheduler.top())

    def test_farthest_next_use(self) -> None:
        """Of A, used next, B, used later, and C, never used again, C leaves first, then B; equals by age."""
        a, b, c, d = self.accessed(4)
        scheduler = NextUseScheduler([[a, b, c], [a], [b], [a]])
        for chunk in (a, b, c, d):
            scheduler.add(chunk)
        scheduler.step()
        self.assertEqual([1, 2, math.inf, math.inf], [scheduler.next_use(chunk) for chunk in (a, b, c, d)])
        self.assertIs(c, scheduler.top())
        self.assertIs(b, scheduler.top(keep={c, d}))
        for _ in range(3):
            scheduler.step()
        self.assertEqual([math.inf] * 4, [scheduler.next_use(chunk) for chunk in (a, b, c, d)])
        scheduler.reset()
        self.assertEqual([0, 0, 0, math.inf], [scheduler.next_use(chunk) for chunk in (a, b, c, d)])
        self.assertIsNone(scheduler.top())


class FetcherTest(FetcherTestCase):
    """Tests of fetchers."""

    def test_fifo_eviction(self) -> None:
        """With room for two of three, the one that has been idle for longest leaves: at last C, as B was used."""
        fetcher, chunks = self.fetcher(3, 2)
        seen = []
        for name in "ABCBA":
            self.use(fetcher, chunks["ABC".index(name)])
            seen.append(self.names(chunks, fetcher))

        self.assertEqual(["A", "AB", "BC", "BC", "AB"], seen)

    def test_farthest_next_use_eviction(self) -> None:
        """
        A chunk that is used again soon stays, though it is the oldest: A B C A B needs four gathers in place of five.
        """
        gathers = {}
        for kind in ("", "ABCAB"):
            fetcher, chunks = self.fetcher(3, 2, steps=kind)
            self.schedule()
            for name in "ABCAB":
                self.use(fetcher, chunks["ABC".index(name)])
            gathers[kind] = len(self.schedule())

        self.assertEqual({"": 5, "ABCAB": 4}, gathers)

    def test_no_room_at_all(self) -> None:
        """Chunks of one operation do not evict one another: a typed error that names the lack, and nothing is lost."""
        fetcher, chunks = self.fetcher(3, 2)
        tensors = [tensor for chunk in chunks for tensor in chunk.tensors]
        with self.assertRaisesRegex(PoolExhausted, "2 chunks are gathered, and none can be evicted"):
            fetcher.fetch(fetcher.start_compute(tensors))
        fetcher.end_compute(tensors)

        self.assertEqual("AB", self.names(chunks, fetcher))
        self.assertEqual(0, fetcher.group.pool.counters.public_free)
        self.use(fetcher, chunks[2])

    def test_a_chunk_in_use_stays(self) -> None:
        """Between start and end of its computation it is not evicted, not even by the only fetch there is room for."""
        fetcher, chunks = self.fetcher(2, 1)
        fetcher.fetch(fetcher.start_compute(chunks[0].tensors))
        with self.assertRaises(PoolExhausted):
            fetcher.fetch(fetcher.start_compute(chunks[1].tensors))
        self.assert_equal(coded(0, SHAPES[0]), chunks[0].tensors[0].detach())

    def test_a_chunk_with_one_tensor_in_use_stays(self) -> None:
        """The end of one tensor's computation is not the end of the chunk's."""
        fetcher, chunks = self.fetcher(2, 1)
        first, second = chunks[0].tensors[:2]
        fetcher.fetch(fetcher.start_compute([first, second]))
        fetcher.end_compute([first])
        self.assertIsNone(fetcher.scheduler.top())
        fetcher.end_compute([second])

        self.assertIs(chunks[0], fetcher.scheduler.top())

    def test_states_of_a_step(self) -> None:
        """
        HOLD after a forward, HOLD_AFTER_BWD after a backward; tensors of no chunk, and illegal moves, are refused.
        """
        fetcher, chunks = self.fetcher(1, 1)
        self.use(fetcher, chunks[0])
        self.assertEqual(5, chunks[0].states.count(TensorState.HOLD))
        self.use(fetcher, chunks[0], backward=True)
        self.assertEqual(5, chunks[0].states.count(TensorState.HOLD_AFTER_BWD))
        self.use(fetcher, chunks[0], backward=True)  # used twice, or recomputed
        with self.assertRaises(IllegalTransition):
            fetcher.end_compute(chunks[0].tensors)
        with self.assertRaises(TensorRefused):
            fetcher.start_compute([torch.ones(1)])

    def test_reset_knows_what_can_leave(self) -> None:
        """Chunks that are accessed when an iteration begins may be evicted in it."""
        fetcher, chunks = self.fetcher(2, 1)
        chunks[0].access()
        fetcher.reset()
        self.use(fetcher, chunks[1])
        to_ready(chunks[1])

        self.assertEqual("B", self.names(chunks, fetcher))
