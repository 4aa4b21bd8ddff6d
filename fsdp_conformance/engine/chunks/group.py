"""
The chunks of a model on one memory pool: which tensor is in which, which are gathered, and their combined statistics.

    group = ChunkGroup(pool)
    chunk = group.open(1024, torch.float32)
    chunk.append(tensor)
    group.close(chunk)
    group.access(chunk)
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup

from fsdp_conformance.engine.chunks.chunk import Chunk, ChunkConfig
from fsdp_conformance.engine.chunks.memory_pool import BlockKind, BlockSpec, MemoryPool
from fsdp_conformance.engine.chunks.storage import Gathering, StorageState
from fsdp_conformance.engine.chunks.tensor_state import TensorState
from fsdp_conformance.engine.errors import ChunkError, ChunkStateError, TensorRefused


class GroupStatistics(NamedTuple):
    """Statistics of the last reductions of all chunks, over all ranks: 0-dimensional tensors on the pool's device."""

    squared_norm: Tensor
    """The squared norm of the reduced gradient, in float32 (float64 if a chunk is)."""
    overflow: Tensor
    """bool: whether any element on any rank is infinite or NaN. The optimizer step should then be skipped."""


class ChunkGroup:
    """The chunks on one pool, in order of creation."""

    def __init__(self, pool: MemoryPool) -> None:
        self.pool = pool
        self.chunks: list[Chunk] = []
        self._members: set[Chunk] = set()
        self._chunk_of: dict[int, Chunk] = {}

    @property
    def accessed(self) -> list[Chunk]:
        """The chunks that are unsharded or being gathered."""
        return [chunk for chunk in self.chunks if chunk.is_gathered]

    # --- filling -----------------------------------------------------------------------------------------------------

    def open(
        self,
        numel: int,
        dtype: torch.dtype,
        group: ProcessGroup | None = None,
        *,
        config: ChunkConfig | None = None,
    ) -> Chunk:
        """A chunk to append to. It joins the group when `close` is called. Raises ChunkError as `Chunk` does."""
        return Chunk(self.pool, numel, dtype, group, config=config)

    def close(self, chunk: Chunk) -> None:
        """
        Close a chunk if it is open, and add it to the group.

        Raises ChunkError for a chunk on another pool or already in the group, TensorRefused if one of its tensors is in
        another chunk of the group. Nothing has changed then.
        """
        problems = []
        if chunk.pool is not self.pool:
            problems.append(f"{chunk!r} is on another memory pool than the group")
        if chunk in self._members:
            problems.append(f"{chunk!r} is already in the group")
        if problems:
            raise ChunkError(problems, where="ChunkGroup.close")
        duplicates = [index for index, tensor in enumerate(chunk.tensors) if id(tensor) in self._chunk_of]
        if duplicates:
            raise TensorRefused(
                [f"tensor {index} is in {self._chunk_of[id(chunk.tensors[index])]!r}" for index in duplicates],
                where=f"ChunkGroup.close of {chunk!r}",
                hint="Put each tensor in one chunk, and share the tensor rather than its storage",
            )
        if chunk.state is StorageState.OPEN:
            chunk.close()
        self.chunks.append(chunk)
        self._members.add(chunk)
        self._chunk_of.update({id(tensor): chunk for tensor in chunk.tensors})

    def chunks_of(self, tensors: Sequence[Tensor]) -> list[Chunk]:
        """
        The chunks that hold `tensors`, each once, in order of creation. Raises TensorRefused naming every tensor that
        is in none.
        """
        unknown = [tensor for tensor in tensors if id(tensor) not in self._chunk_of]
        if unknown:
            raise TensorRefused(
                [f"tensor {tuple(tensor.shape)} is in no chunk" for tensor in unknown], where="ChunkGroup"
            )
        return sorted({self._chunk_of[id(tensor)] for tensor in tensors})

    # --- access and release ------------------------------------------------------------------------------------------

    def can_access(self, chunk: Chunk) -> bool:
        """True if `access` would find a block now. Raises ChunkError if the chunk is not in the group."""
        self._check_member(chunk)
        if chunk.is_gathered or chunk.is_fused or chunk.aliases_shard:
            return True
        if chunk.config.block is BlockKind.PUBLIC:
            return self.pool.counters.public_free > 0
        return self.pool.has_room(BlockSpec(chunk.numel, chunk.compute_dtype).nbytes)

    def access(self, chunk: Chunk, *, async_op: bool = False) -> Gathering | None:
        """
        Gather a chunk. Returns None, and does nothing, if it is gathered already. Raises PoolExhausted; nothing has
        changed then.
        """
        self._check_member(chunk)
        return None if chunk.is_gathered else chunk.access(async_op=async_op)

    def release(self, chunk: Chunk) -> None:
        """Give a chunk's block back. Raises ChunkStateError unless it is gathered, not fused, and no tensor in use."""
        self._check_member(chunk)
        chunk.release()

    def move(self, tensors: Iterable[Tensor], state: TensorState) -> None:
        """Move tensors to a state. Raises TensorRefused for a tensor that is in no chunk, IllegalTransition."""
        for tensor in tensors:
            self.chunks_of([tensor])[0].move(tensor, state)

    # --- statistics --------------------------------------------------------------------------------------------------

    @torch.no_grad()
    def statistics(self) -> GroupStatistics:
        """
        The squared norm and the overflow of all gradients, over all ranks.

        One all-reduce of two numbers per process group. Chunks of several groups are added up as this rank sees them.
        The host does not wait. Raises ChunkStateError if a chunk has no statistics: it was never reduced, or its
        reduction has not ended.
        """
        missing = [chunk for chunk in self.chunks if chunk.statistics is None]
        if missing:
            raise ChunkStateError(
                [f"{chunk!r} has no statistics: reduce it first" for chunk in missing],
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
        """[squared norm, number of overflows over chunks and ranks] of chunks on one process group."""
        device = self.pool.device
        statistics = [chunk.statistics for chunk in chunks if chunk.statistics is not None]
        norms = torch.stack([one.squared_norm.to(device) for one in statistics]).sum()
        overflows = torch.stack([one.overflow.to(device) for one in statistics]).sum()
        total = torch.stack([norms, overflows.to(norms.dtype)])
        if chunks[0].layout.world_size > 1:
            dist.all_reduce(total, group=chunks[0].group)
        return total

    def _check_member(self, chunk: Chunk) -> None:
        if chunk not in self._members:
            raise ChunkError(f"{chunk!r} is not in the group: close it with `ChunkGroup.close`", where="ChunkGroup")
