"""Storage of a chunk for an owner that binds tensors itself: views that last, and other memory when tensors move."""

from __future__ import annotations

import torch
from torch import Tensor

from fsdp_conformance.engine.chunk import Chunk
from fsdp_conformance.engine.chunk_config import ChunkConfig
from fsdp_conformance.engine.chunk_state import ChunkState
from fsdp_conformance.engine.errors import ChunkStateError
from fsdp_conformance.engine.memory_pool import MemoryPool


def moved_chunk(chunk: Chunk, pool: MemoryPool, dtype: torch.dtype, *, config: ChunkConfig) -> Chunk:
    """
    A chunk with the layout of `chunk`, on `pool` and in `dtype`; its shard is zero and is to be written.

    Raises ChunkStateError if `chunk` is open.
    """
    if chunk.state is ChunkState.OPEN:
        raise ChunkStateError("the chunk is OPEN, but should be closed", where=f"moving {chunk!r}")
    twin = Chunk(
        pool, chunk.numel, dtype, chunk.group, replica_group=chunk.replica_group, config=config, name=chunk.name
    )
    for slot in chunk.layout.slots:
        twin.layout.append(slot.shape)
        twin.states.add()
        twin.tensors.append(torch.empty(0))
    # From open to sharded, as close() goes, but without the whole chunk in between.
    twin._shard = _zero_shard(twin)
    twin._go(ChunkState.SHARDED)
    return twin


def forget_tensors(chunk: Chunk) -> None:
    """Let go of the tensors that were copied in: the caller knows them by their index alone, and has bound them."""
    nothing = torch.empty(0)
    chunk.tensors = [nothing] * len(chunk.tensors)
    chunk._indices.clear()


def lasting_views(chunk: Chunk) -> list[Tensor]:
    """`chunk.views`, in whatever state it is, of one that is not PUBLIC: to be read while it is unsharded."""
    return chunk._payload.unleased_views(chunk.shard)


def _zero_shard(chunk: Chunk) -> Tensor:
    return torch.zeros(
        chunk.layout.shard_numel, dtype=chunk.dtype, device=chunk.shard_device, pin_memory=chunk.pins_memory
    )
