"""Wrong fused chunks and wrong pairs of chunks: who owns the block, and whose values count."""

from __future__ import annotations

import torch
from torch.distributed import ProcessGroup

from fsdp_conformance.adapters.components import ChunkStorage
from fsdp_conformance.adapters.vendors.reference_components import EngineChunk, engine_chunk
from fsdp_conformance.mutants.chunk_seams import SeamChunks, SeamPool
from fsdp_conformance.mutants.mutant import known_wrong


class _Sharing(SeamPool):
    def chunk(
        self, numel: int, dtype: torch.dtype, group: ProcessGroup | None = None, *, fused: bool = False
    ) -> ChunkStorage:
        return super().chunk(numel, dtype, group, fused=fused and dtype is not torch.float32)


@known_wrong("R179")
class FusedTakesAPoolBlock(SeamChunks):
    """A fused chunk is gathered into a pool block like any other."""

    pool = _Sharing


class _Releasing(EngineChunk):
    def release(self) -> None:
        if not self.chunk.is_fused:
            super().release()


@known_wrong("R179", shows=("refusal",))
class FusedIsReleased(SeamChunks):
    """A fused chunk can be released."""

    chunk_class = _Releasing


class _Alone(EngineChunk):
    def update_from_partner(self) -> None:
        return


@known_wrong("R179")
class PartnerNeverRead(SeamChunks):
    """The optimizer's updates of the partner's shard are never copied back."""

    chunk_class = _Alone


class _Pairing(EngineChunk):
    def pair(self, partner: ChunkStorage) -> None:
        self.chunk.partner = engine_chunk(partner)
        self.chunk.partner.partner = self.chunk


@known_wrong("R179", shows=("refusal",))
class PairsAnything(SeamChunks):
    """Chunks of different layouts become partners."""

    chunk_class = _Pairing
