"""
The memory that chunks are unsharded into and gradients are gathered in: blocks, leased and returned, within a limit.

A block is flat memory of one size and dtype. Its kind says who may have it, and when it has memory:

    PUBLIC    any chunk of its size in turn; memory from `allocate_public` on
    PRIVATE   one chunk, which takes it for good; memory from `allocate_private` on
    RESIZED   one chunk; memory only while it is leased, always behind the same storage object
    CACHED    whoever asks for its size; memory from the first lease until `trim`, or until it has to make room

RESIZED is what a unit is unsharded into. Autograd saves views of parameters (a transposed weight) that share the
storage, so values gathered again for the backward have to come back behind the storage object of the forward.
CACHED is for gradients, which nothing outlives.

The limit counts the bytes that the pool holds, and makes the pool the rate limiter: a lease over it is refused with a
typed error, and everything is as it was before. Without a limit the pool never holds more than was leased at once: a
cached block that is free gives way before a new one is allocated.

Streams: `release` records an event, and whoever gets the memory next waits for it, on its stream, not on the host. A
cached block that a reduction may still be reading cools down: it is not given out before another one has been
released, so that the next unit's gradients do not wait for this unit's reduction. A pool belongs to one thread at a
time.
"""

from __future__ import annotations

import ctypes
import functools
import mmap
import sys
from collections import deque
from collections.abc import Callable, Iterable
from enum import Enum
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fsdp_conformance.engine.chunks.streams import ChunkStreams
from fsdp_conformance.engine.errors import PoolError, PoolExhausted

#: glibc takes blocks from here on from the system and gives them back at once (its DEFAULT_MMAP_THRESHOLD_MAX).
_MAPPED_BYTES = 32 * 2**20


class BlockKind(Enum):
    """Who may have a block, and when it has memory. See the module's docstring."""

    PUBLIC = "public"
    PRIVATE = "private"
    RESIZED = "resized"
    CACHED = "cached"


class BlockSpec(NamedTuple):
    """The size and dtype of a block."""

    numel: int
    dtype: torch.dtype

    @property
    def nbytes(self) -> int:
        """Its bytes while it has memory."""
        return self.numel * self.dtype.itemsize


class Block:
    """Flat memory of one size and dtype. Made by a pool."""

    __slots__ = ("event", "home", "kind", "payload", "spec", "views")

    def __init__(self, kind: BlockKind, payload: Tensor, home: Any) -> None:
        self.kind = kind
        self.payload = payload  # 1D, spec.numel; behind it is no memory while a RESIZED block is not leased
        self.spec = BlockSpec(payload.numel(), payload.dtype)
        self.home = home
        """The stream that its memory was allocated on, and goes back to."""
        self.event: Any = None
        """What must have happened before the memory is written again."""
        self.views: tuple[object, list[Tensor]] | None = None
        """Views of the payload that its last tenant made, and what they were made from: for the next one."""

    @property
    def nbytes(self) -> int:
        """Its bytes while it has memory."""
        return self.spec.nbytes

    def __repr__(self) -> str:
        return f"Block({self.kind.value}, {self.spec.numel} x {self.spec.dtype})"


class PoolCounters(NamedTuple):
    """What a pool holds."""

    public_free: int
    public_leased: int
    private_free: int
    private_taken: int
    resized_leased: int
    cached_free: int
    """Those that cool down among them."""
    cached_leased: int
    held_bytes: int
    """Bytes of all blocks that have memory, leased or not."""
    leased_bytes: int
    """Bytes of the blocks that somebody has."""
    peak_held_bytes: int
    """The most that was held at once since the pool was made, or since `reset_peak`."""


class MemoryPool:
    """
    The blocks of one device.

    `limit_bytes` bounds what the pool holds; None: no bound. The `num_cooling` cached blocks that were released last
    are not given out where another one, or room for one, can be found (on devices with streams).
    """

    def __init__(self, device: torch.device | str, *, limit_bytes: int | None = None, num_cooling: int = 1) -> None:
        problems = []
        if limit_bytes is not None and limit_bytes < 0:
            problems.append(f"limit_bytes={limit_bytes}, but should be at least 0, or None")
        if num_cooling < 0:
            problems.append(f"num_cooling={num_cooling}, but should be at least 0")
        if problems:
            raise PoolError(problems, where="MemoryPool")
        # With its index, as tensors have it: "cuda" and "cuda:0" are not equal.
        self.device = torch.empty(0, device=device).device
        self.limit_bytes = limit_bytes
        self.streams = ChunkStreams(self.device)
        self._num_cooling = num_cooling
        self.public_spec: BlockSpec | None = None
        """Size and dtype of the public blocks; None before `allocate_public`."""
        self._public_free: deque[Block] = deque()
        self._private_free: dict[BlockSpec, list[Block]] = {}
        self._private_taken: list[Block] = []
        self._idle: dict[BlockSpec, deque[Block]] = {}
        self._cooling: deque[Block] = deque()
        self._leased: set[Block] = set()
        self._held_bytes = 0
        self._leased_bytes = 0
        self._peak_busy_bytes = 0
        self._peak_held_bytes = 0

    # --- what is there -----------------------------------------------------------------------------------------------

    def device_like(self, device: torch.device | None) -> torch.device:
        """The pool's device for None, or for one of its type; else the device given."""
        return self.device if device is None or device.type == self.device.type else device

    @property
    def counters(self) -> PoolCounters:
        """What the pool holds now."""
        leased = [block.kind for block in self._leased]
        return PoolCounters(
            public_free=len(self._public_free),
            public_leased=leased.count(BlockKind.PUBLIC),
            private_free=sum(map(len, self._private_free.values())),
            private_taken=len(self._private_taken),
            resized_leased=leased.count(BlockKind.RESIZED),
            cached_free=len(self._cached()),
            cached_leased=leased.count(BlockKind.CACHED),
            held_bytes=self._held_bytes,
            leased_bytes=self._leased_bytes,
            peak_held_bytes=self._peak_held_bytes,
        )

    def reset_peak(self) -> None:
        """Count peaks from what is held and leased now."""
        self._peak_held_bytes = self._held_bytes
        self._peak_busy_bytes = self._busy_bytes

    def has_room(self, nbytes: int, *, evict: Iterable[Block] | None = None) -> bool:
        """
        Whether that many bytes can be leased now, by letting go of `evict` (None: all cached blocks that are free).
        """
        if self.limit_bytes is None:
            return True
        evictable = sum(block.nbytes for block in (self._cached() if evict is None else evict))
        return self._held_bytes - evictable + nbytes <= self.limit_bytes

    def is_leased(self, block: Block) -> bool:
        """Whether somebody has `block` of this pool."""
        return block in self._leased

    # --- public and private blocks -----------------------------------------------------------------------------------

    def allocate_public(self, num_blocks: int, numel: int, dtype: torch.dtype) -> None:
        """
        Allocate the public blocks, once.

        Raises PoolError if it was done before, or for a size that is none; PoolExhausted over the limit.
        """
        problems = []
        if self.public_spec is not None:
            problems.append(
                "allocate_public is called again, but should be called once: it sets the size of all chunks"
            )
        if num_blocks < 0 or numel < 0:
            problems.append(f"num_blocks={num_blocks}, numel={numel}, but should be at least 0")
        if problems:
            raise PoolError(problems, where="MemoryPool.allocate_public")
        spec = BlockSpec(numel, dtype)
        blocks = self._allocate(BlockKind.PUBLIC, [spec] * num_blocks, where="MemoryPool.allocate_public")
        self.public_spec = spec
        self._public_free.extend(blocks)

    def allocate_private(self, specs: Iterable[BlockSpec | tuple[int, torch.dtype]]) -> None:
        """Allocate blocks that chunks will take for good: all of them, or none. Raises PoolExhausted over the limit."""
        wanted = [BlockSpec(*spec) for spec in specs]
        for block in self._allocate(BlockKind.PRIVATE, wanted, where="MemoryPool.allocate_private"):
            self._private_free.setdefault(block.spec, []).append(block)

    def lease_public(self) -> Block:
        """
        A public block: the one that has been free for longest.

        Raises PoolExhausted if none is free.
        """
        if not self._public_free:
            raise PoolExhausted(
                "public_free=0, but should be at least 1",
                where="MemoryPool.lease_public",
                hint=f"{self.counters.public_leased} blocks are leased: release a chunk, or allocate more",
            )
        block = self._public_free.popleft()
        self._hand_over(block)
        self._lend(block)
        return block

    def take_private(self, numel: int, dtype: torch.dtype) -> Block:
        """The private block of that size and dtype; it is the caller's for good. Raises PoolError if there is none."""
        spec = BlockSpec(numel, dtype)
        blocks = self._private_free.get(spec)
        if not blocks:
            there = sorted({f"{spec.numel} x {spec.dtype}" for spec, found in self._private_free.items() if found})
            raise PoolError(
                f"private block {numel} x {dtype}, but should be one of {there}", where="MemoryPool.take_private"
            )
        block = blocks.pop()
        self._hand_over(block)
        self._private_taken.append(block)
        self._leased_bytes += block.nbytes
        return block

    # --- resized and cached blocks -----------------------------------------------------------------------------------

    def reserve(self, numel: int, dtype: torch.dtype) -> Block:
        """A resized block without memory. Views of its payload may be made now; `lease` puts memory behind them."""
        payload = torch.empty(numel, dtype=dtype, device=self.device)
        payload.untyped_storage().resize_(0)
        return Block(BlockKind.RESIZED, payload, self.streams.current())

    def lease(self, block: Block) -> None:
        """
        Put memory, not initialised, behind a resized block, on the current stream.

        Raises PoolError for a block of another kind or one that has memory, PoolExhausted over the limit.
        """
        if block.kind is not BlockKind.RESIZED or block in self._leased:
            state = "leased" if block in self._leased else "free"
            raise PoolError(f"{block} is {state}, but should be resized and free", where="MemoryPool.lease")
        self._make_room(block.nbytes, where="MemoryPool.lease")
        block.payload.untyped_storage().resize_(block.nbytes)
        _advise_huge_pages(block.payload)
        block.home = self.streams.current()
        self._hold(block.nbytes)
        self._lend(block)

    def lease_cached(self, numel: int, dtype: torch.dtype) -> Block:
        """
        A block of that size with memory, not initialised. Its payload must not outlive the lease.

        Raises PoolExhausted over the limit.
        """
        spec = BlockSpec(numel, dtype)
        if self._idle.get(spec):
            block = self._idle[spec].popleft()
        elif self.has_room(spec.nbytes, evict=self._idle_blocks()):
            block = self._allocate(BlockKind.CACHED, [spec], where="MemoryPool.lease_cached")[0]
        else:
            cooling = next((block for block in self._cooling if block.spec == spec), None)
            if cooling is None:
                block = self._allocate(BlockKind.CACHED, [spec], where="MemoryPool.lease_cached")[0]
            else:
                block = cooling
                self._cooling.remove(block)
        self._hand_over(block)
        self._lend(block)
        return block

    def release(self, block: Block, *, after: Any = None) -> None:
        """
        Take a block back. Its memory is written again after the event `after`; None: after what the current stream
        was given so far.

        Raises PoolError for a private block, one of another pool, or one that is not leased.
        """
        if block not in self._leased:
            raise PoolError(f"{block} is not leased, but should be [and by this pool]", where="MemoryPool.release")
        event = self.streams.record() if after is None else after
        on_home = after is None and block.home == self.streams.current()
        self._leased.remove(block)
        self._leased_bytes -= block.nbytes
        block.event = event
        if block.kind is BlockKind.PUBLIC:
            self._public_free.append(block)
        elif block.kind is BlockKind.RESIZED:
            block.event = None if on_home else event
            self._let_go(block)
            block.payload.untyped_storage().resize_(0)
        elif event is None:
            self._idle.setdefault(block.spec, deque()).append(block)
        else:
            self._cool(block)

    def trim(self) -> None:
        """Let go of every cached block that is free."""
        for block in self._cached():
            self._evict(block)

    # --- inside ------------------------------------------------------------------------------------------------------

    def _allocate(self, kind: BlockKind, specs: list[BlockSpec], *, where: str) -> list[Block]:
        """Blocks with memory, not yet anybody's: all, or none and an exception."""
        nbytes = sum(spec.nbytes for spec in specs)
        self._make_room(nbytes, where=where)
        home = self.streams.current()
        blocks = [Block(kind, torch.empty(numel, dtype=dtype, device=self.device), home) for numel, dtype in specs]
        for block in blocks:
            _advise_huge_pages(block.payload)
            if kind is not BlockKind.CACHED:
                # The allocator may give memory that this stream still uses; another stream may be the first to write.
                block.event = self.streams.record()
        self._hold(nbytes)
        return blocks

    def _make_room(self, nbytes: int, *, where: str) -> None:
        """Evict free cached blocks until `nbytes` fit. Raises PoolExhausted, and evicts nothing, if they never will."""
        if not self.has_room(nbytes):
            raise PoolExhausted(
                f"{nbytes} bytes beside {self._leased_bytes} leased and {self._held_bytes} held, but should be at most "
                f"limit_bytes={self.limit_bytes} together",
                where=where,
                hint="Release a block first, or raise the limit",
            )
        # No more than was ever in use at once: keeping blocks must not raise the peak.
        bound = max(self._peak_busy_bytes, self._busy_bytes + nbytes)
        for block in self._idle_blocks():
            if self._held_bytes + nbytes > bound or not self.has_room(nbytes, evict=()):
                self._evict(block)
        for block in list(self._cooling):
            if not self.has_room(nbytes, evict=()):
                self._evict(block)

    def _idle_blocks(self) -> list[Block]:
        return [block for blocks in self._idle.values() for block in blocks]

    def _cached(self) -> list[Block]:
        """The cached blocks that are free, those that cool down last."""
        return [*self._idle_blocks(), *self._cooling]

    @property
    def _busy_bytes(self) -> int:
        return self._leased_bytes + sum(block.nbytes for block in self._cooling)

    def _cool(self, block: Block) -> None:
        self._cooling.append(block)
        while len(self._cooling) > self._num_cooling:
            cooled = self._cooling.popleft()
            self._idle.setdefault(cooled.spec, deque()).append(cooled)

    def _evict(self, block: Block) -> None:
        if block in self._cooling:
            self._cooling.remove(block)
        else:
            self._idle[block.spec].remove(block)
        self._let_go(block)

    def _let_go(self, block: Block) -> None:
        """Its memory goes back to the allocator, which gives it out again on its home stream: order that stream."""
        self.streams.order(block.home, block.event)
        block.event = None
        self._held_bytes -= block.nbytes

    def _hand_over(self, block: Block) -> None:
        self.streams.wait(block.event)
        block.event = None

    def _hold(self, nbytes: int) -> None:
        self._held_bytes += nbytes
        self._peak_held_bytes = max(self._peak_held_bytes, self._held_bytes)

    def _lend(self, block: Block) -> None:
        self._leased.add(block)
        self._leased_bytes += block.nbytes
        self._peak_busy_bytes = max(self._peak_busy_bytes, self._busy_bytes)


@functools.cache
def _madvise() -> Callable[[int, int], object] | None:
    """madvise(MADV_HUGEPAGE) of an aligned range, or None where the system has none."""
    advice = getattr(mmap, "MADV_HUGEPAGE", None)
    if not sys.platform.startswith("linux") or advice is None:
        return None
    function = ctypes.CDLL(None).madvise
    return lambda begin, nbytes: function(ctypes.c_void_p(begin), ctypes.c_size_t(nbytes), advice)


def _advise_huge_pages(tensor: Tensor) -> None:
    """
    Ask for huge pages behind a large tensor of the host.

    Memory of that size comes fresh from the system at every lease; 200 MB of it cost 100 ms in page faults of 4 KiB,
    and 18 ms in huge ones (measured, one core).
    """
    storage = tensor.untyped_storage()
    if storage.nbytes() < _MAPPED_BYTES or tensor.device.type != "cpu":
        return
    madvise = _madvise()
    if madvise is not None:
        begin = -(-storage.data_ptr() // mmap.PAGESIZE) * mmap.PAGESIZE
        end = (storage.data_ptr() + storage.nbytes()) // mmap.PAGESIZE * mmap.PAGESIZE
        madvise(begin, end - begin)
