"""
The chunks of a model on one memory pool: which tensor is in which, which are accessed, and their statistics together.

    group = ChunkGroup(pool)
    chunk = group.allocate(tensors, numel=1024, dtype=torch.float32)
    group.access(chunk)
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup

from fsdp_conformance.engine.chunks.chunk import Chunk
from fsdp_conformance.engine.chunks.config import ChunkConfig
from fsdp_conformance.engine.chunks.gathering import Gathering
from fsdp_conformance.engine.chunks.memory_pool import BlockKind, BlockSpec, MemoryPool
from fsdp_conformance.engine.chunks.reduction import Reduction
from fsdp_conformance.engine.chunks.state import ChunkState, TensorState
from fsdp_conformance.engine.errors import ChunkError, ChunkStateError, TensorRefused


class GroupStatistics(NamedTuple):
    """Of the last reductions of all chunks, over all ranks: 0-dimensional tensors on the pool's device."""

    squared_norm: Tensor
    """The squared norm of the reduced gradient, in float32 (float64 if a chunk is)."""
    overflow: Tensor
    """bool: whether any element on any rank is infinite or not a number. The step is to be skipped then."""


class ChunkGroup:
    """The chunks on one pool, in the order in which they were made."""

    def __init__(self, pool: MemoryPool) -> None:
        self.pool = pool
        self.chunks: list[Chunk] = []
        self._members: set[Chunk] = set()
        self._chunk_of: dict[int, Chunk] = {}

    @property
    def accessed(self) -> list[Chunk]:
        """The chunks that are unsharded, or on their way."""
        return [chunk for chunk in self.chunks if self.is_accessed(chunk)]

    def is_accessed(self, chunk: Chunk) -> bool:
        """Whether the chunk is unsharded, or on its way. Raises ChunkError if it is not of this group."""
        self._check_member(chunk)
        return chunk.state in (ChunkState.GATHERING, ChunkState.UNSHARDED)

    # --- filling -----------------------------------------------------------------------------------------------------

    def open(
        self,
        numel: int,
        dtype: torch.dtype,
        group: ProcessGroup | None = None,
        *,
        replica_group: ProcessGroup | None = None,
        config: ChunkConfig | None = None,
    ) -> Chunk:
        """A chunk to append to; it belongs to the group once `close` was called. Raises ChunkError as `Chunk` does."""
        return Chunk(self.pool, numel, dtype, group, replica_group=replica_group, config=config)

    def close(self, chunk: Chunk) -> None:
        """
        Close a chunk if it is open, and take it in.

        Raises ChunkError for one of another pool or taken in before, TensorRefused if one of its tensors is in another
        chunk of the group; then nothing has changed.
        """
        problems = []
        if chunk.pool is not self.pool:
            problems.append(f"{chunk!r} is on another memory pool, but should be on that of the group")
        if chunk in self._members:
            problems.append(f"{chunk!r} is in the group, but should be added once")
        if problems:
            raise ChunkError(problems, where="ChunkGroup.close")
        known = [index for index, tensor in enumerate(chunk.tensors) if id(tensor) in self._chunk_of]
        if known:
            raise TensorRefused(
                [f"tensor {index} is in {self._chunk_of[id(chunk.tensors[index])]!r}" for index in known],
                where=f"ChunkGroup.close of {chunk!r}",
                hint="A tensor should be in one chunk: share the tensor, not its storage",
            )
        if chunk.state is ChunkState.OPEN:
            chunk.close()
        self.chunks.append(chunk)
        self._members.add(chunk)
        self._chunk_of.update({id(tensor): chunk for tensor in chunk.tensors})

    def allocate(
        self,
        tensors: Iterable[Tensor],
        numel: int,
        dtype: torch.dtype,
        group: ProcessGroup | None = None,
        *,
        replica_group: ProcessGroup | None = None,
        config: ChunkConfig | None = None,
    ) -> Chunk:
        """A chunk with `tensors`, closed and taken in."""
        chunk = self.open(numel, dtype, group, replica_group=replica_group, config=config)
        for tensor in tensors:
            if id(tensor) in self._chunk_of:
                raise TensorRefused(
                    f"tensor {tuple(tensor.shape)} is in {self._chunk_of[id(tensor)]!r}, but should be in none",
                    where="ChunkGroup.allocate",
                )
            chunk.append(tensor)
        self.close(chunk)
        return chunk

    def chunk_of(self, tensor: Tensor) -> Chunk:
        """The chunk that holds a tensor, by identity. Raises TensorRefused if there is none."""
        return self.chunks_of([tensor])[0]

    def chunks_of(self, tensors: Sequence[Tensor]) -> list[Chunk]:
        """
        The chunks that hold `tensors`, each once, in order. Raises TensorRefused naming every tensor that is in none.
        """
        unknown = [tensor for tensor in tensors if id(tensor) not in self._chunk_of]
        if unknown:
            raise TensorRefused(
                [f"tensor {tuple(tensor.shape)} is in no chunk, but should be in one" for tensor in unknown],
                where="ChunkGroup",
            )
        return sorted({self._chunk_of[id(tensor)] for tensor in tensors})

    # --- access, release, reduce -------------------------------------------------------------------------------------

    def can_access(self, chunk: Chunk) -> bool:
        """Whether `access` would find a block now."""
        if self.is_accessed(chunk) or chunk.is_fused or chunk.aliases_shard:
            return True
        if chunk.config.block is BlockKind.PUBLIC:
            return self.pool.counters.public_free > 0
        return self.pool.has_room(BlockSpec(chunk.numel, chunk.compute_dtype).nbytes)

    def access(self, chunk: Chunk, *, async_op: bool = False, after: Any = None) -> Gathering | None:
        """Gather a chunk. None, and nothing happens, if it is accessed. Raises PoolExhausted; all is as before then."""
        return None if self.is_accessed(chunk) else chunk.access(async_op=async_op, after=after)

    def release(self, chunk: Chunk) -> None:
        """Return a chunk's block. Raises ChunkStateError unless it is accessed, not fused, and no tensor is in use."""
        if not self.is_accessed(chunk):
            raise ChunkStateError(f"{chunk!r} is not accessed, but should be", where="ChunkGroup.release")
        chunk.release()

    def reduce(self, chunk: Chunk, *, async_op: bool = False, into: Tensor | None = None) -> Reduction:
        """Reduce a chunk's gradients and return its block. Raises ChunkStateError unless all gradients are there."""
        self._check_member(chunk)
        return chunk.reduce(async_op=async_op, into=into)

    def move(self, tensors: Iterable[Tensor], state: TensorState) -> None:
        """Move tensors to a state. Raises TensorRefused for one that is in no chunk, IllegalTransition."""
        for tensor in tensors:
            self.chunk_of(tensor).move(tensor, state)

    # --- statistics --------------------------------------------------------------------------------------------------

    @torch.no_grad()
    def statistics(self) -> GroupStatistics:
        """
        The squared norm and the overflow of all gradients, over all ranks.

        One all-reduce of two numbers for each process group among the chunks. Chunks of several groups are added up
        as this rank sees them. The host does not wait. Raises ChunkStateError if a chunk has no statistics: not
        reduced, or on its way, or not asked to measure.
        """
        missing = [chunk for chunk in self.chunks if chunk.statistics is None]
        if missing:
            raise ChunkStateError(
                [f"{chunk!r} has no statistics, but should have been reduced" for chunk in missing],
                where="ChunkGroup.statistics",
            )
        by_group: dict[int, list[Chunk]] = {}
        for chunk in self.chunks:
            by_group.setdefault(id(chunk.group), []).append(chunk)
        total = torch.zeros(2, dtype=torch.float32, device=self.pool.device)
        for chunks in by_group.values():
            total = total + self._sum_over_ranks(chunks)
        return GroupStatistics(total[0], total[1] > 0)

    def _sum_over_ranks(self, chunks: Sequence[Chunk]) -> Tensor:
        """[squared norm, number of chunks and ranks with an overflow] of chunks on one process group."""
        device = self.pool.device
        found = [chunk.statistics for chunk in chunks if chunk.statistics is not None]
        norms = torch.stack([one.squared_norm.to(device) for one in found]).sum()
        overflows = torch.stack([one.overflow.to(device) for one in found]).sum()
        total = torch.stack([norms, overflows.to(norms.dtype)])
        if chunks[0].layout.world_size > 1:
            dist.all_reduce(total, group=chunks[0].group)
        return total

    def _check_member(self, chunk: Chunk) -> None:
        if chunk not in self._members:
            raise ChunkError(f"{chunk!r} is not in the group, but should be", where="ChunkGroup")
