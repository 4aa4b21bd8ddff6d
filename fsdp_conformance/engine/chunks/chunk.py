"""
A chunk: sharded storage whose tensors have states, filled tensor by tensor, in blocks that chunks share or own.

    chunk = Chunk(pool, numel, dtype, group)
    index = chunk.append(tensor)                       # copied in; tensor.data is a view of the chunk
    chunk.close()                                      # each rank keeps one shard
    chunk.access()                                     # tensor.data is a view of the unsharded chunk
    chunk.move(index, TensorState.COMPUTE)             # in use: the chunk cannot be released
    ...
    chunk.move(index, TensorState.READY_FOR_REDUCE)
    gradient = chunk.reduce().wait()                   # once the gradients of all tensors are ready

Chunks can be paired: one in the dtype of the computation, its partner holding the master copy in float32, for
optimizers that step on the partner's shard. A chunk with its own compute dtype needs no partner: it is cast while
it is gathered.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Container, Sequence
from dataclasses import dataclass
from typing import ClassVar, NamedTuple

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from fsdp_conformance.engine.chunks.gradients import GradientBuffer, Reduction, StorageGradients
from fsdp_conformance.engine.chunks.memory_pool import Block, BlockKind, BlockSpec, MemoryPool
from fsdp_conformance.engine.chunks.storage import (
    CLOSED,
    GATHERED,
    Gathering,
    ShardedStorage,
    StorageConfig,
    StorageState,
    bytes_by_device,
)
from fsdp_conformance.engine.chunks.tensor_state import RELEASABLE, TensorState, TensorStates
from fsdp_conformance.engine.errors import ChunkError, ChunkFull, ChunkStateError, TensorRefused

_ids = itertools.count()


@dataclass(frozen=True, kw_only=True, slots=True)
class ChunkConfig(StorageConfig):
    """The configuration of a chunk."""

    block: BlockKind = BlockKind.RESIZED
    """Where the chunk is unsharded. RESIZED: its own block, which has memory only while leased. PUBLIC: a block
    shared with other chunks in turn. PRIVATE: a fused chunk (ZeRO-2), which owns its block permanently."""

    def problems(self) -> list[str]:
        problems = super(ChunkConfig, self).problems()
        if self.block is BlockKind.CACHED:
            problems.append("block must be RESIZED, PUBLIC or PRIVATE, got CACHED")
        return problems


class ShardStatistics(NamedTuple):
    """0-dimensional tensors on the device of the gradient. Reading them on the host is up to the caller."""

    squared_norm: Tensor
    """Sum of squares of this rank's valid elements, in float32 (float64 for float64)."""
    overflow: Tensor
    """bool: whether one of them is infinite or NaN."""


def shard_statistics(gradient: Tensor) -> ShardStatistics:
    """The statistics of the valid elements of a shard: 1D. Local to this rank; the host does not wait."""
    if gradient.numel() == 0:
        zero = torch.zeros((), device=gradient.device)
        return ShardStatistics(zero, zero > 0)
    wide = torch.promote_types(gradient.dtype, torch.float32)
    norm = torch.linalg.vector_norm(gradient, dtype=wide)
    # The largest magnitude is finite if and only if all are; the norm of finite values may overflow.
    largest = torch.linalg.vector_norm(gradient, math.inf)
    return ShardStatistics(norm * norm, ~torch.isfinite(largest))


class Chunk(ShardedStorage):
    """
    One chunk of `numel` elements, sharded over `group` (None: the default group).

    `dtype` is that of its tensors and of the shard. Raises ChunkError if the group size does not divide `numel`, or if
    the pool has no blocks for such a chunk.
    """

    config_type: ClassVar[type[StorageConfig]] = ChunkConfig
    config: ChunkConfig

    def __init__(
        self,
        pool: MemoryPool,
        numel: int,
        dtype: torch.dtype,
        group: ProcessGroup | None = None,
        *,
        replica_group: ProcessGroup | None = None,
        config: ChunkConfig | None = None,
    ) -> None:
        self.chunk_id = next(_ids)
        self.states = TensorStates()
        self.tensors: list[Tensor] = []
        self.partner: Chunk | None = None
        self.stale = False
        """True if the partner's shard is newer than this one, so that the next gather sends that."""
        self.from_partner = False
        """True if the unsharded data came from the partner, and are not older than it."""
        self.statistics: ShardStatistics | None = None
        """The statistics of the last reduction; None before the first, and while one is on its way."""
        self._indices: dict[int, int] = {}
        self._open: Tensor | None = None
        self._stand_ins: list[Tensor] = []
        config = config or ChunkConfig()
        if not dtype.is_floating_point:
            raise ChunkError(f"dtype must be a floating-point dtype, got {dtype}", where=f"Chunk of {numel} x {dtype}")
        block = BlockSpec(numel, config.compute_dtype or dtype)
        if config.block is BlockKind.PUBLIC and pool.public_spec not in (None, block):
            raise ChunkError(
                f"expected the size of the public blocks, {pool.public_spec}, got {numel} x {block.dtype}",
                where=f"Chunk of {numel} x {dtype}",
            )
        super().__init__(pool, numel, dtype, group, replica_group=replica_group, config=config)
        self._reductions = StorageGradients(self)

    # --- properties --------------------------------------------------------------------------------------------------

    @property
    def is_fused(self) -> bool:
        """True if it owns its block permanently."""
        return self.config.block is BlockKind.PRIVATE

    @property
    def payload(self) -> Tensor:
        """The whole chunk: 1D. Only while it is open or unsharded."""
        self.check_state({StorageState.OPEN, StorageState.UNSHARDED}, "read the payload")
        return self._fill_buffer() if self.state is StorageState.OPEN else self._flat()

    @property
    def memory_usage(self) -> dict[str, int]:
        """Bytes held now, by device type: shard, block, gradient buffer, and the buffer of an open chunk."""
        filling = [] if self._open is None else [self._open]
        return bytes_by_device([*self.tensors_held, *self._reductions.tensors_held, *filling])

    @property
    def can_release(self) -> bool:
        """True if it is gathered, not fused, and none of its tensors is in use."""
        return self.is_gathered and not self.is_fused and self.states.all_in(RELEASABLE)

    def __lt__(self, other: object) -> bool:
        """Chunks are ordered by creation, which is the same on all ranks."""
        return self.chunk_id < other.chunk_id if isinstance(other, Chunk) else NotImplemented

    def _facts(self) -> str:
        return f"{self.chunk_id}, {super()._facts()}"

    def index_of(self, tensor: Tensor) -> int:
        """The index of a tensor, by identity. Raises TensorRefused if it is not in the chunk."""
        index = self._indices.get(id(tensor))
        if index is None:
            raise TensorRefused(f"tensor {tuple(tensor.shape)} is not in the chunk", where=repr(self))
        return index

    # --- filling -----------------------------------------------------------------------------------------------------

    @torch.no_grad()
    def append(self, tensor: Tensor) -> int:
        """
        Copy a tensor in, and bind it to the copy. Returns its index.

        Raises ChunkFull if there is not enough room, TensorRefused for another dtype, a tensor without data, or one
        that is already in the chunk. The chunk and the tensor are unchanged then.
        """
        self.check_state({StorageState.OPEN}, "append")
        self._check_appended(tensor)
        flat = self._fill_buffer()
        slot = self.layout.append(tensor.shape)
        view = flat[slot.offset : slot.end].view(slot.shape)
        view.copy_(tensor)
        tensor.data = view
        self.states.add()
        self._indices[id(tensor)] = len(self.tensors)
        self.tensors.append(tensor)
        return len(self.tensors) - 1

    @torch.no_grad()
    def close(self) -> None:
        """Keep this rank's shard, with zeros where there is no tensor, and drop the rest."""
        self.check_state({StorageState.OPEN}, "close")
        self._keep_shard(self._fill_buffer())
        self._open = None
        self._stand_ins = self.layout.stand_ins(self.dtype, self.pool.device)
        self._bind(self._stand_ins)

    def _fill(self, tensors: Sequence[Tensor]) -> None:
        for tensor in tensors:
            self.append(tensor)
        self.close()

    # --- access ------------------------------------------------------------------------------------------------------

    def release(self) -> None:
        """
        Give the block back. The values in it are lost, unless the shard is older: then they are written to it first.

        The block is not overwritten before the work that the current stream has been given so far. Raises
        ChunkStateError if the chunk is fused, is not gathered, or one of its tensors is in use.
        """
        if self.is_fused:
            raise ChunkStateError("cannot release a fused chunk: it owns its block permanently", where=repr(self))
        self.check_state(GATHERED, "release")
        self._check_tensors(RELEASABLE, "release")
        if self.stale and self.from_partner:
            self._write_back()
        super().release()

    @torch.no_grad()
    def _write_back(self) -> None:
        """Copy this rank's part of the unsharded chunk to the shard, which is as new as the partner's from then on."""
        self.access()
        self.stale = False
        if not self.aliases_shard:
            self.wait_shard_reads()
            self._shard.copy_(self.layout.own_slice(self.payload))

    # --- states ------------------------------------------------------------------------------------------------------

    def move(self, tensor: Tensor | int, state: TensorState) -> None:
        """Move a tensor, given itself or its index, to a state. Raises IllegalTransition; it then stays put."""
        index = tensor if isinstance(tensor, int) else self.index_of(tensor)
        self.states.move(index, state, where=self)

    def move_all(self, state: TensorState) -> None:
        """Move every tensor. Raises IllegalTransition naming those that may not move; then none does."""
        self.states.move_all(state, where=self)

    # --- gradients ---------------------------------------------------------------------------------------------------

    @property
    def gradients(self) -> GradientBuffer:
        """The gradient buffer, opened if there is none."""
        self.check_state(CLOSED, "open gradients")
        return self._reductions.buffer

    def open_gradients(self) -> GradientBuffer:
        """Make the gradient buffer: see `StorageGradients.open`."""
        self.check_state(CLOSED, "open gradients")
        return self._reductions.open()

    def discard_gradients(self) -> None:
        """Drop what has accumulated in the gradient buffer."""
        self._reductions.discard()

    def reduce(
        self,
        *,
        partial: Tensor | None = None,
        all_reduce: bool = True,
        release: bool = True,
        async_op: bool = False,
    ) -> Reduction:
        """
        Average the gradients over all ranks: see `StorageGradients`. Every tensor is in HOLD afterwards.

        `release` gives back the block of unsharded data. With `async_op` the caller waits for the handle. Raises
        ChunkStateError unless all tensors are READY_FOR_REDUCE.
        """
        self.check_state(CLOSED, "reduce")
        self._check_tensors({TensorState.READY_FOR_REDUCE}, "reduce")
        buffer = self._reductions.take(partial)
        self.statistics = None
        self.states.reset()
        if release and self.is_gathered:
            self._drop_payload()
        reduction = self._reductions.start(
            buffer, partial=partial, all_reduce=all_reduce, on_result=self._set_statistics
        )
        if not async_op:
            reduction.wait()
        return reduction

    def reset(self) -> None:
        """Return to the state after a step, every tensor in HOLD. A reduction under way ends first."""
        if self.state is StorageState.OPEN:
            return
        try:
            self._reductions.reset()
        finally:
            super().reset()
            self.states.reset()

    # --- partner -----------------------------------------------------------------------------------------------------

    def pair(self, partner: Chunk) -> None:
        """
        Make the two chunks partners. Symmetric; repeating it changes nothing.

        Raises ChunkError if one of them has another partner, or if their layouts differ.
        """
        if self.partner is partner and partner.partner is self:
            return
        problems = [
            f"{one!r} already has a partner, {one.partner!r}" for one in (self, partner) if one.partner is not None
        ]
        mine, other = self.layout, partner.layout
        if self is partner or (mine.numel, mine.rank, mine.slots) != (other.numel, other.rank, other.slots):
            problems.append(f"partner must be another chunk with the same tensors, on the same group, got {partner!r}")
        if problems:
            raise ChunkError(problems, where=f"pair of {self!r}")
        self.partner, partner.partner = partner, self

    @torch.no_grad()
    def update_from_partner(self) -> None:
        """
        Take over the partner's shard, after the optimizer has stepped on it.

        On an accelerator it is cast and copied now. On the CPU the next gather sends the partner's shard, cast on the
        way. Raises ChunkError without a partner, or if the shards are on different types of device; ChunkStateError if
        the partner is not sharded.
        """
        where = f"update_from_partner of {self!r}"
        partner = self.partner
        if partner is None:
            raise ChunkError("the chunk has no partner: pair it first", where=where)
        partner.check_state({StorageState.SHARDED}, "update its partner")
        if self.shard_device.type != partner.shard_device.type:
            raise ChunkError(
                f"partners must keep their shards on one type of device, got {self.shard_device} and "
                f"{partner.shard_device}",
                where=where,
            )
        if self.shard_device.type == "cpu":
            self.stale, self.from_partner = True, False
        else:
            self.shard.copy_(partner.shard)

    # --- blocks ------------------------------------------------------------------------------------------------------

    def _own_block(self) -> Block | None:
        if self.config.block is BlockKind.PUBLIC:
            return None
        if self.is_fused:
            return self.pool.take_private(self.numel, self.compute_dtype)
        return super()._own_block()

    def _lease_block(self) -> Block:
        if self.config.block is BlockKind.PUBLIC:
            block = self.pool.lease_public()
            if block.spec != (self.numel, self.compute_dtype):
                self.pool.release(block)
                raise ChunkError(
                    f"expected a block of {self.numel} x {self.compute_dtype}, got {block!r}", where="access"
                )
            return block
        if self.is_fused and self._block is not None:
            self.pool.streams.wait(self._block.event)
            return self._block
        return super()._lease_block()

    def _give_back(self, block: Block, after: torch.Event | None) -> None:
        if self.is_fused:
            block.event = self.pool.streams.record() if after is None else after
        else:
            super()._give_back(block, after)

    def _fill_buffer(self) -> Tensor:
        """Memory to put the whole chunk together in, in its own dtype: a private block where possible."""
        if self._open is None:
            if self.is_fused and self._block is not None and self.compute_dtype is self.dtype:
                self.pool.streams.wait(self._block.event)
                self._open = self._block.payload
            else:
                self._open = torch.empty(self.numel, dtype=self.dtype, device=self.pool.device)
        return self._open

    # --- inside ------------------------------------------------------------------------------------------------------

    def _bind(self, views: Sequence[Tensor]) -> None:
        """Let the tensors be views of the unsharded chunk, or stand-ins without memory."""
        for tensor, view in zip(self.tensors, views, strict=True):
            tensor.data = view

    def _start_gathering(self, after: torch.Event | None) -> Gathering:
        source = self.partner if self.stale and self.partner is not None else self
        handle = self._gather_from(source, after)
        self.from_partner = source is not self
        return handle

    def _arrive(self, handle: Gathering) -> None:
        arrives = self.state is StorageState.GATHERING
        super()._arrive(handle)
        if arrives and self.state is StorageState.UNSHARDED:
            self._bind(self.views)

    def _drop_payload(self) -> None:
        try:
            super()._drop_payload()
        finally:
            self._bind(self._stand_ins)
            if self.config.block is BlockKind.PUBLIC:
                # Another chunk may lease it next.
                self._block = None

    def _set_statistics(self, gradient: Tensor) -> None:
        self.statistics = shard_statistics(gradient[: self.layout.valid_numel])

    def _check_appended(self, tensor: Tensor) -> None:
        """Raise TensorRefused for a tensor that the chunk cannot hold, ChunkFull for one that there is no room for."""
        where = f"append to {self!r}"
        problems = []
        if tensor.dtype is not self.dtype:
            problems.append(f"dtype: expected {self.dtype}, got {tensor.dtype}")
        if tensor.layout is not torch.strided or tensor.is_meta:
            kind = "meta" if tensor.is_meta else tensor.layout
            problems.append(f"tensor {tuple(tensor.shape)} must be strided and have data, but is {kind}")
        if id(tensor) in self._indices:
            problems.append(f"tensor {tuple(tensor.shape)} is already in the chunk")
        if problems:
            raise TensorRefused(problems, where=where)
        room = self.numel - self.layout.next_offset()
        if tensor.numel() > room:
            raise ChunkFull(f"expected at most {room} elements, got a tensor of {tensor.numel()}", where=where)

    def _check_tensors(self, states: Container[TensorState], action: str) -> None:
        """Raise ChunkStateError unless every tensor is in one of `states`."""
        outside = self.states.outside(states)
        if outside:
            expected = " or ".join(state.name for state in TensorState if state in states)
            raise ChunkStateError(
                [f"cannot {action}: {text}, expected {expected}" for text in outside], where=repr(self)
            )
