"""Wrong chunks and pools: what a shard holds, which states are legal, the statistics, and who owns which block."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from fsdp_conformance.adapters.components import ChunkStorage, PoolBlock, PoolUse, ShardStatistics
from fsdp_conformance.adapters.vendors.reference_components import EngineChunk, engine_chunk
from fsdp_conformance.engine.chunks.chunk import Chunk
from fsdp_conformance.engine.chunks.fetcher import FifoScheduler, NextUseScheduler
from fsdp_conformance.engine.chunks.memory_pool import Block
from fsdp_conformance.engine.chunks.tensor_state import TENSOR_TRANSITIONS, TensorState
from fsdp_conformance.engine.errors import ChunkFull, IllegalTransition, PoolExhausted
from fsdp_conformance.mutants.chunk_seams import SeamChunks, SeamPool
from fsdp_conformance.mutants.mutant import known_wrong

# --- filling ---------------------------------------------------------------------------------------------------------


class _Unpadded(EngineChunk):
    def close(self) -> None:
        super().close()
        self.chunk.shard[self.valid_numel :] = torch.nan


@known_wrong("R177")
class PaddingNotZeroed(SeamChunks):
    """The padding behind a chunk's tensors is uninitialized memory."""

    chunk_class = _Unpadded


class _AlwaysFull(EngineChunk):
    @property
    def valid_numel(self) -> int:
        return self.chunk.layout.shard_numel


@known_wrong("R177")
class EveryShardFull(SeamChunks):
    """Padding counts as valid."""

    chunk_class = _AlwaysFull


class _Casting(EngineChunk):
    def append(self, tensor: Tensor) -> object:
        return super().append(tensor.to(self.chunk.dtype))


@known_wrong("R177", shows=("refusal",))
class AppendsOtherDtypes(SeamChunks):
    """A tensor of another dtype is cast when it is appended."""

    chunk_class = _Casting


class _Cutting(EngineChunk):
    def append(self, tensor: Tensor) -> object:
        room = self.chunk.numel - self.chunk.layout.next_offset()
        return super().append(tensor if tensor.numel() <= room else tensor.reshape(-1)[:room].clone())


@known_wrong("R177")
class AppendsWhatFits(SeamChunks):
    """A tensor that does not fit is truncated to the remaining room."""

    chunk_class = _Cutting


class _Wasting(EngineChunk):
    def append(self, tensor: Tensor) -> object:
        try:
            return super().append(tensor)
        except ChunkFull:
            self.chunk.append(torch.zeros(1, device=tensor.device))
            raise


@known_wrong("R177", shows=("raised",), raises="ChunkFull")
class RefusedTensorTakesRoom(SeamChunks):
    """A rejected tensor still takes up room in the chunk."""

    chunk_class = _Wasting


class _RoundingPool(SeamPool):
    def chunk(
        self, numel: int, dtype: torch.dtype, group: ProcessGroup | None = None, *, fused: bool = False
    ) -> ChunkStorage:
        return EngineChunk(Chunk(self.pool, numel // 2 * 2, dtype, group), self.group)


@known_wrong("R177", shows=("refusal",))
class RoundsSizesDown(SeamChunks):
    """A size that is not divisible by the group size is rounded down."""

    pool = _RoundingPool


# --- states ----------------------------------------------------------------------------------------------------------


class _UsedOnce(EngineChunk):
    def move(self, index: int, state: str) -> None:
        if self.state(index) == "hold_after_bwd" and state == "compute":
            raise IllegalTransition("hold_after_bwd to compute", where="move")
        super().move(index, state)


@known_wrong("R178")
class UsedOnceOnly(SeamChunks):
    """A tensor that a backward has used cannot be used again."""

    chunk_class = _UsedOnce


class _AnyMove(EngineChunk):
    def move(self, index: int, state: str) -> None:
        while self.state(index) != state:
            super().move(index, self._towards(index, state))

    def _towards(self, index: int, state: str) -> str:
        following = TENSOR_TRANSITIONS[TensorState(self.state(index))]
        if TensorState(state) in following:
            return state
        way = {"free": "hold", "hold": "compute", "compute": "hold_after_bwd", "ready_for_reduce": "hold"}
        return way.get(self.state(index), "ready_for_reduce")


@known_wrong("R178")
class AnyTransition(SeamChunks):
    """Every state transition is accepted."""

    chunk_class = _AnyMove


class _NoSameState(EngineChunk):
    def move(self, index: int, state: str) -> None:
        if self.state(index) == state:
            raise IllegalTransition(f"{state} to {state}", where="move")
        super().move(index, state)


@known_wrong("R178")
class SameStateRefused(SeamChunks):
    """A transition to the current state is rejected."""

    chunk_class = _NoSameState


class _MovingAllTheSame(_AnyMove):
    def move(self, index: int, state: str) -> None:
        legal = TENSOR_TRANSITIONS[TensorState(self.state(index))] | {TensorState(self.state(index))}
        super().move(index, state)
        if TensorState(state) not in legal:
            raise IllegalTransition(f"to {state}", where="move")


@known_wrong("R178")
class RefusedMovesAllTheSame(SeamChunks):
    """A rejected transition takes place anyway."""

    chunk_class = _MovingAllTheSame


class _ReleasingInUse(EngineChunk):
    def release(self) -> None:
        self.chunk.states.reset()
        super().release()


@known_wrong("R178", shows=("refusal",))
class ReleasesInUse(SeamChunks):
    """A chunk is released while one of its tensors is in use."""

    chunk_class = _ReleasingInUse


class _ReducingEarly(EngineChunk):
    def reduce(self) -> Tensor:
        self.chunk.states.reset(TensorState.READY_FOR_REDUCE)
        return super().reduce()


@known_wrong("R178", shows=("refusal",))
class ReducesTooEarly(SeamChunks):
    """A chunk is reduced before all of its tensors are ready."""

    chunk_class = _ReducingEarly


# --- round trips -----------------------------------------------------------------------------------------------------


class _Keeping(EngineChunk):
    def release(self) -> None:
        super().release()
        self.chunk.pool.lease_public()


@known_wrong("R179")
class BlockNotReturned(SeamChunks):
    """A released chunk keeps its block."""

    chunk_class = _Keeping


class _Emptied(EngineChunk):
    def release(self) -> None:
        super().release()
        self.chunk.shard.zero_()


@known_wrong("R179")
class ReleasedForGood(SeamChunks):
    """The values of a chunk are lost when it is released."""

    chunk_class = _Emptied


class _GatheringAgain(EngineChunk):
    def access(self) -> object:
        if self.is_unsharded:
            self.chunk.release()
        return super().access()


@known_wrong("R179")
class GathersAgain(SeamChunks):
    """A second access gathers the chunk again."""

    chunk_class = _GatheringAgain


class _Summing(EngineChunk):
    def reduce(self) -> Tensor:
        return super().reduce() * (self.chunk.layout.world_size + 1)


@known_wrong("R179")
class ReducesToTheSum(SeamChunks):
    """Reduced gradients are a multiple of the mean."""

    chunk_class = _Summing


class _KeepingAfterReduce(EngineChunk):
    def reduce(self) -> Tensor:
        result = super().reduce()
        self.chunk.pool.lease_public()
        return result


@known_wrong("R179")
class BlockKeptAfterReduce(SeamChunks):
    """A reduced chunk keeps its block."""

    chunk_class = _KeepingAfterReduce


class _NextShard(EngineChunk):
    def reduce(self) -> Tensor:
        return super().reduce().roll(1)


@known_wrong("R179")
class NextShardOfGradients(SeamChunks):
    """Reduced gradients are shifted relative to the shard."""

    chunk_class = _NextShard


class _Growing(EngineChunk):
    def access(self) -> object:
        try:
            return super().access()
        except PoolExhausted:
            pool, spec = self.chunk.pool, self.chunk.pool.public_spec
            pool.public_spec = None
            pool.allocate_public(1, *(spec or (0, torch.float32)))
            return super().access()


@known_wrong("R179")
class PoolGrows(SeamChunks):
    """When no block is free, the pool allocates another one."""

    chunk_class = _Growing


# --- statistics ------------------------------------------------------------------------------------------------------


class _CountingPadding(EngineChunk):
    def statistics(self) -> ShardStatistics:
        totals = super().statistics()
        return totals._replace(squared_norm=totals.squared_norm + self.chunk.layout.shard_numel - self.valid_numel)


@known_wrong("R180")
class NormCountsPadding(SeamChunks):
    """The norm includes padding that was never zeroed."""

    chunk_class = _CountingPadding


class _AddingUp(EngineChunk):
    so_far = 0.0

    def reduce(self) -> Tensor:
        result = super().reduce()
        self.so_far += super().statistics().squared_norm
        return result

    def statistics(self) -> ShardStatistics:
        return super().statistics()._replace(squared_norm=self.so_far)


@known_wrong("R180")
class NormsAddUp(SeamChunks):
    """The norm of a reduction is added to the previous ones."""

    chunk_class = _AddingUp


class _Local(EngineChunk):
    norm = 0.0

    def put_gradients(self, gradients: Sequence[Tensor]) -> None:
        super().put_gradients(gradients)
        self.norm = float(sum(gradient.square().sum() for gradient in gradients))

    def statistics(self) -> ShardStatistics:
        return super().statistics()._replace(squared_norm=self.norm)


@known_wrong("R180")
class NormBeforeTheMean(SeamChunks):
    """The norm is taken of the rank's own gradients, before they are reduced."""

    chunk_class = _Local


class _OneRank(SeamPool):
    def statistics(self) -> ShardStatistics:
        totals = [chunk.statistics() for chunk in self.chunks]
        return ShardStatistics(sum(one.squared_norm for one in totals), any(one.overflow for one in totals))


@known_wrong("R180")
class TotalOfOneRank(SeamChunks):
    """The total norm covers only the rank's own shards."""

    pool = _OneRank


class _OneChunk(SeamPool):
    def statistics(self) -> ShardStatistics:
        self.group.chunks = self.group.chunks[-1:]
        return super().statistics()


@known_wrong("R180")
class TotalOfOneChunk(SeamChunks):
    """The total norm covers only the last chunk."""

    pool = _OneChunk


class _Sticking(EngineChunk):
    seen = False

    def statistics(self) -> ShardStatistics:
        totals = super().statistics()
        self.seen |= totals.overflow
        return totals._replace(overflow=self.seen)


@known_wrong("R180")
class OverflowSticks(SeamChunks):
    """An overflow is never cleared."""

    chunk_class = _Sticking


@known_wrong("R180")
class OverflowOfOneRank(SeamChunks):
    """Only the rank that owns an infinite element reports the overflow."""

    pool = _OneRank


class _NanBlind(EngineChunk):
    def statistics(self) -> ShardStatistics:
        totals = super().statistics()
        return totals._replace(overflow=totals.squared_norm == torch.inf)


@known_wrong("R180")
class OverflowUnseen(SeamChunks):
    """NaN does not count as an overflow."""

    chunk_class = _NanBlind


# --- the pool --------------------------------------------------------------------------------------------------------


class _Miscounting(SeamPool):
    failed = 0

    def lease(self) -> PoolBlock:
        try:
            return super().lease()
        except PoolExhausted:
            self.failed += 1
            raise

    def use(self) -> PoolUse:
        free, used = super().use()
        return PoolUse(free - self.failed, used + self.failed)


@known_wrong("R181")
class MiscountsWhenEmpty(SeamChunks):
    """A rejected request is counted."""

    pool = _Miscounting


class _TakingAll(SeamPool):
    def give_back(self, block: PoolBlock) -> None:
        if isinstance(block, Block) and self.pool.is_leased(block):
            super().give_back(block)


@known_wrong("R181", shows=("refusal",))
class DoubleReturnAccepted(SeamChunks):
    """A block that is not leased can be returned."""

    pool = _TakingAll


class _Untyped(SeamPool):
    def lease(self) -> PoolBlock:
        block = self.pool.lease_public()
        block.payload = block.payload.view(torch.uint8)
        return block


@known_wrong("R181")
class UntypedBlocks(SeamChunks):
    """Blocks are bytes, whatever dtype was requested."""

    pool = _Untyped


class _NewestFirst(FifoScheduler):
    def choose(self, leaving: Sequence[Chunk]) -> Chunk:
        return leaving[-1]


class _EvictingNewest(SeamPool):
    def schedule(self, uses: Sequence[ChunkStorage] | None) -> None:
        super().schedule(uses)
        self.fetcher.scheduler = _NewestFirst()


@known_wrong("R181")
class EvictsTheNewest(SeamChunks):
    """The most recently fetched chunk is evicted first."""

    pool = _EvictingNewest


class _NearestFirst(NextUseScheduler):
    def choose(self, leaving: Sequence[Chunk]) -> Chunk:
        return min(leaving, key=self.next_use)


class _EvictingNearest(SeamPool):
    def schedule(self, uses: Sequence[ChunkStorage] | None) -> None:
        super().schedule(uses)
        if uses is not None:
            self.fetcher.scheduler = _NearestFirst([engine_chunk(chunk)] for chunk in uses)


@known_wrong("R181")
class EvictsTheNearestUse(SeamChunks):
    """The chunk that is needed soonest is evicted first."""

    pool = _EvictingNearest


class _Unplanned(SeamPool):
    def schedule(self, uses: Sequence[ChunkStorage] | None) -> None:
        super().schedule(None)


@known_wrong("R181")
class IgnoresNextUse(SeamChunks):
    """Chunks are evicted first in, first out, even when their next use is known."""

    pool = _Unplanned
