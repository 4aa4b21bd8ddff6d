"""
Sharded flat storage: tensors of one dtype laid out contiguously, sharded over a group, and gathered on demand.

    storage = ShardedStorage.of(pool, tensors, group)   # copies the tensors; each rank keeps one shard
    handle = storage.access(async_op=True)              # all-gather into a block of the pool
    handle.wait()                                       # storage.views: the tensors, in their shapes
    storage.release()                                   # the block goes back to the pool

Only the shard persists; the block is leased. The all-gather reads the shard and writes the block, without an extra
copy. If the shard differs in dtype or device from the unsharded data, it is cast or uploaded straight into its place in
the block and gathered in place. Gradients have their own buffer: see `gradients.StorageGradients`.

Streams: gathers run on the pool's gather stream; `wait` orders the current stream after them. The host waits only for
the works of backends without streams.
"""

from __future__ import annotations

from collections.abc import Callable, Container, Iterable, Sequence
from dataclasses import dataclass
from enum import Enum
from types import MappingProxyType
from typing import ClassVar, Self

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup, Work

from fsdp_conformance.engine.chunks.layout import StorageLayout, padded_numel
from fsdp_conformance.engine.chunks.memory_pool import Block, MemoryPool
from fsdp_conformance.engine.communication import ChunkStreams, all_gather, resolve_group
from fsdp_conformance.engine.errors import ChunkError, ChunkStateError, TensorRefused
from fsdp_conformance.errors import ConfigError


class StorageState(Enum):
    """Where the data are."""

    # Members are singletons. Enum hashes their names in Python, and states are looked up all the time.
    __hash__ = object.__hash__

    OPEN = "open"
    """All of it in a buffer on this rank, which is still being filled. There is no shard yet."""
    SHARDED = "sharded"
    """Only in this rank's shard."""
    GATHERING = "gathering"
    """In the shard; the all-gather is writing a block, which must not be read yet."""
    UNSHARDED = "unsharded"
    """In the shard, and all of it in a block."""


#: The legal moves. GATHERING to SHARDED: a gather is released before anyone has waited for it.
STORAGE_TRANSITIONS = MappingProxyType(
    {
        StorageState.OPEN: frozenset({StorageState.SHARDED}),
        StorageState.SHARDED: frozenset({StorageState.GATHERING}),
        StorageState.GATHERING: frozenset({StorageState.UNSHARDED, StorageState.SHARDED}),
        StorageState.UNSHARDED: frozenset({StorageState.SHARDED}),
    }
)

#: States with a shard.
CLOSED = frozenset({StorageState.SHARDED, StorageState.GATHERING, StorageState.UNSHARDED})

#: States that hold a block.
GATHERED = frozenset({StorageState.GATHERING, StorageState.UNSHARDED})


@dataclass(frozen=True, kw_only=True, slots=True)
class StorageConfig:
    """How data are stored, gathered and reduced. Checked when it is made."""

    compute_dtype: torch.dtype | None = None
    """Dtype of the unsharded data and of the all-gather; None: the dtype of the shard."""
    reduce_dtype: torch.dtype | None = None
    """Dtype of the gradient buffer and of the reduce-scatter; None: the compute dtype."""
    shard_device: torch.device | None = None
    """Where the shard and its reduced gradient live; None: the pool's device. The CPU means offloading."""
    pin_memory: bool = True
    """True if an offloaded shard and its gradient are in pinned memory. Has no effect if the pool is on the CPU."""
    align: int = 1
    """Every tensor begins at a multiple of this many elements. Gaps are padding and are communicated."""
    alias_whole: bool = False
    """True if the shard itself serves as the unsharded data in a group of one rank, without a block or a copy. Writing
    to an unsharded tensor then writes to the shard."""

    def __post_init__(self) -> None:
        problems = self.problems()
        if problems:
            raise ConfigError(problems, where=type(self).__name__)

    def problems(self) -> list[str]:
        """Every setting that is out of range."""
        problems = []
        if self.align < 1:
            problems.append(f"align must be at least 1, got {self.align}")
        for name in ("compute_dtype", "reduce_dtype"):
            dtype = getattr(self, name)
            if dtype is not None and not dtype.is_floating_point:
                problems.append(f"{name} must be a floating-point dtype or None, got {dtype}")
        return problems


class Gathering:
    """
    The handle of an all-gather.

    After `wait` the storage is unsharded, for the current stream. Dropping a handle without waiting is safe: releasing
    the storage still orders reuse of the block after the gather.
    """

    def __init__(self, work: Work | None, streams: ChunkStreams, on_arrival: Callable[[Gathering], None]) -> None:
        self._work = work
        self._streams = streams
        self._on_arrival = on_arrival
        self._error: BaseException | None = None
        self.event: torch.Event | None = None
        """The end of what the gather has enqueued so far; None without streams."""

    def wait(self) -> None:
        """
        Order the current stream after the gather, and tell the storage that its data have arrived.

        Does nothing more on a second call, or if the storage was released in the meantime. A failed gather raises on
        every call; its storage can be released.
        """
        event = self.complete()
        if self._error is not None:
            raise self._error
        # On every call: the current stream may be another one than last time.
        self._streams.wait(event)
        self._on_arrival(self)

    def complete(self) -> torch.Event | None:
        """The event at the gather's end; None without streams, when it has ended. Raises its work's error once."""
        # Before waiting: a collective that failed is not waited for again.
        work, self._work = self._work, None
        if work is not None:
            # On the gather's stream, so that the event below is after the collective, which may have its own stream.
            with self._streams.on(self._streams.gather):
                try:
                    work.wait()
                except BaseException as error:
                    self._error = error
                    raise
                self.event = self._streams.record()
        return self.event

    def mark(self) -> None:
        """Record that the gather has enqueued everything except what follows its work."""
        self.event = self._streams.record()


@torch.no_grad()
def start_all_gather(payload: Tensor, shard: Tensor, layout: StorageLayout, group: ProcessGroup) -> Work | None:
    """
    Fill `payload` from every rank's shard, on the current stream. Returns None if that stream is all there is to wait
    for.

    payload: 1D, layout.numel; shard: 1D, layout.shard_numel. A shard of another dtype or device is copied into its
    place in the payload and gathered from there, which needs no other memory.
    """
    if layout.world_size == 1:
        payload.copy_(shard, non_blocking=True)
        return None
    if shard.dtype is not payload.dtype or shard.device != payload.device:
        # A rank's own slice of the payload is its part of the result: gathering from there needs no other memory.
        shard = layout.own_slice(payload).copy_(shard, non_blocking=True)
    if not payload.dtype.is_floating_point:
        # As bytes: gloo lacks some kinds of integers, and nothing is computed.
        payload, shard = payload.view(torch.uint8), shard.view(torch.uint8)
    return all_gather(payload, shard, group)


class ShardedStorage:
    """
    Flat storage of `numel` elements of `dtype`, sharded over `group` (None: the default group).

    With `replica_group`, reductions are all-reduced over it after the reduce-scatter (hybrid sharding); its members
    hold the same shard. `of` makes one from tensors. Raises ChunkError if the group size does not divide `numel`.
    """

    config_type: ClassVar[type[StorageConfig]] = StorageConfig

    def __init__(
        self,
        pool: MemoryPool,
        numel: int,
        dtype: torch.dtype,
        group: ProcessGroup | None = None,
        *,
        replica_group: ProcessGroup | None = None,
        config: StorageConfig | None = None,
    ) -> None:
        self.pool = pool
        self.dtype = dtype
        self.config = config = config or self.config_type()
        self.group = resolve_group(group)
        self.replica_group = replica_group
        self.num_replicas = 1 if replica_group is None else dist.get_world_size(replica_group)
        self.compute_dtype = config.compute_dtype or dtype
        self.reduce_dtype = config.reduce_dtype or self.compute_dtype
        self.shard_device = pool.device_like(config.shard_device)
        world_size = dist.get_world_size(self.group)
        problems = []
        if numel < 1 or numel % world_size:
            problems.append(f"numel must be a positive multiple of the group size {world_size}, got {numel}")
        if dtype.is_complex:
            problems.append(f"dtype must be a floating-point dtype or one of integers, got {dtype}")
        elif not dtype.is_floating_point and (config.compute_dtype or config.reduce_dtype):
            problems.append(f"compute_dtype and reduce_dtype must be None for {dtype}, which is not cast or reduced")
        if problems:
            raise ChunkError(problems, where=f"{type(self).__name__} of {numel} x {dtype}")
        self.layout = StorageLayout(numel, world_size=world_size, rank=dist.get_rank(self.group), align=config.align)
        self.state = StorageState.OPEN

        alone = world_size == 1 and self.shard_device == pool.device
        self.aliases_shard = config.alias_whole and alone and self.compute_dtype is dtype
        """True if the shard serves as the unsharded data: a group of one rank, and `alias_whole`."""
        # True if waiting for a work orders streams instead of blocking the host: then it can be done at once.
        self._gathers_ahead = pool.streams.orders(self.group)
        self._shard = torch.empty(0)
        # The end of the last upload of an offloaded shard, until the host has waited for it.
        self._shard_read: torch.Event | None = None
        self._block = None if self.aliases_shard else self._own_block()
        # The gather that has filled the block, or is filling it; None while sharded.
        self._gathering: Gathering | None = None
        self._views: dict[Block | None, list[Tensor]] = {}

    @classmethod
    def of(
        cls,
        pool: MemoryPool,
        tensors: Sequence[Tensor],
        group: ProcessGroup | None = None,
        *,
        replica_group: ProcessGroup | None = None,
        config: StorageConfig | None = None,
    ) -> Self:
        """
        The smallest storage that holds copies of `tensors`, in this order: at least one, all of one dtype.

        Raises TensorRefused for no tensors.
        """
        if not tensors:
            raise TensorRefused("tensors must not be empty", where=f"{cls.__name__}.of")
        config = config or cls.config_type()
        numel = padded_numel(
            [tensor.numel() for tensor in tensors], dist.get_world_size(resolve_group(group)), align=config.align
        )
        storage = cls(pool, numel, tensors[0].dtype, group, replica_group=replica_group, config=config)
        storage._fill(tensors)
        return storage

    @torch.no_grad()
    def _fill(self, tensors: Sequence[Tensor]) -> None:
        # Its own memory, not a block: in a group of one rank it becomes the shard.
        flat = torch.empty(self.numel, dtype=self.dtype, device=self.pool.device)
        for tensor in tensors:
            slot = self.layout.append(tensor.shape)
            flat[slot.offset : slot.end].view(slot.shape).copy_(tensor)
        self._keep_shard(flat)

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self._facts()})"

    def _facts(self) -> str:
        layout = self.layout
        filled = f"{len(layout.slots)} tensors, {layout.used_numel} of {self.numel} x {self.dtype}"
        return f"{self.state.value}, {filled}, rank {layout.rank} of {layout.world_size}"

    # --- twins -------------------------------------------------------------------------------------------------------

    def moved(self, pool: MemoryPool, dtype: torch.dtype, *, config: StorageConfig) -> ShardedStorage:
        """A storage of the same layout, on `pool` and in `dtype`; its shard is zero, for the caller to write."""
        twin = self._twin(pool, dtype, config)
        # Zeros: the caller writes what belongs to tensors, and gaps and padding are gathered with it.
        twin._shard = torch.zeros(
            twin.layout.shard_numel, dtype=dtype, device=twin.shard_device, pin_memory=twin.pins_memory
        )
        twin._go(StorageState.SHARDED)
        return twin

    def sharing(self, *, config: StorageConfig) -> ShardedStorage:
        """
        A storage with this very shard that is gathered and reduced by another `config`.

        Only one of the two may be unsharded, or have gradients, at a time: nothing orders one after the other.
        """
        twin = self._twin(self.pool, self.dtype, config)
        # Not a copy: what the optimizer writes has to reach both.
        twin._shard = self.shard
        twin._go(StorageState.SHARDED)
        return twin

    def _twin(self, pool: MemoryPool, dtype: torch.dtype, config: StorageConfig) -> ShardedStorage:
        """A storage with the layout of this one, which must be closed, and without a shard."""
        self.check_state(CLOSED, "move or share")
        twin = ShardedStorage(pool, self.numel, dtype, self.group, replica_group=self.replica_group, config=config)
        for slot in self.layout.slots:
            twin.layout.append(slot.shape)
        return twin

    # --- properties --------------------------------------------------------------------------------------------------

    @property
    def numel(self) -> int:
        """Elements of the unsharded data, padding included."""
        return self.layout.numel

    @property
    def is_gathered(self) -> bool:
        """True if it is unsharded, or being gathered."""
        return self.state in GATHERED

    @property
    def pins_memory(self) -> bool:
        """True if its shard and its reduced gradient are in pinned memory: offloaded from an accelerator."""
        return self.config.pin_memory and self.shard_device.type == "cpu" and self.pool.streams.exist

    @property
    def shard(self) -> Tensor:
        """This rank's shard: 1D, numel // group size. The first `layout.valid_numel` elements belong to tensors."""
        self.check_state(CLOSED, "read the shard")
        return self._shard

    @property
    def payload(self) -> Tensor:
        """All of the unsharded data: 1D."""
        self.check_state({StorageState.UNSHARDED}, "read the payload")
        return self._flat()

    @property
    def views(self) -> list[Tensor]:
        """The tensors, in their shapes, as views of the unsharded data."""
        self.check_state({StorageState.UNSHARDED}, "read the views")
        return self._make_views()

    def lasting_views(self) -> list[Tensor]:
        """`views`, which may be taken in any state and read while the storage is unsharded: its block is its own."""
        if self._block is not None and self._block not in self._views and not self.pool.is_leased(self._block):
            # A view can only be made of memory that exists. None of it is touched.
            memory = self._block.payload.untyped_storage()
            memory.resize_(self._block.nbytes)
            views = self._make_views()
            # The views outlive this: they refer to the storage object, which stays.
            memory.resize_(0)
            return views
        return self._make_views()

    @property
    def tensors_held(self) -> list[Tensor]:
        """The tensors whose memory is held: shard and block."""
        return [self._shard, self._flat()]

    # --- gathering ---------------------------------------------------------------------------------------------------

    def access(self, *, async_op: bool = False, after: torch.Event | None = None) -> Gathering:
        """
        Gather the data into a block, unless they are unsharded or on their way already.

        With streams, the gather begins after the event `after` (None: after all work that the current stream has been
        given). It must not begin before the shard has been written. An offloaded shard is written by the host, which
        has finished by then. With `async_op` the caller waits for the handle. Raises PoolExhausted if there is no
        block; nothing has changed then.
        """
        self.check_state(CLOSED, "gather")
        # Also when unsharded: waiting for the old handle orders a stream that has not waited yet.
        handle = self._gathering
        if handle is None:
            handle = self._start_gathering(after)
        if not async_op:
            handle.wait()
        return handle

    def gather_parts(self, part: Tensor, group: ProcessGroup, *, after: torch.Event | None) -> None:
        """
        Begin to gather sharded data from the parts that the ranks of a smaller group hold.

        part: 1D, numel // group size, in the dtype and on the device of the unsharded data; the caller may drop it
        afterwards. The gather starts after the event `after`.
        """
        self._gather(part, after, group)
        streams = self.pool.streams
        # The caller drops the part, which the computing stream allocated, while the gather's stream reads it.
        with streams.on(streams.gather):
            streams.keep(part)

    def gathered(self, shard: Tensor | None = None) -> Tensor:
        """
        A copy of all data from every rank's shard: 1D, on the pool's device, in the shard's dtype. Collective.

        `shard`: another tensor that is sharded like the data, such as their gradient or optimizer state.
        """
        # On the current stream, into memory that is not the pool's: the caller may keep it, and no step waits for it.
        source = self.shard if shard is None else shard
        payload = torch.empty(self.numel, dtype=source.dtype, device=self.pool.device)
        work = start_all_gather(payload, source, self.layout, self.group)
        if work is not None:
            work.wait()
        return payload

    def release(self) -> None:
        """
        Give the block back. The data in it are lost.

        The block is not overwritten before the work that the current stream has been given so far. Raises
        ChunkStateError unless the storage is unsharded or being gathered.
        """
        self.check_state(GATHERED, "release")
        self._drop_payload()

    def wait_shard_reads(self) -> None:
        """Return when uploads of the shard have ended: call it before the host writes an offloaded shard."""
        event, self._shard_read = self._shard_read, None
        self.pool.streams.hold_host(event)

    def reset(self) -> None:
        """Return to the state after a step, which is sharded. For use after an exception."""
        if self.is_gathered:
            self._drop_payload()

    # --- blocks ------------------------------------------------------------------------------------------------------

    def _own_block(self) -> Block | None:
        """The block that it keeps, with or without memory; None if it is lent one for each gather."""
        # Autograd saves views in forward: what is gathered for backward has to appear behind the same storage object.
        return self.pool.reserve(self.numel, self.compute_dtype)

    def _lease_block(self) -> Block:
        """A block with memory, for the current stream."""
        assert self._block is not None, "a storage that does not alias its shard has a block"
        self.pool.lease(self._block)
        return self._block

    def _give_back(self, block: Block, after: torch.Event | None) -> None:
        """Let the block be overwritten after the event `after`; None: after all work given to the current stream."""
        self.pool.release(block, after=after)

    # --- inside ------------------------------------------------------------------------------------------------------

    def _go(self, state: StorageState) -> None:
        assert state in STORAGE_TRANSITIONS[self.state], f"{self.state} to {state} is not in STORAGE_TRANSITIONS"
        self.state = state

    def check_state(self, states: Container[StorageState], action: str) -> None:
        """Raise ChunkStateError, naming the action, unless the storage is in one of `states`."""
        if self.state not in states:
            expected = " or ".join(state.name for state in StorageState if state in states)
            raise ChunkStateError(
                f"cannot {action}: expected state {expected}, got {self.state.name}", where=repr(self)
            )

    def _keep_shard(self, flat: Tensor) -> None:
        """Keep this rank's shard of the whole data, with zeros in gaps and padding. `flat` may become the shard."""
        for begin, end in self.layout.gaps:
            flat[begin:end].zero_()
        if self.layout.world_size == 1 and self.shard_device == flat.device and not self._is_block(flat):
            self._shard = flat
        else:
            # A copy, because a view would keep all of `flat` alive.
            shard = self.layout.own_slice(flat)
            self._shard = torch.empty_like(shard, device=self.shard_device, pin_memory=self.pins_memory).copy_(shard)
        self._go(StorageState.SHARDED)

    def _is_block(self, flat: Tensor) -> bool:
        return self._block is not None and flat is self._block.payload

    def _flat(self) -> Tensor:
        """All of the data: the block's memory, or the shard if that serves."""
        return self._shard if self._block is None else self._block.payload

    def _make_views(self) -> list[Tensor]:
        """The tensors in their shapes. Made once for each block: a resized block keeps its storage object."""
        if self._block not in self._views:
            # `.data` has its own version counter: gathering again does not count as modifying what autograd has
            # saved, nor does writing to one tensor count as modifying its neighbours.
            self._views[self._block] = [view.data for view in self.layout.views(self._flat())]
        return self._views[self._block]

    def _start_gathering(self, after: torch.Event | None) -> Gathering:
        return self._gather_from(self, after)

    def _gather_from(self, source: ShardedStorage, after: torch.Event | None) -> Gathering:
        """Begin to gather the shards of `source`, a storage of the same layout."""
        handle = self._gather(source._shard, after, self.group)
        if source._shard.device != self.pool.device:
            # The host is not ordered after the upload: `wait_shard_reads` blocks it before it writes this shard.
            source._shard_read = handle.event
        return handle

    def _gather(self, shard: Tensor, after: torch.Event | None, group: ProcessGroup) -> Gathering:
        """Lease a block and begin to gather `shard` into it, on the gather stream, after the event `after`."""
        streams = self.pool.streams
        if self.aliases_shard:
            gathering = Gathering(None, streams, self._arrive)
        else:
            # A shard in host memory was written by the host, so it is there already.
            if shard.device == self.pool.device:
                streams.order(streams.gather, streams.record() if after is None else after)
            # Leased on the stream that writes it first: the allocator then need not keep it for another stream.
            with streams.on(streams.gather):
                block = self._lease_block()
                try:
                    work = start_all_gather(block.payload, shard, self.layout, group)
                    gathering = Gathering(work, streams, self._arrive)
                    if work is not None and self._gathers_ahead:
                        # Only orders streams here, and the event covers the collective: nothing is left to wait for.
                        gathering.complete()
                    else:
                        gathering.mark()
                except BaseException:
                    # Still sharded, and nothing is leased: the caller may try again.
                    self._give_back(block, None)
                    raise
            self._block = block
        self._gathering = gathering
        self._go(StorageState.GATHERING)
        return gathering

    def _arrive(self, handle: Gathering) -> None:
        """The data are there, for the current stream."""
        # A handle may be waited for late, after a release and the next gather: it says nothing about that one.
        if handle is self._gathering and self.state is StorageState.GATHERING:
            # Later gathers wait for the last use of what lingers; this one did not.
            self.pool.settle()
            self._go(StorageState.UNSHARDED)

    def _drop_payload(self) -> None:
        """Become sharded, and give the block back: after the gather if that is still under way, else after now."""
        gathering, after = self._gathering, None
        try:
            if gathering is not None and self.state is StorageState.GATHERING:
                after = gathering.complete()
                if self._shard.device == self.pool.device:
                    # A gather that was not needed may still read the shard, which may be written from now on.
                    self.pool.streams.wait(after)
        finally:
            # Also after a failed gather: its block must go back, or the pool would run out after a few retries.
            self._go(StorageState.SHARDED)
            # From now on `_arrive` ignores the old handle.
            self._gathering = None
            if self._block is not None:
                self._give_back(self._block, after)


def bytes_by_device(tensors: Iterable[Tensor]) -> dict[str, int]:
    """Bytes of the storages behind `tensors`, by device type. A storage that several tensors share counts once."""
    storages = {}
    for tensor in tensors:
        storage = tensor.untyped_storage()
        storages[storage.data_ptr()] = (tensor.device.type, storage.nbytes())
    usage: dict[str, int] = {}
    for device_type, nbytes in storages.values():
        if nbytes:
            usage[device_type] = usage.get(device_type, 0) + nbytes
    return usage
