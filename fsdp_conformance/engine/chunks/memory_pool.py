"""
The memory that storages are unsharded into and gradients are collected in: blocks, leased within a limit.

A block is flat memory of one size and dtype. Its kind decides who may lease it, and when it has memory:

    PUBLIC    any chunk of its size, in turn; has memory from `allocate_public` on
    PRIVATE   one chunk, which takes it permanently; has memory from `allocate_private` on
    RESIZED   one storage; has memory only while leased, always behind the same torch storage object
    CACHED    any lease of its size; has memory from the first lease until `trim`, or until the pool needs the room

Units are unsharded into RESIZED blocks. Autograd saves views of parameters (a transposed weight, for example) that
share the parameter's torch storage, so the values gathered again for the backward must appear behind the same storage
object as in the forward. CACHED blocks are for gradients, to which nothing refers after the lease.

The limit counts the bytes that the pool holds, which makes the pool the rate limiter: a lease beyond it raises a typed
error and changes nothing. Without a limit the pool holds no more than was leased at once, apart from what streams may
still use: a free cached block is evicted before a new one is allocated.

Streams: `release` records an event, and the next tenant of the memory waits for it on its stream, not on the host. A
cached block that a reduction may still be reading cools down: it is not leased again before another one has been
released, so that the next unit's gradients do not wait for this unit's reduction. A resized block that is released in
`lingering()` keeps its memory until `settle`: until the next gather has begun, which therefore does not wait for the
computation that has just used this one. A pool belongs to one thread at a time.
"""

from __future__ import annotations

import ctypes
import functools
import mmap
import sys
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from enum import Enum
from typing import NamedTuple

import torch
from torch import Tensor

from fsdp_conformance.engine.communication import ChunkStreams
from fsdp_conformance.engine.errors import PoolError, PoolExhausted

#: glibc maps blocks of at least this size and unmaps them when they are freed (its DEFAULT_MMAP_THRESHOLD_MAX).
_MAPPED_BYTES = 32 * 2**20


class BlockKind(Enum):
    """Who may lease a block, and when it has memory. See the module's docstring."""

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
        """Its size in bytes while it has memory."""
        return self.numel * self.dtype.itemsize


class Block:
    """Flat memory of one size and dtype. Made by a pool."""

    __slots__ = ("event", "home", "kind", "payload", "spec", "views")

    def __init__(self, kind: BlockKind, payload: Tensor, home: torch.Stream | None) -> None:
        self.kind = kind
        self.payload = payload  # 1D, spec.numel; a RESIZED block that is not leased has no memory behind it
        self.spec = BlockSpec(payload.numel(), payload.dtype)
        self.home = home
        """The stream that its memory was allocated on, and returns to."""
        self.event: torch.Event | None = None
        """The memory may be overwritten once this has happened; None: at once."""
        self.views: tuple[object, list[Tensor]] | None = None
        """Views of the payload made by its last tenant, for the next one, and what they were made from."""

    @property
    def nbytes(self) -> int:
        """Its size in bytes while it has memory."""
        return self.spec.nbytes

    def __repr__(self) -> str:
        return f"Block({self.kind.value}, {self.spec.numel} x {self.spec.dtype})"


class PoolCounters(NamedTuple):
    """The blocks and bytes that a pool holds."""

    public_free: int
    public_leased: int
    private_free: int
    private_taken: int
    resized_leased: int
    cached_free: int
    """Includes those that are cooling down."""
    cached_leased: int
    held_bytes: int
    """Bytes of all blocks that have memory, leased or not."""
    leased_bytes: int
    """Bytes of all leased blocks."""
    peak_held_bytes: int
    """The most that was held at once since the pool was made, or since `reset_peak`."""


class MemoryPool:
    """
    The blocks of one device.

    `limit_bytes` bounds what the pool holds; None: no bound. On devices with streams, the `num_cooling` cached blocks
    that were released last are not leased again while another one, or room for one, can be found.
    """

    def __init__(self, device: torch.device | str, *, limit_bytes: int | None = None, num_cooling: int = 1) -> None:
        problems = []
        if limit_bytes is not None and limit_bytes < 0:
            problems.append(f"limit_bytes must be at least 0 or None, got {limit_bytes}")
        if num_cooling < 0:
            problems.append(f"num_cooling must be at least 0, got {num_cooling}")
        if problems:
            raise PoolError(problems, where="MemoryPool")
        # With its index, as on tensors: "cuda" and "cuda:0" do not compare equal.
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
        self._lingers = False
        self._lingering: list[Block] = []
        self._leased: set[Block] = set()
        self._held_bytes = 0
        self._leased_bytes = 0
        self._peak_busy_bytes = 0
        self._peak_held_bytes = 0

    # --- inspection -------------------------------------------------------------------------------------------------

    def device_like(self, device: torch.device | None) -> torch.device:
        """The pool's device for None or a device of its type; otherwise the given device."""
        return self.device if device is None or device.type == self.device.type else device

    @property
    def counters(self) -> PoolCounters:
        """The blocks and bytes held now."""
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
        """Restart peak counting from what is held and leased now."""
        self._peak_held_bytes = self._held_bytes
        self._peak_busy_bytes = self._busy_bytes

    def has_room(self, nbytes: int, *, evict: Iterable[Block] | None = None) -> bool:
        """True if that many bytes can be leased now by evicting `evict` (None: all that are free)."""
        if self.limit_bytes is None:
            return True
        evictable = sum(block.nbytes for block in (self._cached() + self._lingering if evict is None else evict))
        return self._held_bytes - evictable + nbytes <= self.limit_bytes

    def is_leased(self, block: Block) -> bool:
        """True if `block` is leased from this pool."""
        return block in self._leased

    # --- public and private blocks -----------------------------------------------------------------------------------

    def allocate_public(self, num_blocks: int, numel: int, dtype: torch.dtype) -> None:
        """
        Allocate the public blocks, once.

        Raises PoolError if they exist already or for a negative size; PoolExhausted over the limit.
        """
        problems = []
        if self.public_spec is not None:
            problems.append("public blocks are already allocated: their size is that of all chunks")
        if num_blocks < 0 or numel < 0:
            problems.append(f"num_blocks and numel must be at least 0, got {num_blocks} and {numel}")
        if problems:
            raise PoolError(problems, where="MemoryPool.allocate_public")
        spec = BlockSpec(numel, dtype)
        blocks = self._allocate(BlockKind.PUBLIC, [spec] * num_blocks, where="MemoryPool.allocate_public")
        self.public_spec = spec
        self._public_free.extend(blocks)

    def allocate_private(self, specs: Iterable[BlockSpec | tuple[int, torch.dtype]]) -> None:
        """Allocate blocks for chunks to take permanently: all or none. Raises PoolExhausted over the limit."""
        block_specs = [BlockSpec(*spec) for spec in specs]
        for block in self._allocate(BlockKind.PRIVATE, block_specs, where="MemoryPool.allocate_private"):
            self._private_free.setdefault(block.spec, []).append(block)

    def lease_public(self) -> Block:
        """
        The public block that has been free longest.

        Raises PoolExhausted if none is free.
        """
        if not self._public_free:
            raise PoolExhausted(
                f"no public block is free: {self.counters.public_leased} are leased",
                where="MemoryPool.lease_public",
                hint="Release a chunk, or allocate more blocks",
            )
        block = self._public_free.popleft()
        self._hand_over(block)
        self._lend(block)
        return block

    def take_private(self, numel: int, dtype: torch.dtype) -> Block:
        """A private block of that size and dtype, for the caller to keep. Raises PoolError if there is none."""
        spec = BlockSpec(numel, dtype)
        blocks = self._private_free.get(spec)
        if not blocks:
            free = sorted(
                {f"{spec.numel} x {spec.dtype}" for spec, free_blocks in self._private_free.items() if free_blocks}
            )
            raise PoolError(
                f"no private block of {numel} x {dtype} is free, only {free}", where="MemoryPool.take_private"
            )
        block = blocks.pop()
        self._hand_over(block)
        self._private_taken.append(block)
        self._leased_bytes += block.nbytes
        return block

    # --- resized and cached blocks -----------------------------------------------------------------------------------

    def reserve(self, numel: int, dtype: torch.dtype) -> Block:
        """A resized block without memory. Its payload may be viewed right away; `lease` puts memory behind it."""
        payload = torch.empty(numel, dtype=dtype, device=self.device)
        payload.untyped_storage().resize_(0)
        return Block(BlockKind.RESIZED, payload, self.streams.current())

    def lease(self, block: Block) -> None:
        """
        Put uninitialised memory behind a resized block, on the current stream.

        Raises PoolError for a block of another kind or one that is leased, PoolExhausted over the limit.
        """
        if block.kind is not BlockKind.RESIZED or block in self._leased:
            state = "leased" if block in self._leased else "free"
            raise PoolError(f"expected a free resized block, got {block}, {state}", where="MemoryPool.lease")
        if block in self._lingering:
            self._lingering.remove(block)
            self._hand_over(block)
            self._lend(block)
            return
        self._make_room(block.nbytes, where="MemoryPool.lease", evicts_used=False)
        block.payload.untyped_storage().resize_(block.nbytes)
        _advise_huge_pages(block.payload)
        block.home = self.streams.current()
        self._hold(block.nbytes)
        self._lend(block)

    def lease_cached(self, numel: int, dtype: torch.dtype) -> Block:
        """
        A block of that size with uninitialised memory. Its payload must not outlive the lease.

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

    def release(self, block: Block, *, after: torch.Event | None = None) -> None:
        """
        Take a block back. Its memory may be overwritten after the event `after`; None: after all work that the current
        stream has been given so far.

        Raises PoolError for a private block, one of another pool, or one that is not leased.
        """
        if block not in self._leased:
            raise PoolError(f"cannot release {block}: it is not leased from this pool", where="MemoryPool.release")
        event = self.streams.record() if after is None else after
        on_home = after is None and block.home == self.streams.current()
        self._leased.remove(block)
        self._leased_bytes -= block.nbytes
        block.event = event
        if block.kind is BlockKind.PUBLIC:
            self._public_free.append(block)
        elif block.kind is BlockKind.RESIZED:
            block.event = None if on_home else event
            if self._lingers and block.event is not None:
                self._lingering.append(block)
            else:
                self._empty(block)
        elif event is None:
            self._idle.setdefault(block.spec, deque()).append(block)
        else:
            self._cool(block)

    @contextmanager
    def lingering(self) -> Iterator[None]:
        """A context in which resized blocks that are released keep their memory until `settle`."""
        before, self._lingers = self._lingers, True
        try:
            yield
        finally:
            self._lingers = before

    def settle(self) -> None:
        """Free the blocks that linger. What their home streams are given from now on waits for their last use."""
        while self._lingering:
            self._empty(self._lingering.pop())

    def trim(self) -> None:
        """Free every block that is not leased."""
        self.settle()
        for block in self._cached():
            self._evict(block)

    # --- inside ------------------------------------------------------------------------------------------------------

    def _allocate(self, kind: BlockKind, specs: list[BlockSpec], *, where: str) -> list[Block]:
        """Blocks with memory that are not leased yet. Raises without allocating any if they do not all fit."""
        nbytes = sum(spec.nbytes for spec in specs)
        self._make_room(nbytes, where=where)
        home = self.streams.current()
        blocks = [Block(kind, torch.empty(numel, dtype=dtype, device=self.device), home) for numel, dtype in specs]
        for block in blocks:
            _advise_huge_pages(block.payload)
            if kind is not BlockKind.CACHED:
                # This stream may still use the memory, and another stream may be the first to write it.
                block.event = self.streams.record()
        self._hold(nbytes)
        return blocks

    def _make_room(self, nbytes: int, *, where: str, evicts_used: bool = True) -> None:
        """
        Evict free cached blocks until `nbytes` fit. Raises PoolExhausted, evicting none, if they never will.

        Evicting a block makes its home stream wait for its last use. Without `evicts_used`, blocks that may still be
        used stay while the limit allows it: otherwise a gather that runs beside computation would make the computing
        stream wait for a reduction.
        """
        if not self.has_room(nbytes):
            raise PoolExhausted(
                f"{nbytes} bytes exceed limit_bytes={self.limit_bytes}: {self._held_bytes} are held, of which "
                f"{self._leased_bytes} are leased",
                where=where,
                hint="Release a block first, or raise the limit",
            )
        if not self.has_room(nbytes, evict=self._cached()):
            self.settle()
        # Hold no more than was ever in use at once: caching must not raise the peak.
        bound = max(self._peak_busy_bytes, self._busy_bytes + nbytes)
        for block in self._idle_blocks():
            exceeds = self._held_bytes + nbytes > bound and (evicts_used or block.event is None)
            if exceeds or not self.has_room(nbytes, evict=()):
                self._evict(block)
        for block in list(self._cooling):
            if not self.has_room(nbytes, evict=()):
                self._evict(block)

    def _idle_blocks(self) -> list[Block]:
        return [block for blocks in self._idle.values() for block in blocks]

    def _cached(self) -> list[Block]:
        """The free cached blocks; those that are cooling down come last."""
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

    def _empty(self, block: Block) -> None:
        self._let_go(block)
        block.payload.untyped_storage().resize_(0)

    def _let_go(self, block: Block) -> None:
        """Order the home stream, on which the allocator will reuse the memory, after its last use."""
        self.streams.order(block.home, block.event)
        block.event = None
        self._held_bytes -= block.nbytes

    def _hand_over(self, block: Block) -> None:
        """Order the current stream, on which the next tenant writes, after the last use of the memory."""
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
    Ask for huge pages behind a large tensor in host memory.

    Memory of that size is mapped afresh for every lease; 200 MB of it cost 100 ms in page faults of 4 KiB, and 18 ms
    with huge pages (measured on one core).
    """
    storage = tensor.untyped_storage()
    if storage.nbytes() < _MAPPED_BYTES or tensor.device.type != "cpu":
        return
    madvise = _madvise()
    if madvise is not None:
        begin = -(-storage.data_ptr() // mmap.PAGESIZE) * mmap.PAGESIZE
        end = (storage.data_ptr() + storage.nbytes()) // mmap.PAGESIZE * mmap.PAGESIZE
        madvise(begin, end - begin)
