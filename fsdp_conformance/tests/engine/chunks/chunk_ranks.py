"""
Four ranks with chunks: position-coded tensors, rank-coded gradients, and what becomes of them, worked out by hand.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import ProcessGroup

from fsdp_conformance.engine.chunks.chunk import Chunk, ChunkConfig
from fsdp_conformance.engine.chunks.group import ChunkGroup
from fsdp_conformance.engine.chunks.memory_pool import BlockKind, MemoryPool
from fsdp_conformance.engine.chunks.tensor_state import TensorState
from fsdp_conformance.harness.recording import process_group
from fsdp_conformance.tests.harness.started_ranks import RecordedRanks

#: 15 + 7 + 1 + 8 + 0 = 31 elements: no shard of 2, 3 or 4 ranks ends where a tensor does, and the last one is padded.
SHAPES: tuple[tuple[int, ...], ...] = ((3, 5), (7,), (), (2, 2, 2), (0,))
NUMEL = 31


def padded(world_size: int) -> int:
    """The length of the smallest chunk of SHAPES."""
    return -(-NUMEL // world_size) * world_size


def coded(index: int, shape: Sequence[int]) -> Tensor:
    """Element j of tensor i is 16 i + j + 1: no two elements of a chunk are equal, and none is zero."""
    return torch.arange(torch.Size(shape).numel(), dtype=torch.float32).view(tuple(shape)) + 16 * index + 1


def parameters(shapes: Sequence[Sequence[int]] = SHAPES, dtype: torch.dtype = torch.float32) -> list[Tensor]:
    """Parameters with coded values, the same on every rank."""
    return [nn.Parameter(coded(index, shape).to(dtype)) for index, shape in enumerate(shapes)]


def flat_of(tensors: Sequence[Tensor], numel: int) -> Tensor:
    """The chunk that holds `tensors`, and zeros."""
    flat = torch.cat([tensor.detach().reshape(-1).float() for tensor in tensors])
    return torch.cat([flat, torch.zeros(numel - flat.numel())])


def gradients(rank: int, num_ranks: int, *, times: float = 1) -> list[Tensor]:
    """
    Rank r contributes 2**r times the code, and `num_ranks` times that, so that the mean over ranks is exact.

    A rank that is missing or counted twice shows in the factor of the mean, which is 2**num_ranks - 1.
    """
    return [coded(index, shape) * 2**rank * num_ranks * times for index, shape in enumerate(SHAPES)]


def mean_gradient(num_ranks: int, numel: int) -> Tensor:
    """The chunk of the means of `gradients`."""
    return torch.mul(flat_of(parameters(), numel), 2**num_ranks - 1)


def allocate(group: ChunkGroup, config: ChunkConfig | None = None, process_group: ProcessGroup | None = None) -> Chunk:
    """A chunk of 32 elements with coded parameters, closed, in `group`."""
    chunk = group.open(32, torch.float32, process_group, config=config)
    for tensor in parameters():
        chunk.append(tensor)
    group.close(chunk)
    return chunk


def to_ready(chunk: Chunk) -> None:
    """Every tensor has been used by a forward and a backward."""
    for state in (TensorState.COMPUTE, TensorState.HOLD_AFTER_BWD, TensorState.READY_FOR_REDUCE):
        chunk.move_all(state)


class ChunkTestCase(RecordedRanks):
    """Every test method runs in four ranks, with groups of one to four of them."""

    reuse_ranks = True

    @property
    def world_size(self) -> int:
        return 4

    # --- groups ------------------------------------------------------------------------------------------------------

    def pair_group(self) -> ProcessGroup:
        """The group of two that this rank is in: {0, 1} or {2, 3}."""
        groups: list[ProcessGroup] = [dist.new_group([0, 1]), dist.new_group([2, 3])]
        return groups[self.rank // 2]

    def replica_group(self) -> ProcessGroup:
        """The group across the pairs that this rank is in: {0, 2} or {1, 3}."""
        groups: list[ProcessGroup] = [dist.new_group([0, 2]), dist.new_group([1, 3])]
        return groups[self.rank % 2]

    def own_group(self) -> ProcessGroup:
        """The group of this rank alone."""
        groups: list[ProcessGroup] = [dist.new_group([rank]) for rank in range(4)]
        return groups[self.rank]

    # --- chunks ------------------------------------------------------------------------------------------------------

    def chunk_of(
        self,
        tensors: Sequence[Tensor] | None = None,
        group: ProcessGroup | None = None,
        *,
        pool: MemoryPool | None = None,
        replica_group: ProcessGroup | None = None,
        **config: Any,
    ) -> Chunk:
        """A closed chunk of `tensors`, by default coded parameters, on a pool with the block that it needs."""
        tensors = parameters() if tensors is None else tensors
        options = ChunkConfig(**config)
        world_size = dist.get_world_size(group)
        spec = (padded(world_size), options.compute_dtype or tensors[0].dtype)
        if pool is None:
            pool = MemoryPool("cpu")
            if options.block is BlockKind.PUBLIC:
                pool.allocate_public(2, *spec)
            elif options.block is BlockKind.PRIVATE:
                pool.allocate_private([spec])
        return Chunk.of(pool, tensors, group, replica_group=replica_group, config=options)

    def put(self, chunk: Chunk, *, times: float = 1) -> None:
        """Gradients of this rank, for every tensor, and every state."""
        num_ranks = chunk.layout.world_size * chunk.num_replicas
        rank = self.rank if num_ranks == 4 else chunk.layout.rank
        chunk.gradients.put_all(gradients(rank, num_ranks, times=times))
        to_ready(chunk)

    def expected_shard(self, flat: Tensor, group: ProcessGroup | None = None) -> Tensor:
        """This rank's part of a whole chunk."""
        return flat.chunk(dist.get_world_size(group))[dist.get_rank(group)]

    def assert_equal(self, expected: Tensor, got: Tensor) -> None:
        """Bitwise, dtype included."""
        self.assertEqual(expected.dtype, got.dtype)
        self.assertTrue(torch.equal(expected, got), msg=f"expected {expected}, got {got}")

    def schedule(self) -> list[str]:
        """The collectives since the last call."""
        lines = process_group.log().schedule()
        process_group.log().clear()
        return lines
