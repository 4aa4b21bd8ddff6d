"""
Whole tensors out of a chunk and into it: checkpoints, broadcast at the start, inspection.

Only the chunk's own group takes part, by its own ranks: no other group communicates or waits.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from fsdp_conformance.engine.chunks.checks import check_state
from fsdp_conformance.engine.chunks.gathering import start_all_gather
from fsdp_conformance.engine.chunks.state import ChunkState
from fsdp_conformance.engine.errors import TensorRefused
from fsdp_conformance.engine.mesh.collectives import mesh_broadcast

if TYPE_CHECKING:
    from fsdp_conformance.engine.chunks.chunk import Chunk

_CLOSED = frozenset(ChunkState) - {ChunkState.OPEN}

#: What the first rank says of a tensor before it sends the values: left as it is, or sent. Or, in place of all:
#: refused.
_SKIPPED, _SENT, _REFUSED = 0, 1, 2


@torch.no_grad()
def cpu_copy(chunk: Chunk, *, only_rank_0: bool = False) -> list[Tensor | None]:
    """
    Copies of the tensors on the CPU, in the order of appending, in the chunk's dtype.

    The chunk stays in its state. A sharded one is gathered into memory that is freed at once. With `only_rank_0` ranks
    of the group other than its first get None for each. To be called by every rank of the group.
    """
    check_state(chunk, _CLOSED, "cpu_copy")
    if chunk.state is not ChunkState.SHARDED and chunk.compute_dtype is chunk.dtype:
        chunk.access()
        flat = chunk.payload
    else:
        flat = torch.empty(chunk.numel, dtype=chunk.dtype, device=chunk.pool.device)
        work = start_all_gather(flat, chunk.newest_shard, chunk.layout, chunk.group)
        if work is not None:
            work.wait()
    if only_rank_0 and chunk.layout.rank != 0:
        return [None] * len(chunk.tensors)
    host = flat.to("cpu", copy=True)
    # One by one: a tensor that is kept must not keep its whole chunk.
    return [view.clone() for view in chunk.layout.views(host)]


@torch.no_grad()
def load(chunk: Chunk, tensors: Sequence[Tensor | None], *, only_rank_0: bool = False) -> None:
    """
    Put values into the chunk, cast to its dtype, on the shard and, where it is unsharded, there too. None: left as it
    is.

    With `only_rank_0` the values are those of the group's first rank, and what the others pass is not looked at. To be
    called by every rank of the group. Raises TensorRefused, on every rank that reads the values or waits for them, if
    number or shapes differ; the chunk is then as before.
    """
    check_state(chunk, _CLOSED, "load")
    where = f"load of {chunk!r}"
    if only_rank_0 and chunk.layout.world_size > 1:
        received = _receive(chunk, tensors, where)
    else:
        problems = _problems(chunk, tensors)
        if problems:
            raise TensorRefused(problems, where=where)
        received = list(tensors)
    if chunk.state is not ChunkState.SHARDED:
        chunk.access()
        for view, tensor in zip(chunk.views, received, strict=True):
            if tensor is not None:
                view.copy_(tensor)
    if chunk.stale:
        chunk.wait_shard_reads()
        chunk.shard.copy_(chunk.newest_shard)
        chunk.stale = False
    _write_shard(chunk, received)


def _write_shard(chunk: Chunk, tensors: Sequence[Tensor | None]) -> None:
    """Copy this rank's parts of the tensors to its shard."""
    chunk.wait_shard_reads()
    for index, tensor in enumerate(tensors):
        part = chunk.layout.shard_slice(index)
        if tensor is not None and part.begin < part.end:
            shard = chunk.shard.narrow(0, part.offset, part.end - part.begin)
            shard.copy_(tensor.detach().reshape(-1)[part.begin : part.end])


def _problems(chunk: Chunk, tensors: Sequence[Tensor | None]) -> list[str]:
    slots = chunk.layout.slots
    if len(tensors) != len(slots):
        return [f"{len(tensors)} tensors, but should be {len(slots)}"]
    return [
        f"tensor {index} is {tuple(tensor.shape)}, but should be {tuple(slot.shape)}"
        for index, (tensor, slot) in enumerate(zip(tensors, slots, strict=True))
        if tensor is not None and tensor.shape != slot.shape
    ]


def _receive(chunk: Chunk, tensors: Sequence[Tensor | None], where: str) -> list[Tensor | None]:
    """The first rank's tensors, on every rank of the group. Raises TensorRefused on all if the first rank must."""
    slots, device = chunk.layout.slots, chunk.pool.device
    is_source = chunk.layout.rank == 0
    problems = _problems(chunk, tensors) if is_source else []
    # A header first: ranks that wait for values would wait for ever if the first one had raised.
    header = torch.zeros(len(slots) + 1, dtype=torch.int32)
    if is_source and not problems:
        header[1:] = torch.tensor([_SKIPPED if tensor is None else _SENT for tensor in tensors])
    elif is_source:
        header[0] = _REFUSED
    header = header.to(device)
    verdict, *marks = mesh_broadcast(header, chunk.group).wait().tolist()
    if verdict == _REFUSED:
        refused = problems or ["the first rank refused its tensors, but should have got those of the chunk"]
        raise TensorRefused(refused, where=where)
    flat = torch.zeros(chunk.numel, dtype=chunk.dtype, device=device)
    views = chunk.layout.views(flat)
    if is_source:
        for view, tensor in zip(views, tensors, strict=True):
            if tensor is not None:
                view.copy_(tensor)
    mesh_broadcast(flat, chunk.group).wait()
    return [view if mark == _SENT else None for view, mark in zip(views, marks, strict=True)]
