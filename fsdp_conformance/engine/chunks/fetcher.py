"""
Gathers the chunks of an operation when memory has room for only some, and chooses which ones to evict.

    fetcher = ChunkFetcher(group, NextUseScheduler(steps))
    chunks = fetcher.start_compute(tensors)     # the tensors are in use from now on
    fetcher.fetch(chunks)                       # gathers what is missing, evicting other chunks if necessary
    ... compute ...
    fetcher.end_compute(tensors)                # their chunks may be evicted again

A scheduler chooses among the chunks that may be evicted: the one that has been idle longest (FIFO), or the one
whose next use is farthest away. Both decide from the order of calls alone, so all ranks make the same choice.
"""

from __future__ import annotations

import bisect
import math
from abc import ABC, abstractmethod
from collections.abc import Container, Iterable, Sequence

from torch import Tensor

from fsdp_conformance.engine.chunks.chunk import Chunk
from fsdp_conformance.engine.chunks.group import ChunkGroup
from fsdp_conformance.engine.chunks.tensor_state import TensorState
from fsdp_conformance.engine.errors import PoolExhausted


class ChunkScheduler(ABC):
    """Chooses the chunk to evict. Keeps the candidates in the order in which they were added."""

    def __init__(self) -> None:
        self._candidates: dict[Chunk, None] = {}

    def add(self, chunk: Chunk) -> None:
        """Allow the chunk to be evicted. One that already may be keeps its place."""
        self._candidates.setdefault(chunk)

    def remove(self, chunk: Chunk) -> None:
        """Do not allow the chunk to be evicted. Does nothing if it was not a candidate."""
        self._candidates.pop(chunk, None)

    def top(self, *, keep: Container[Chunk] = ()) -> Chunk | None:
        """The next chunk to evict, of the candidates that can be released and are not in `keep`; None without one."""
        leaving = [chunk for chunk in self._candidates if chunk not in keep and chunk.can_release]
        return self.choose(leaving) if leaving else None

    def step(self) -> None:
        """The next operation begins."""

    def reset(self) -> None:
        """An iteration begins: there are no candidates, and no operation has begun."""
        self._candidates.clear()

    @abstractmethod
    def choose(self, leaving: Sequence[Chunk]) -> Chunk:
        """One of `leaving`, which is not empty and is in the order in which the chunks were added."""


class FifoScheduler(ChunkScheduler):
    """Evicts the chunk that has been a candidate longest."""

    def choose(self, leaving: Sequence[Chunk]) -> Chunk:
        """The first one."""
        return leaving[0]


class NextUseScheduler(ChunkScheduler):
    """
    Evicts the chunk whose next use is farthest away; chunks that are not used again go before all others.

    `steps`: for each operation of an iteration, in order, the chunks that it uses.
    """

    def __init__(self, steps: Iterable[Iterable[Chunk]]) -> None:
        super().__init__()
        self._current = -1
        self._uses: dict[Chunk, list[int]] = {}
        for index, step in enumerate(steps):
            for chunk in step:
                self._uses.setdefault(chunk, []).append(index)

    def step(self) -> None:
        """The next operation begins. After the last one nothing is used again."""
        self._current += 1

    def reset(self) -> None:
        """An iteration begins."""
        super().reset()
        self._current = -1

    def next_use(self, chunk: Chunk) -> float:
        """The number of the next operation after the current one that uses the chunk; infinity if there is none."""
        uses = self._uses.get(chunk, [])
        place = bisect.bisect_right(uses, self._current)
        return uses[place] if place < len(uses) else math.inf

    def choose(self, leaving: Sequence[Chunk]) -> Chunk:
        """The one used farthest in the future; of several, the oldest chunk."""
        return max(leaving, key=lambda chunk: (self.next_use(chunk), -chunk.chunk_id))


class ChunkFetcher:
    """Fetches the chunks of a group."""

    def __init__(self, group: ChunkGroup, scheduler: ChunkScheduler) -> None:
        self.group = group
        self.scheduler = scheduler

    def reset(self) -> None:
        """An iteration begins. Chunks that are gathered and not in use may be evicted."""
        self.scheduler.reset()
        for chunk in self.group.accessed:
            if chunk.can_release:
                self.scheduler.add(chunk)

    def start_compute(self, tensors: Sequence[Tensor]) -> list[Chunk]:
        """
        Mark the tensors as in use: their states become COMPUTE, and their chunks must stay. Returns the chunks.

        Raises TensorRefused for a tensor that is in no chunk, IllegalTransition for one that may not be used now.
        """
        chunks = self.group.chunks_of(tensors)
        self.group.move(tensors, TensorState.COMPUTE)
        for chunk in chunks:
            self.scheduler.remove(chunk)
        return chunks

    def end_compute(self, tensors: Sequence[Tensor], *, backward: bool = False) -> list[Chunk]:
        """Mark the tensors as unused, by a forward or a backward: their chunks may be evicted. Returns the chunks."""
        chunks = self.group.chunks_of(tensors)
        self.group.move(tensors, TensorState.HOLD_AFTER_BWD if backward else TensorState.HOLD)
        for chunk in chunks:
            if chunk.can_release:
                self.scheduler.add(chunk)
        return chunks

    def fetch(self, chunks: Sequence[Chunk]) -> None:
        """
        Begin an operation: have `chunks` unsharded, for the current stream.

        Raises PoolExhausted if there is no block and no chunk can be evicted; chunks gathered by then stay gathered.
        """
        self.scheduler.step()
        for chunk in chunks:
            while not self.group.can_access(chunk):
                self._evict_one(chunk, keep=chunks)
            self.group.access(chunk, async_op=True)
        for chunk in chunks:
            chunk.access()

    def _evict_one(self, requested: Chunk, *, keep: Container[Chunk]) -> None:
        """Release the chunk that the scheduler chooses, to make room for `wanted`."""
        chunk = self.scheduler.top(keep=keep)
        if chunk is None:
            raise PoolExhausted(
                f"no block for {requested!r}: {len(self.group.accessed)} chunks are gathered, and none can be evicted",
                where="ChunkFetcher.fetch",
                hint="Allocate more blocks, or use fewer tensors at once",
            )
        self.scheduler.remove(chunk)
        self.group.release(chunk)
