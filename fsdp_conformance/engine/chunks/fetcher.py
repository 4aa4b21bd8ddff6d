"""
Brings the chunks of an operation into memory that has room for only some of them, and chooses which ones have to leave.

    fetcher = ChunkFetcher(group, NextUseScheduler(steps))
    chunks = fetcher.start_compute(tensors)     # their states say that they are in use
    fetcher.fetch(chunks)                       # gathers what is missing, evicting others if need be
    ... compute ...
    fetcher.end_compute(tensors)                # they may be evicted again
    fetcher.reduce(chunk)                       # in backward, when its gradients are there

A scheduler is told which chunks may leave, and says which one goes first: the one that has been idle for longest
(FIFO), or the one that is needed again last. Both decide by the order of calls alone, so that all ranks decide alike.
"""

from __future__ import annotations

import bisect
import math
from abc import ABC, abstractmethod
from collections.abc import Container, Iterable, Sequence

from torch import Tensor

from fsdp_conformance.engine.chunks.chunk import Chunk
from fsdp_conformance.engine.chunks.group import ChunkGroup
from fsdp_conformance.engine.chunks.reduction import Reduction
from fsdp_conformance.engine.chunks.state import TensorState
from fsdp_conformance.engine.errors import PoolExhausted


class ChunkScheduler(ABC):
    """Which of the chunks that may leave goes first. The chunks are kept in the order in which they were added."""

    def __init__(self) -> None:
        self._candidates: dict[Chunk, None] = {}

    def add(self, chunk: Chunk) -> None:
        """The chunk may leave. One that may already keeps its place."""
        self._candidates.setdefault(chunk)

    def remove(self, chunk: Chunk) -> None:
        """The chunk must stay. Nothing happens if it had to anyway."""
        self._candidates.pop(chunk, None)

    def top(self, *, keep: Container[Chunk] = ()) -> Chunk | None:
        """
        The chunk that should go first, of those that can be released and are not in `keep`; None if there is none.
        """
        leaving = [chunk for chunk in self._candidates if chunk not in keep and chunk.can_release]
        return self.choose(leaving) if leaving else None

    def step(self) -> None:
        """The next operation begins."""

    def reset(self) -> None:
        """An iteration begins: nothing may leave, and no operation has begun."""
        self._candidates.clear()

    def next_use(self, chunk: Chunk) -> float:
        """How soon the chunk is used again, as the number of an operation; infinity: not known, or never."""
        return math.inf

    def next_chunks(self) -> Sequence[Chunk]:
        """The chunks of the operation after this one; empty where that is not known."""
        return ()

    @abstractmethod
    def choose(self, leaving: Sequence[Chunk]) -> Chunk:
        """One of `leaving`, which is not empty, in the order in which they were added."""


class FifoScheduler(ChunkScheduler):
    """The chunk that may leave for longest goes first."""

    def choose(self, leaving: Sequence[Chunk]) -> Chunk:
        """The first one."""
        return leaving[0]


class NextUseScheduler(ChunkScheduler):
    """
    The chunk whose next use is farthest away goes first; one that is not used again, before all others.

    `steps`: for each operation of an iteration, in order, the chunks that it uses, as `ChunkFetcher.trace` has them.
    """

    def __init__(self, steps: Iterable[Iterable[Chunk]]) -> None:
        super().__init__()
        self._steps = [tuple(step) for step in steps]
        self._current = -1
        self._uses: dict[Chunk, list[int]] = {}
        for index, step in enumerate(self._steps):
            for chunk in step:
                self._uses.setdefault(chunk, []).append(index)

    def step(self) -> None:
        """The next operation begins. Beyond the last one, nothing is used again."""
        self._current += 1

    def reset(self) -> None:
        """An iteration begins."""
        super().reset()
        self._current = -1

    def next_use(self, chunk: Chunk) -> float:
        """The operation after the current one that uses the chunk; infinity if there is none."""
        uses = self._uses.get(chunk, [])
        place = bisect.bisect_right(uses, self._current)
        return uses[place] if place < len(uses) else math.inf

    def next_chunks(self) -> Sequence[Chunk]:
        """The chunks of the next operation."""
        following = self._current + 1
        return self._steps[following] if following < len(self._steps) else ()

    def choose(self, leaving: Sequence[Chunk]) -> Chunk:
        """The farthest; among equals the chunk that was made first."""
        return max(leaving, key=lambda chunk: (self.next_use(chunk), -chunk.chunk_id))


class ChunkFetcher:
    """
    Fetches and reduces the chunks of a group.

    `prefetch`: whether the chunks of the next operation, where the scheduler knows them, are gathered while this one
    computes. `overlap`: whether a reduction is waited for only when the next one begins, or in `finish`.
    """

    def __init__(
        self, group: ChunkGroup, scheduler: ChunkScheduler, *, prefetch: bool = False, overlap: bool = False
    ) -> None:
        self.group = group
        self.scheduler = scheduler
        self.prefetch = prefetch
        self.overlap = overlap
        self.trace: list[tuple[Chunk, ...]] = []
        """The chunks of each operation since the last `reset`: the steps of a `NextUseScheduler`."""
        self._reduction: Reduction | None = None

    def reset(self) -> None:
        """An iteration begins."""
        self.finish()
        self.scheduler.reset()
        self.trace = []
        for chunk in self.group.accessed:
            if chunk.can_release:
                self.scheduler.add(chunk)

    def finish(self) -> None:
        """Wait for the reduction that is on its way."""
        reduction, self._reduction = self._reduction, None
        if reduction is not None:
            reduction.wait()

    def start_compute(self, tensors: Sequence[Tensor]) -> list[Chunk]:
        """
        The tensors are about to be used: they are in COMPUTE, and their chunks must stay. Returns those.

        Raises TensorRefused for a tensor that is in no chunk, IllegalTransition for one that may not be used now.
        """
        chunks = self.group.chunks_of(tensors)
        self.group.move(tensors, TensorState.COMPUTE)
        for chunk in chunks:
            self.scheduler.remove(chunk)
        return chunks

    def end_compute(self, tensors: Sequence[Tensor], *, backward: bool = False) -> list[Chunk]:
        """The tensors are not used any more, in a forward or a backward: their chunks may leave. Returns those."""
        chunks = self.group.chunks_of(tensors)
        self.group.move(tensors, TensorState.HOLD_AFTER_BWD if backward else TensorState.HOLD)
        for chunk in chunks:
            if chunk.can_release:
                self.scheduler.add(chunk)
        return chunks

    def fetch(self, chunks: Sequence[Chunk]) -> None:
        """
        Have `chunks` unsharded, for the current stream: one operation begins.

        Raises PoolExhausted if there is no block and no chunk that can leave; what was gathered before that stays.
        """
        self.scheduler.step()
        self.trace.append(tuple(chunks))
        for chunk in chunks:
            while not self.group.can_access(chunk):
                if not self._evict_one(keep=chunks):
                    raise PoolExhausted(
                        f"no block for {chunk!r} beside {len(self.group.accessed)} accessed chunks, of which none can "
                        "leave, but should be one",
                        where="ChunkFetcher.fetch",
                        hint="Allocate more blocks, or use fewer tensors at once",
                    )
            self.group.access(chunk, async_op=True)
        for chunk in chunks:
            chunk.access()
        if self.prefetch:
            self._prefetch(chunks)

    def reduce(self, chunk: Chunk, *, into: Tensor | None = None) -> Reduction | None:
        """Reduce a chunk and return its block; None, and nothing happens, unless all of its gradients are there."""
        if not chunk.can_reduce:
            return None
        self.scheduler.remove(chunk)
        self.finish()
        reduction = self.group.reduce(chunk, async_op=self.overlap, into=into)
        if self.overlap:
            self._reduction = reduction
        return reduction

    def _prefetch(self, current: Sequence[Chunk]) -> None:
        """Start to gather what the next operation uses, unless something that is needed sooner had to leave for it."""
        following = self.scheduler.next_chunks()
        keep = {*current, *following}
        for chunk in following:
            while not self.group.can_access(chunk):
                if not self._evict_one(keep=keep):
                    return
            if self.group.access(chunk, async_op=True) is not None:
                self.scheduler.add(chunk)  # If the next operation is another one, it may leave.

    def _evict_one(self, *, keep: Container[Chunk]) -> bool:
        """Release the chunk that should go first. False if none can."""
        chunk = self.scheduler.top(keep=keep)
        if chunk is None:
            return False
        self.scheduler.remove(chunk)
        self.group.release(chunk)
        return True
