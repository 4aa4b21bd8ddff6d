"""
A chunk: the flat storage of one unit, sharded over a group, gathered when it is needed.

    chunk = Chunk.of(pool, list(unit.parameters()), group)   # copied in; each rank keeps one shard
    handle = chunk.access(async_op=True)                     # all-gather into a block of the pool
    handle.wait()                                            # chunk.views: the tensors, in their shapes
    chunk.gradients.put(index, gradient)                     # ... during backward
    chunk.move_all(TensorState.READY_FOR_REDUCE)
    handle = chunk.reduce(async_op=True)                     # reduce-scatter from there; the block goes back
    gradient = handle.wait()                                 # 1D, of this rank's shard

The shard persists; everything else is leased. The all-gather reads the shard and writes the block, the reduce-scatter
reads the buffer and writes the gradient: nothing is copied in or out. Where the shard has another dtype or device than
the unsharded chunk, it is cast or uploaded straight into its place in the block, and gathered in place.

Streams: gathers run on the pool's gather stream, reductions on its reduce stream; `wait` orders the current stream. The
host waits for nothing but works of backends that know no streams, and offloaded gradients.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup

from fsdp_conformance.engine.chunks import checks as chunk_checks
from fsdp_conformance.engine.chunks import gradients as chunk_gradients
from fsdp_conformance.engine.chunks import partner as chunk_partner
from fsdp_conformance.engine.chunks import transfer as chunk_transfer
from fsdp_conformance.engine.chunks.config import ChunkConfig
from fsdp_conformance.engine.chunks.gathering import Gathering
from fsdp_conformance.engine.chunks.gradient_buffer import GradientBuffer
from fsdp_conformance.engine.chunks.layout import ChunkLayout, padded_numel
from fsdp_conformance.engine.chunks.memory_pool import BlockKind, MemoryPool
from fsdp_conformance.engine.chunks.payload import ChunkPayload, bytes_by_device
from fsdp_conformance.engine.chunks.reduction import DivideFactors, Reduction, ShardStatistics
from fsdp_conformance.engine.chunks.state import CHUNK_TRANSITIONS, RELEASABLE, ChunkState, TensorState, TensorStates
from fsdp_conformance.engine.errors import ChunkStateError, TensorRefused
from fsdp_conformance.engine.flat_collectives import resolve_group

_ids = itertools.count()

#: States in which a chunk has a shard.
_CLOSED = frozenset({ChunkState.SHARDED, ChunkState.GATHERING, ChunkState.UNSHARDED})

#: States in which it has its whole data beside, or soon will.
_HELD = frozenset({ChunkState.GATHERING, ChunkState.UNSHARDED})


class Chunk:
    """
    One chunk of `numel` elements, sharded over `group` (None: the default one).

    `dtype` is that of its tensors and of the shard. With `replica_group`, reductions are all-reduced over it after
    the reduce-scatter (hybrid sharding); its members hold the same shard. `name` is for messages. Raises ChunkError
    for a size that the group does not divide, or a configuration that does not fit the pool.
    """

    def __init__(
        self,
        pool: MemoryPool,
        numel: int,
        dtype: torch.dtype,
        group: ProcessGroup | None = None,
        *,
        replica_group: ProcessGroup | None = None,
        config: ChunkConfig | None = None,
        name: str = "",
    ) -> None:
        self.chunk_id = next(_ids)
        self.name = name
        self.pool = pool
        self.dtype = dtype
        self.config = config = config or ChunkConfig()
        self.group = resolve_group(group)
        self.replica_group = replica_group
        self.compute_dtype = config.compute_dtype or dtype
        self.reduce_dtype = config.reduce_dtype or self.compute_dtype
        self.shard_device = pool.device_like(config.shard_device)
        world_size = dist.get_world_size(self.group)
        chunk_checks.check_fit(self, numel, world_size)
        self.layout = ChunkLayout(numel, world_size=world_size, rank=dist.get_rank(self.group), align=config.align)
        self.states = TensorStates()
        self.tensors: list[Tensor] = []
        self.state = ChunkState.OPEN
        self.partner: Chunk | None = None
        self.stale = False
        """Whether the partner's shard is newer than this one, and is what the next gather sends."""
        self.statistics: ShardStatistics | None = None
        """Of the last reduction that has ended; None before, and while one is on its way."""

        alone = world_size == 1 and self.shard_device == pool.device
        gathers_ahead = pool.streams.orders(self.group)
        self._ahead = gathers_ahead and (replica_group is None or pool.streams.orders(replica_group))
        self._payload = ChunkPayload(
            pool,
            self.layout,
            self.group,
            self.compute_dtype,
            config.block,
            aliases=config.alias_whole and alone and self.compute_dtype is dtype,
            ahead=gathers_ahead,
        )
        self._indices: dict[int, int] = {}
        self._open: Tensor | None = None
        self._shard = torch.empty(0)
        self._shard_read: Any = None
        self._stand_ins: list[Tensor] = []
        self.from_partner = False
        """Whether what is unsharded came from the partner, and is not older than it."""
        self.num_replicas = 1 if replica_group is None else dist.get_world_size(replica_group)
        self.reduces_in_place = alone and self.reduce_dtype is dtype
        """Whether the gradient buffer itself can become the reduced gradient: a group of one rank, nothing to cast."""
        self._plan = chunk_gradients.reduction_plan(self, None, all_reduce=True)
        self._gradients: GradientBuffer | None = None
        self._reduction: Reduction | None = None

    @classmethod
    def of(
        cls,
        pool: MemoryPool,
        tensors: Sequence[Tensor],
        group: ProcessGroup | None = None,
        *,
        replica_group: ProcessGroup | None = None,
        config: ChunkConfig | None = None,
        name: str = "",
    ) -> Chunk:
        """The smallest chunk that holds `tensors`, of one dtype, at least one: filled in their order, and closed."""
        if not tensors:
            raise TensorRefused("tensors=[], but should be at least one", where="Chunk.of")
        config = config or ChunkConfig()
        world_size = dist.get_world_size(resolve_group(group))
        numel = padded_numel([tensor.numel() for tensor in tensors], world_size, align=config.align)
        chunk = cls(pool, numel, tensors[0].dtype, group, replica_group=replica_group, config=config, name=name)
        for tensor in tensors:
            chunk.append(tensor)
        chunk.close()
        return chunk

    # --- what it is --------------------------------------------------------------------------------------------------

    @property
    def numel(self) -> int:
        """Elements of the unsharded chunk, padding included."""
        return self.layout.numel

    @property
    def is_fused(self) -> bool:
        """Whether its block is its own for good."""
        return self.config.block is BlockKind.PRIVATE

    @property
    def aliases_shard(self) -> bool:
        """Whether the shard serves as the unsharded chunk: a group of one rank, and `alias_whole`."""
        return self._payload.aliases

    @property
    def pins_memory(self) -> bool:
        """Whether its shard and its reduced gradient are in pinned memory: offloaded from an accelerator."""
        return self.config.pin_memory and self.shard_device.type == "cpu" and self.pool.streams.exist

    @property
    def shard(self) -> Tensor:
        """This rank's shard: 1D, numel // group size, of which the first `layout.valid_numel` are tensors' elements."""
        chunk_checks.check_state(self, _CLOSED, "shard")
        return self._shard

    @property
    def newest_shard(self) -> Tensor:
        """The shard that the next gather sends: this one, or the partner's if that is newer."""
        return self.partner.shard if self.stale and self.partner is not None else self.shard

    @property
    def payload(self) -> Tensor:
        """The whole chunk: 1D. Only while it is open or unsharded."""
        chunk_checks.check_state(self, {ChunkState.OPEN, ChunkState.UNSHARDED}, "payload")
        return self._fill_buffer() if self.state is ChunkState.OPEN else self._payload.flat(self._shard)

    @property
    def views(self) -> list[Tensor]:
        """Its tensors, in their shapes, as views of the unsharded chunk."""
        chunk_checks.check_state(self, {ChunkState.UNSHARDED}, "views")
        return self._payload.views(self._shard)

    @property
    def has_gradients(self) -> bool:
        """Whether there is a gradient buffer."""
        return self._gradients is not None

    @property
    def can_release(self) -> bool:
        """Whether it is unsharded, not fused, and no tensor is in use."""
        return self.state in _HELD and not self.is_fused and self.states.all_in(RELEASABLE)

    @property
    def can_reduce(self) -> bool:
        """Whether the gradients of all tensors are there."""
        return self.state in _CLOSED and self.states.all_in({TensorState.READY_FOR_REDUCE})

    @property
    def memory_usage(self) -> dict[str, int]:
        """Bytes that it holds now, by device type: shard, block, gradient buffer, the buffer that it is filled in."""
        gradients = None if self._gradients is None else self._gradients.payload
        held = (self._shard, self._open, self._payload.flat(self._shard), gradients)
        return bytes_by_device(tensor for tensor in held if tensor is not None)

    def __lt__(self, other: object) -> bool:
        """Chunks are in the order in which they were made, which is the same on all ranks."""
        return self.chunk_id < other.chunk_id if isinstance(other, Chunk) else NotImplemented

    def __repr__(self) -> str:
        which = f"{self.chunk_id} {self.name}".rstrip()
        filled = f"{self.layout.used_numel} of {self.numel} x {self.dtype}"
        rank = f"rank {self.layout.rank} of {self.layout.world_size}"
        return f"Chunk({which}, {self.state.value}, {len(self.tensors)} tensors, {filled}, {rank})"

    def index_of(self, tensor: Tensor) -> int:
        """The index of a tensor, by identity. Raises TensorRefused if it is not in the chunk."""
        index = self._indices.get(id(tensor))
        if index is None:
            raise TensorRefused(f"tensor {tuple(tensor.shape)} is not in the chunk, but should be", where=repr(self))
        return index

    # --- filling -----------------------------------------------------------------------------------------------------

    @torch.no_grad()
    def append(self, tensor: Tensor) -> int:
        """
        Copy a tensor in, and bind it to the copy. Returns its index.

        Raises ChunkFull if there is not room enough, TensorRefused for another dtype, a tensor without data, or one
        that is in already; chunk and tensor are then as before.
        """
        chunk_checks.check_state(self, {ChunkState.OPEN}, "append")
        chunk_checks.check_appended(self, tensor, known=id(tensor) in self._indices)
        flat = self._fill_buffer()
        slot = self.layout.append(tensor.shape)
        view = flat[slot.offset : slot.end].view(slot.shape)
        view.copy_(tensor)
        if self.config.bind:
            tensor.data = view
        self.states.add()
        self._indices[id(tensor)] = len(self.tensors)
        self.tensors.append(tensor)
        return len(self.tensors) - 1

    @torch.no_grad()
    def close(self) -> None:
        """Keep this rank's shard, with zeros where no tensor is, and let go of the rest."""
        chunk_checks.check_state(self, {ChunkState.OPEN}, "close")
        flat = self._fill_buffer()
        for begin, end in self.layout.gaps:
            flat[begin:end].zero_()
        if self.layout.world_size == 1 and self.shard_device == flat.device and not self.is_fused:
            self._shard = flat
        else:
            shard = self.layout.own_slice(flat)
            self._shard = torch.empty_like(shard, device=self.shard_device, pin_memory=self.pins_memory).copy_(shard)
        self._open = None
        self._go(ChunkState.SHARDED)
        if self.config.bind:
            self._stand_ins = self.layout.stand_ins(self.dtype, self.pool.device)
            self._bind(self._stand_ins)

    # --- unsharding --------------------------------------------------------------------------------------------------

    def access(self, *, async_op: bool = False, after: Any = None) -> Gathering:
        """
        Gather the chunk into a block. What is unsharded, or on its way, is not gathered again.

        With streams, the gather begins after the event `after`; None: after what the current stream was given so far.
        It must not begin before whoever wrote the shard has ended (who wrote an offloaded one is the host, and is not
        waited for). With `async_op` the caller waits for the handle.
        Raises PoolExhausted if there is no block, and ChunkStateError if gradients have overwritten the unsharded
        chunk; all is then as before.
        """
        chunk_checks.check_state(self, _CLOSED, "access")
        handle = self._payload.gathering
        if handle is None:
            handle = self._start_gathering(after)
        elif self._gradients is not None:
            chunk_checks.check_readable(self, self._gradients)
        if not async_op:
            handle.wait()
        return handle

    def release(self, *, writeback: bool = False) -> None:
        """
        Return the block; the values in it are gone, unless they are written back to the shard first.

        The block is not written again before what the current stream was given so far. Raises ChunkStateError if the
        chunk is fused, is not unsharded, or one of its tensors is in use.
        """
        chunk_checks.check_release(self)
        if writeback or (self.stale and self.from_partner):
            self.write_back()
        self._drop_payload()

    @torch.no_grad()
    def write_back(self) -> None:
        """
        Copy this rank's part of the unsharded chunk to the shard, which then counts as newer than the partner's.

        A wider shard is rounded to what the unsharded chunk can say.
        """
        self.access()
        self.stale = False
        if not self._payload.aliases:
            self.wait_shard_reads()
            self._shard.copy_(self.layout.own_slice(self.payload))

    def wait_shard_reads(self) -> None:
        """Return when uploads of the shard have ended: before the host writes an offloaded one, in the optimizer."""
        event, self._shard_read = self._shard_read, None
        self.pool.streams.hold_host(event)

    # --- reducing ----------------------------------------------------------------------------------------------------

    def move(self, tensor: Tensor | int, state: TensorState) -> None:
        """Move a tensor, or the one of an index, to a state. Raises IllegalTransition; then it stays where it was."""
        index = tensor if isinstance(tensor, int) else self.index_of(tensor)
        self.states.move(index, state, where=self)

    def move_all(self, state: TensorState) -> None:
        """Move every tensor. Raises IllegalTransition naming those that may not; then all stay."""
        self.states.move_all(state, where=self)

    @property
    def gradients(self) -> GradientBuffer:
        """The gradient buffer; opened if there is none."""
        return self.open_gradients() if self._gradients is None else self._gradients

    def open_gradients(self, *, into: Tensor | None = None, in_payload: bool = False) -> GradientBuffer:
        """
        Make the gradient buffer, on the current stream: a cached block of the pool, unless it can be had without.

        `into` is what was accumulated so far, in a group of one rank without replicas: gradients are added to it in
        place, and it is what the reduction returns. `in_payload`: a gradient overwrites its tensor in the unsharded
        chunk, one buffer instead of two, for tensors that nothing reads after their gradient has arrived. Raises
        ChunkStateError if there is a buffer, TensorRefused if the reduction forbids what was asked, PoolExhausted.
        """
        chunk_checks.check_state(self, _CLOSED, "open_gradients")
        if self._gradients is not None:
            raise ChunkStateError("gradients are open, but should be reduced or discarded first", where=repr(self))
        self._gradients = chunk_gradients.open_buffer(self, into=into, in_payload=in_payload)
        return self._gradients

    def reduce(
        self,
        *,
        into: Tensor | None = None,
        partial: Tensor | None = None,
        all_reduce: bool = True,
        factors: DivideFactors | None = None,
        release: bool = True,
        async_op: bool = False,
    ) -> Reduction:
        """
        Average the gradients over all ranks, each keeping its shard; every tensor is HOLD again.

        `into`: 1D, like the shard; the result is added to it and it is returned. `factors`: other divisors than the
        number of ranks. `all_reduce=False` leaves the replicas for later: the result is to be given to a later
        reduction as `partial`. `release` returns the block of the unsharded chunk. With `async_op` the caller waits for
        the handle. What got no gradient counts as zero. Raises ChunkStateError unless all tensors are READY_FOR_REDUCE,
        TensorRefused for an `into` or `partial` that is not like the shard.
        """
        in_place = self._gradients is not None and self._gradients.holds_all
        chunk_checks.check_reduction(self, into=into, partial=partial, factors=factors, in_place=in_place)
        if self._reduction is not None:
            self._reduction.wait()
        buffer = self.gradients
        buffer.complete()
        self._gradients = self.statistics = None
        self.states.reset()
        if buffer.in_payload:
            block = self._forget_payload()
            buffer.block = None if self.is_fused else block
        elif release and self.state is not ChunkState.SHARDED:
            self._drop_payload()
        reduction = self._reduction = Reduction(
            self._plan if all_reduce and factors is None else chunk_gradients.reduction_plan(self, factors, all_reduce),
            buffer,
            into=into,
            partial=partial,
            valid_numel=self.layout.valid_numel if self.config.track_statistics and all_reduce else None,
            pool=self.pool,
            on_done=self._finish_reduction,
        )
        streams = self.pool.streams
        streams.order(streams.reduce, streams.record())
        reduction.start(ahead=self._ahead)
        if not async_op:
            reduction.wait()
        return reduction

    def discard_gradients(self) -> None:
        """Drop what was accumulated in the gradient buffer: zero_grad between two reductions."""
        buffer, self._gradients = self._gradients, None
        if buffer is not None and buffer.block is not None:
            self.pool.release(buffer.block)
        if buffer is not None and buffer.in_payload and self.state in _HELD:
            self._drop_payload()  # It is overwritten.

    def reset(self) -> None:
        """
        Be as after a step: sharded, without gradients, every tensor in HOLD. For use after an exception.

        A reduction that is on its way is ended first; its result is its handle's.
        """
        if self.state is ChunkState.OPEN:
            return
        try:
            if self._reduction is not None:
                self._reduction.wait()
        finally:
            self.discard_gradients()
            self.states.reset()
            if self.state in _HELD:
                self._drop_payload()

    # --- partner, and whole tensors ----------------------------------------------------------------------------------

    def pair(self, partner: Chunk) -> None:
        """See `chunk_partner.pair`."""
        chunk_partner.pair(self, partner)

    def update_from_partner(self) -> None:
        """See `chunk_partner.update_from_partner`."""
        chunk_partner.update_from_partner(self)

    def cpu_copy(self, *, only_rank_0: bool = False) -> list[Tensor | None]:
        """See `chunk_transfer.cpu_copy`."""
        return chunk_transfer.cpu_copy(self, only_rank_0=only_rank_0)

    def load(self, tensors: Sequence[Tensor | None], *, only_rank_0: bool = False) -> None:
        """See `chunk_transfer.load`."""
        chunk_transfer.load(self, tensors, only_rank_0=only_rank_0)

    # --- inside ------------------------------------------------------------------------------------------------------

    def _fill_buffer(self) -> Tensor:
        """The whole chunk while it is open."""
        if self._open is None:
            self._open = self._payload.fill_buffer(self.dtype)
        return self._open

    def _go(self, state: ChunkState) -> None:
        assert state in CHUNK_TRANSITIONS[self.state], f"{self.state} to {state} is not in CHUNK_TRANSITIONS"
        self.state = state

    def _bind(self, views: Sequence[Tensor]) -> None:
        for tensor, view in zip(self.tensors, views, strict=True):
            tensor.data = view

    def _start_gathering(self, after: Any) -> Gathering:
        reduction = self._reduction
        while reduction is not None and reduction.in_payload and not reduction.done:
            reduction.advance()  # It still has the block.
        source = self.newest_shard
        handle = self._payload.start(source, self._arrive, after=after)
        self.from_partner = source is not self._shard
        if source.device != self.pool.device:
            owner = self.partner if self.from_partner and self.partner is not None else self
            owner._shard_read = handle.event
        self._go(ChunkState.GATHERING)
        return handle

    def _arrive(self, handle: Gathering) -> None:
        """The data are there, for the current stream."""
        if handle is self._payload.gathering and self.state is ChunkState.GATHERING:
            self._go(ChunkState.UNSHARDED)
            if self.config.bind:
                self._bind(self.views)

    def _forget_payload(self) -> Any:
        """Be sharded. Returns the block, which is to be given back, or None."""
        self._go(ChunkState.SHARDED)
        if self.config.bind:
            self._bind(self._stand_ins)
        return self._payload.forget()

    def _drop_payload(self) -> None:
        """Be sharded, and give the block back: after the gather, if nobody has waited for it, else after now."""
        gathering, after = self._payload.gathering, None
        try:
            if gathering is not None and self.state is ChunkState.GATHERING:
                after = gathering.complete()
        finally:
            block = self._forget_payload()
            if block is not None:
                self._payload.give_back(block, after)

    def _finish_reduction(self, reduction: Reduction) -> None:
        self._reduction = None
        self.statistics = reduction.statistics
        if reduction.in_payload and self.is_fused and self._payload.block is not None:
            self._payload.block.event = reduction.event  # Another chunk's was given back.
