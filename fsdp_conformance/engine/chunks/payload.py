"""
What a chunk is unsharded in: a block, leased for each gather or its own, or the shard itself in a group of one rank.

Holds the block, the gather that fills it, and views of the tensors in it; knows nothing of tensors or their states.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from fsdp_conformance.engine.chunks.gathering import Gathering, start_all_gather
from fsdp_conformance.engine.chunks.layout import ChunkLayout
from fsdp_conformance.engine.chunks.memory_pool import Block, BlockKind, MemoryPool
from fsdp_conformance.engine.errors import ChunkError


class ChunkPayload:
    """
    The unsharded side of one chunk, in `dtype`.

    `aliases`: the shard serves as it is, and there is no block. `ahead`: waiting for a work of `group` does not hold
    the host, so the gather stream can be ordered after it at once.
    """

    def __init__(
        self,
        pool: MemoryPool,
        layout: ChunkLayout,
        group: ProcessGroup,
        dtype: torch.dtype,
        kind: BlockKind,
        *,
        aliases: bool,
        ahead: bool,
    ) -> None:
        self.pool = pool
        self.dtype = dtype
        self.kind = kind
        self.aliases = aliases
        self.block: Block | None = None
        """The block with the data; beside those that are leased each time, it is there while it has no memory too."""
        self.gathering: Gathering | None = None
        """The gather that filled it; None while the chunk is sharded."""
        self._layout = layout
        self._group = group
        self._ahead = ahead
        self._views: dict[Block | None, list[Tensor]] = {}
        if not aliases and kind is BlockKind.RESIZED:
            self.block = pool.reserve(layout.numel, dtype)
        elif not aliases and kind is BlockKind.PRIVATE:
            self.block = pool.take_private(layout.numel, dtype)

    def fill_buffer(self, dtype: torch.dtype) -> Tensor:
        """Memory to put the whole chunk together in, in its own dtype: a private block, where it can be that."""
        if self.kind is BlockKind.PRIVATE and self.block is not None and self.dtype is dtype:
            self.pool.streams.wait(self.block.event)
            return self.block.payload
        return torch.empty(self._layout.numel, dtype=dtype, device=self.pool.device)

    def start(
        self,
        shard: Tensor,
        on_arrival: Callable[[Gathering], None],
        *,
        after: Any,
        group: ProcessGroup | None = None,
    ) -> Gathering:
        """
        Lease a block and begin to gather `shard` into it, on the gather stream, after the event `after`.

        What the host has written is there already. `group`: another one than the chunk's, whose ranks have larger
        parts. An exception leaves everything as it was.
        """
        streams = self.pool.streams
        if self.aliases:
            self.gathering = Gathering(None, streams, on_arrival)
            return self.gathering
        if shard.device == self.pool.device:
            streams.order(streams.gather, streams.record() if after is None else after)
        with streams.on(streams.gather):
            block = self._lease()
            try:
                work = start_all_gather(block.payload, shard, self._layout, group or self._group)
                gathering = Gathering(work, streams, on_arrival)
                if work is not None and self._ahead:
                    gathering.complete()
                else:
                    gathering.mark()
            except BaseException:
                self.give_back(block, None)
                raise
        self.block, self.gathering = block, gathering
        return gathering

    def flat(self, shard: Tensor) -> Tensor:
        """The whole chunk: 1D. `shard` is returned where it serves as it is."""
        return shard if self.block is None else self.block.payload

    def views(self, shard: Tensor) -> list[Tensor]:
        """The tensors in their shapes. Made once for each block: a resized one keeps its storage object."""
        if self.block not in self._views:
            # `.data` has a version counter of its own: gathering again is no modification of what autograd has saved,
            # and writing to one tensor is none of its neighbours.
            self._views[self.block] = [view.data for view in self._layout.views(self.flat(shard))]
        return self._views[self.block]

    def unleased_views(self, shard: Tensor) -> list[Tensor]:
        """`views` of a resized block that may have no memory now: they are read when it has some."""
        if self.block is not None and self.block not in self._views and not self.pool.is_leased(self.block):
            # A view is made of memory that is there; none of it is touched.
            storage = self.block.payload.untyped_storage()
            storage.resize_(self.block.nbytes)
            views = self.views(shard)
            storage.resize_(0)
            return views
        return self.views(shard)

    def forget(self) -> Block | None:
        """Have no data any more. Returns the block to give back; None if there is none."""
        block, self.gathering = self.block, None
        if self.kind is BlockKind.PUBLIC:
            self.block = None
        return block

    def give_back(self, block: Block, after: Any) -> None:
        """
        Let the block be written again after the event `after`; None: after what the current stream has been given.
        """
        if self.kind is BlockKind.PRIVATE:
            block.event = self.pool.streams.record() if after is None else after
        else:
            self.pool.release(block, after=after)

    def _lease(self) -> Block:
        """A block with memory, for the current stream."""
        if self.kind is BlockKind.PUBLIC:
            block = self.pool.lease_public()
            if block.spec != (self._layout.numel, self.dtype):
                self.pool.release(block)
                raise ChunkError(f"{block!r}, but should be of {self._layout.numel} x {self.dtype}", where="access")
            return block
        assert self.block is not None, "resized and private blocks are the chunk's own"
        if self.kind is BlockKind.PRIVATE:
            self.pool.streams.wait(self.block.event)
        else:
            self.pool.lease(self.block)
        return self.block


def bytes_by_device(tensors: Iterable[Tensor]) -> dict[str, int]:
    """Bytes of the storages behind `tensors`, by type of device; a storage that several of them share counts once."""
    storages = {}
    for tensor in tensors:
        storage = tensor.untyped_storage()
        storages[storage.data_ptr()] = (tensor.device.type, storage.nbytes())
    usage: dict[str, int] = {}
    for device_type, nbytes in storages.values():
        if nbytes:
            usage[device_type] = usage.get(device_type, 0) + nbytes
    return usage
