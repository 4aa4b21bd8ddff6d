"""An all-gather in flight: a shard on its way into the block that its chunk is unsharded in."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.distributed import ProcessGroup, Work

from fsdp_conformance.engine.chunks.layout import ChunkLayout
from fsdp_conformance.engine.chunks.streams import ChunkStreams
from fsdp_conformance.engine.flat_collectives import all_gather


@torch.no_grad()
def start_all_gather(payload: Tensor, shard: Tensor, layout: ChunkLayout, group: ProcessGroup) -> Work | None:
    """
    Fill `payload` from every rank's shard, on the current stream. None: there is nothing to wait for but that stream.

    payload: 1D, layout.numel; shard: 1D, layout.shard_numel. A shard of another dtype or device is copied into its
    place in the payload and gathered from there, so that no other memory is needed.
    """
    if layout.world_size == 1:
        payload.copy_(shard, non_blocking=True)
        return None
    if shard.dtype is not payload.dtype or shard.device != payload.device:
        shard = layout.own_slice(payload).copy_(shard, non_blocking=True)
    return all_gather(payload, shard, group)


class Gathering:
    """
    The handle of an all-gather.

    After `wait` the chunk is unsharded, for the current stream. A handle that nobody waits for does no harm: releasing
    the chunk orders the block after the gather all the same.
    """

    def __init__(self, work: Work | None, streams: ChunkStreams, on_arrival: Callable[[Gathering], None]) -> None:
        self._work = work
        self._streams = streams
        self._on_arrival = on_arrival
        self._error: BaseException | None = None
        self.event: Any = None
        """The end of what the gather has enqueued so far; None without streams."""

    def wait(self) -> None:
        """
        Order the current stream after the gather, and let the chunk know that its data are there.

        Nothing more happens if the chunk was released meanwhile, or on a second call. A gather that failed raises each
        time; its chunk can be released.
        """
        event = self.complete()
        if self._error is not None:
            raise self._error
        self._streams.wait(event)
        self._on_arrival(self)

    def complete(self) -> Any:
        """The event of the gather's end; None without streams: then it has ended. Raises once what its work raises."""
        work, self._work = self._work, None
        if work is not None:
            with self._streams.on(self._streams.gather):
                try:
                    work.wait()
                except BaseException as error:
                    self._error = error
                    raise
                self.event = self._streams.record()
        return self.event

    def mark(self) -> None:
        """All that the gather enqueues on the current stream, but for what follows its work, has been enqueued."""
        self.event = self._streams.record()
