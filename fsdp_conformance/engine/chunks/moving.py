"""Storage of a chunk for an owner that binds tensors itself: views that last, and other memory when tensors move."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from fsdp_conformance.engine.chunks.chunk import Chunk
from fsdp_conformance.engine.chunks.config import ChunkConfig
from fsdp_conformance.engine.chunks.memory_pool import MemoryPool
from fsdp_conformance.engine.chunks.state import ChunkState
from fsdp_conformance.engine.errors import ChunkStateError


def moved_chunk(chunk: Chunk, pool: MemoryPool, dtype: torch.dtype, *, config: ChunkConfig) -> Chunk:
    """
    A chunk with the layout of `chunk`, on `pool` and in `dtype`; its shard is zero and is to be written.

    Raises ChunkStateError if `chunk` is open.
    """
    twin = _unfilled(chunk, pool, dtype, config)
    twin._shard = torch.zeros(
        twin.layout.shard_numel, dtype=dtype, device=twin.shard_device, pin_memory=twin.pins_memory
    )
    return twin


def sharing_chunk(chunk: Chunk, *, config: ChunkConfig) -> Chunk:
    """
    A chunk with the very shard of `chunk`, which is gathered and reduced by another `config`.

    Not both may be unsharded, or have gradients, at once: nothing orders one after the other. Raises ChunkStateError
    if `chunk` is open.
    """
    twin = _unfilled(chunk, chunk.pool, chunk.dtype, config)
    twin._shard = chunk.shard
    return twin


def _unfilled(chunk: Chunk, pool: MemoryPool, dtype: torch.dtype, config: ChunkConfig) -> Chunk:
    """A sharded chunk with the layout of `chunk`, and no shard yet."""
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


def gather_parts(chunk: Chunk, part: Tensor, group: ProcessGroup, *, after: Any) -> None:
    """
    Begin to gather a sharded chunk from the parts that the ranks of a smaller group have of it.

    part: 1D, numel // group size, in the dtype and on the device of the unsharded chunk; not needed by the caller
    afterwards. The gather starts after the event `after`.
    """
    chunk._payload.start(part, chunk._arrive, after=after, group=group)
    chunk._go(ChunkState.GATHERING)
    streams = chunk.pool.streams
    with streams.on(streams.gather):
        streams.keep(part)
