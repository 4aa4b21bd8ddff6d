"""The engine's chunks and memory pool with seams to override; correct by themselves."""

from __future__ import annotations

from typing import ClassVar

import torch
from torch.distributed import ProcessGroup

from fsdp_conformance.adapters.components import ChunkPool, ChunkStorage
from fsdp_conformance.adapters.vendors.reference_components import (
    EngineChunk,
    EnginePool,
    ReferenceComponents,
    engine_chunk,
)


class SeamPool(EnginePool):
    """The engine's pool, with a replaceable chunk class."""

    chunk_class: type[EngineChunk] = EngineChunk

    def __init__(self, num_blocks: int, numel: int, dtype: torch.dtype, device: torch.device) -> None:
        super().__init__(num_blocks, numel, dtype, device)
        self.chunks: list[EngineChunk] = []

    def chunk(
        self, numel: int, dtype: torch.dtype, group: ProcessGroup | None = None, *, fused: bool = False
    ) -> ChunkStorage:
        self.chunks.append(self.chunk_class(engine_chunk(super().chunk(numel, dtype, group, fused=fused)), self.group))
        return self.chunks[-1]


class SeamChunks(ReferenceComponents):
    """An adapter for the engine's chunks and pool or subclasses of them."""

    pool: ClassVar[type[SeamPool]] = SeamPool
    chunk_class: ClassVar[type[EngineChunk]] = EngineChunk

    def chunk_pool(self, num_blocks: int, numel: int, dtype: torch.dtype, device: torch.device) -> ChunkPool:
        pool = self.pool(num_blocks, numel, dtype, device)
        pool.chunk_class = self.chunk_class
        return pool
