"""
The components of the reference engine, one by one: reducer, reduce-scatter bucketer, chunks in a memory pool,
collectives along a mesh, costs.

Training runs in the data-parallel mode, which uses the reducer.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, ClassVar

import torch
from torch import Tensor
from torch.distributed import ProcessGroup
from torch.distributed.device_mesh import DeviceMesh

from fsdp_conformance.adapters.components import (
    Bucketer,
    ChunkPool,
    ChunkStorage,
    MeshCollectives,
    PoolBlock,
    PoolUse,
    ShardStatistics,
    TensorLayout,
)
from fsdp_conformance.adapters.vendors.reference_data_parallel import ReferenceDataParallel
from fsdp_conformance.engine.bucketing.bucket_assignment import MIB
from fsdp_conformance.engine.bucketing.reduce_scatter_bucketer import ReduceScatterBucketer
from fsdp_conformance.engine.chunks.chunk import Chunk, ChunkConfig
from fsdp_conformance.engine.chunks.fetcher import ChunkFetcher, ChunkScheduler, FifoScheduler, NextUseScheduler
from fsdp_conformance.engine.chunks.group import ChunkGroup
from fsdp_conformance.engine.chunks.memory_pool import Block, BlockKind, MemoryPool
from fsdp_conformance.engine.chunks.storage import StorageState
from fsdp_conformance.engine.chunks.tensor_state import TensorState
from fsdp_conformance.engine.errors import ChunkStateError, PoolError
from fsdp_conformance.engine.mesh.collectives import (
    mesh_all_gather,
    mesh_broadcast,
    mesh_reduce_scatter,
    mesh_scatter,
    shard_dim_all_to_all,
)
from fsdp_conformance.engine.mesh.tensor_meta import check_tensor_meta
from fsdp_conformance.engine.mesh.uneven_shards import chunk_sizes, pad_tensor, split_shards, unpad_tensor
from fsdp_conformance.harness.simulated_ranks.ranks import run_ranks
from fsdp_conformance.planner.link_spec import LINKS, LinkSpec
from fsdp_conformance.planner.redistribution_cost import Layout, redistribution_cost_us


class ReferenceComponents(ReferenceDataParallel):
    """Exposes the engine's components."""

    name: ClassVar[str] = "reference-components"
    capabilities: ClassVar[frozenset[str]] = frozenset({"mesh_padding"})
    link: ClassVar[LinkSpec] = LINKS["nvlink"]
    """Of every mesh axis, for costs."""
    ranks_timeout_s: ClassVar[float] = 30.0
    """For simulated ranks, which detect deadlocks themselves."""

    def reduce_scatter_bucketer(self, cap_bytes: float) -> Bucketer:
        return ReduceScatterBucketer(cap_bytes / MIB)

    def chunk_pool(self, num_blocks: int, numel: int, dtype: torch.dtype, device: torch.device) -> ChunkPool:
        return EnginePool(num_blocks, numel, dtype, device)

    def mesh_collectives(self) -> MeshCollectives:
        return EngineMesh()

    def redistribution_cost(
        self, shape: Sequence[int], dtype: torch.dtype, source: TensorLayout, target: TensorLayout
    ) -> float:
        links = [self.link] * source.mesh.ndim
        return redistribution_cost_us(shape, dtype, Layout(*source), Layout(*target), links)

    def run_ranks(self, world_size: int, function: Callable[[int], Any]) -> list[Any]:
        return run_ranks(world_size, function, timeout_s=self.ranks_timeout_s)


class EngineChunk:
    """A chunk of the engine, behind the protocol."""

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
        return self.chunk.state is StorageState.UNSHARDED

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
        statistics = self.chunk.statistics
        if statistics is None:
            raise ChunkStateError("the chunk has no statistics: reduce it first", where=repr(self.chunk))
        return ShardStatistics(float(statistics.squared_norm), bool(statistics.overflow))


class EnginePool:
    """A memory pool of the engine with public blocks, and its chunks, behind the protocol."""

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
            raise PoolError(f"block must be one of this pool's, got {block!r}", where="EnginePool.give_back")
        self.pool.release(block)

    def schedule(self, uses: Sequence[ChunkStorage] | None) -> None:
        scheduler: ChunkScheduler = FifoScheduler()
        if uses is not None:
            scheduler = NextUseScheduler([engine_chunk(chunk)] for chunk in uses)
        self.fetcher = ChunkFetcher(self.group, scheduler)
        self.fetcher.reset()

    def compute(self, chunk: ChunkStorage) -> None:
        tensors = engine_chunk(chunk).tensors
        self.fetcher.fetch(self.fetcher.start_compute(tensors))
        self.fetcher.end_compute(tensors)

    def statistics(self) -> ShardStatistics:
        statistics = self.group.statistics()
        return ShardStatistics(float(statistics.squared_norm), bool(statistics.overflow))


def engine_chunk(chunk: ChunkStorage) -> Chunk:
    """The engine's chunk behind the protocol. Raises PoolError for another engine's."""
    if not isinstance(chunk, EngineChunk):
        raise PoolError(f"chunk must be one of this pool's, got {chunk!r}", where="EnginePool")
    return chunk.chunk


class EngineMesh:
    """The engine's collectives along a mesh, behind the protocol."""

    def shards(self, tensor: Tensor, num_shards: int, dim: int) -> Sequence[Tensor]:
        return split_shards(tensor, num_shards, dim)

    def pad(self, tensor: Tensor, dim: int, amount: int) -> Tensor:
        return pad_tensor(tensor, dim, amount)

    def unpad(self, tensor: Tensor, dim: int, amount: int) -> Tensor:
        return unpad_tensor(tensor, dim, amount)

    def broadcast(self, tensor: Tensor, mesh: DeviceMesh, axis: int, source: int = 0) -> object:
        return mesh_broadcast(tensor, (mesh, axis), source=source).wait()

    def scatter(
        self,
        output: Tensor,
        shards: Sequence[Tensor] | None,
        mesh: DeviceMesh,
        axis: int,
        source: int = 0,
        *,
        dim: int = 0,
        length: int | None = None,
    ) -> object:
        sizes = None if length is None else chunk_sizes(length, mesh.size(axis))
        return mesh_scatter(output, shards, (mesh, axis), source=source, dim=dim, sizes=sizes).wait()

    def all_gather(self, shard: Tensor, mesh: DeviceMesh, axis: int, dim: int, length: int) -> Tensor:
        return mesh_all_gather(shard, (mesh, axis), dim, sizes=chunk_sizes(length, mesh.size(axis))).wait()

    def reduce_scatter(self, tensor: Tensor, mesh: DeviceMesh, axis: int, dim: int) -> Tensor:
        return mesh_reduce_scatter(tensor, (mesh, axis), dim).wait()

    def shard_dim_all_to_all(
        self, shard: Tensor, mesh: DeviceMesh, axis: int, gather_dim: int, shard_dim: int, length: int
    ) -> Tensor:
        sizes = chunk_sizes(length, mesh.size(axis))
        work = shard_dim_all_to_all(shard, (mesh, axis), gather_dim=gather_dim, shard_dim=shard_dim, sizes=sizes)
        return work.wait()

    def check_meta(
        self, tensor: Tensor, mesh: DeviceMesh, axis: int, *, shape: bool = False, stride: bool = False
    ) -> None:
        check_tensor_meta(tensor, (mesh, axis), shape=shape, stride=stride)
