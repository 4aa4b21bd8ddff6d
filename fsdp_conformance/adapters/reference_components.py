"""
The components of the reference engine, each by itself: reducer, reduce-scatter bucketer, chunks in a memory pool.

Training is that of the data-parallel mode, which uses the first of them.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, ClassVar

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from fsdp_conformance.adapters.components import Bucketer, ChunkPool, ChunkStorage, PoolBlock, PoolUse, ShardStatistics
from fsdp_conformance.adapters.reference_data_parallel import ReferenceDataParallel
from fsdp_conformance.engine.bucket_assignment import MIB
from fsdp_conformance.engine.chunk import Chunk
from fsdp_conformance.engine.chunk_config import ChunkConfig
from fsdp_conformance.engine.chunk_fetcher import ChunkFetcher, ChunkScheduler, FifoScheduler, NextUseScheduler
from fsdp_conformance.engine.chunk_group import ChunkGroup
from fsdp_conformance.engine.chunk_state import ChunkState, TensorState
from fsdp_conformance.engine.errors import ChunkStateError, PoolError
from fsdp_conformance.engine.memory_pool import Block, BlockKind, MemoryPool
from fsdp_conformance.engine.reduce_scatter_bucketer import ReduceScatterBucketer


class ReferenceComponents(ReferenceDataParallel):
    """Hands out the engine's components."""

    name: ClassVar[str] = "reference-components"

    def reduce_scatter_bucketer(self, cap_bytes: float) -> Bucketer:
        return ReduceScatterBucketer(cap_bytes / MIB)

    def chunk_pool(self, num_blocks: int, numel: int, dtype: torch.dtype, device: torch.device) -> ChunkPool:
        return EnginePool(num_blocks, numel, dtype, device)


class EngineChunk:
    """A chunk of the engine, by the protocol."""

    def __init__(self, chunk: Chunk, group: ChunkGroup) -> None:
        self.chunk = chunk
        self.group = group

    def append(self, tensor: Tensor) -> object:
        return self.chunk.append(tensor)

    def close(self) -> None:
        self.group.close(self.chunk)

    @property
    def shard(self) -> Tensor:
        return self.chunk.shard

    @property
    def valid_numel(self) -> int:
        return self.chunk.layout.valid_numel

    @property
    def is_unsharded(self) -> bool:
        return self.chunk.state is ChunkState.UNSHARDED

    @property
    def values(self) -> list[Tensor]:
        return self.chunk.views

    def access(self) -> object:
        return self.chunk.access()

    def release(self) -> None:
        self.chunk.release()

    def state(self, index: int) -> str:
        return self.chunk.states[index].value

    def move(self, index: int, state: str) -> None:
        self.chunk.move(index, TensorState(state))

    def put_gradients(self, gradients: Sequence[Tensor]) -> None:
        self.chunk.gradients.put_all(list(gradients))

    def reduce(self) -> Tensor:
        return self.chunk.reduce().wait()

    def pair(self, partner: Any) -> None:
        self.chunk.pair(engine_chunk(partner))

    def update_from_partner(self) -> None:
        self.chunk.update_from_partner()

    def statistics(self) -> ShardStatistics:
        found = self.chunk.statistics
        if found is None:
            raise ChunkStateError("statistics=None, but should be those of a reduction", where=repr(self.chunk))
        return ShardStatistics(float(found.squared_norm), bool(found.overflow))


class EnginePool:
    """A memory pool of the engine with public blocks, and its chunks, by the protocol."""

    def __init__(self, num_blocks: int, numel: int, dtype: torch.dtype, device: torch.device) -> None:
        self.pool = MemoryPool(device)
        self.pool.allocate_public(num_blocks, numel, dtype)
        self.group = ChunkGroup(self.pool)
        self.schedule(None)

    def chunk(
        self, numel: int, dtype: torch.dtype, group: ProcessGroup | None = None, *, fused: bool = False
    ) -> ChunkStorage:
        if fused:
            self.pool.allocate_private([(numel, dtype)])
        block = BlockKind.PRIVATE if fused else BlockKind.PUBLIC
        return EngineChunk(self.group.open(numel, dtype, group, config=ChunkConfig(block=block)), self.group)

    def use(self) -> PoolUse:
        counters = self.pool.counters
        return PoolUse(counters.public_free, counters.public_leased)

    def lease(self) -> PoolBlock:
        return self.pool.lease_public()

    def give_back(self, block: PoolBlock) -> None:
        if not isinstance(block, Block):
            raise PoolError(f"block={block!r}, but should be one of the pool's", where="EnginePool.give_back")
        self.pool.release(block)

    def schedule(self, uses: Sequence[ChunkStorage] | None) -> None:
        scheduler: ChunkScheduler = FifoScheduler()
        if uses is not None:
            scheduler = NextUseScheduler([engine_chunk(chunk)] for chunk in uses)
        self.fetcher = ChunkFetcher(self.group, scheduler)

    def compute(self, chunk: ChunkStorage) -> None:
        tensors = engine_chunk(chunk).tensors
        self.fetcher.fetch(self.fetcher.start_compute(tensors))
        self.fetcher.end_compute(tensors)

    def statistics(self) -> ShardStatistics:
        found = self.group.statistics()
        return ShardStatistics(float(found.squared_norm), bool(found.overflow))


def engine_chunk(chunk: ChunkStorage) -> Chunk:
    """The engine's chunk inside. Raises PoolError for another engine's."""
    if not isinstance(chunk, EngineChunk):
        raise PoolError(f"chunk={chunk!r}, but should be one of the pool's", where="EnginePool")
    return chunk.chunk
