"""
Chunks in pairs: one in the dtype of the computation, its partner the master in float32.

For optimizers that step on the partner's shard. A chunk with a compute dtype of its own needs no partner: it is cast
while it is gathered.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from fsdp_conformance.engine.chunks.checks import check_state
from fsdp_conformance.engine.chunks.state import ChunkState
from fsdp_conformance.engine.errors import ChunkError

if TYPE_CHECKING:
    from fsdp_conformance.engine.chunks.chunk import Chunk


def pair(chunk: Chunk, partner: Chunk) -> None:
    """
    Make two chunks of one layout partners. Symmetric, and done again it changes nothing.

    Raises ChunkError if one of them has another partner, or another layout.
    """
    if chunk.partner is partner and partner.partner is chunk:
        return
    problems = [
        f"{one!r} has the partner {one.partner!r}, but should have none"
        for one in (chunk, partner)
        if one.partner is not None
    ]
    mine, other = chunk.layout, partner.layout
    if chunk is partner or (mine.numel, mine.rank, mine.slots) != (other.numel, other.rank, other.slots):
        problems.append(f"partner={partner!r}, but should be another chunk with the same tensors, on the same group")
    if problems:
        raise ChunkError(problems, where=f"pair of {chunk!r}")
    chunk.partner, partner.partner = partner, chunk


@torch.no_grad()
def update_from_partner(chunk: Chunk) -> None:
    """
    Take over the partner's shard, after the optimizer has stepped on it.

    On an accelerator it is copied now, cast. On the CPU it is noted, and the next gather sends the partner's shard,
    cast on the way. Raises ChunkError without a partner, or if the shards are not on one type of device;
    ChunkStateError if the partner is not sharded.
    """
    where = f"update_from_partner of {chunk!r}"
    partner = chunk.partner
    if partner is None:
        raise ChunkError("partner=None, but should be a chunk: pair them first", where=where)
    check_state(partner, {ChunkState.SHARDED}, "update_from_partner")
    if chunk.shard_device.type != partner.shard_device.type:
        devices = f"{chunk.shard_device} and {partner.shard_device}"
        raise ChunkError(f"shards on {devices}, but should be on one type of device", where=where)
    if chunk.shard_device.type == "cpu":
        chunk.stale, chunk.from_partner = True, False
    else:
        chunk.shard.copy_(partner.shard)
