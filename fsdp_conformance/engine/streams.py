"""
The order between the streams of one device.

The CPU has no streams: there, everything in this module does nothing, at the price of one comparison. Events are None
there, and works are waited for on the host.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup

#: Backends whose Work.wait() blocks the host, so that nothing can be enqueued ahead of their collectives.
_HOST_ORDERED_BACKENDS = frozenset({"gloo", "mpi", "ucc"})


class Streams:
    """The current stream of a device, and its order relative to others."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._module: Any = None if device.type in ("cpu", "meta") else torch.get_device_module(device.type)
        self.exist = self._module is not None
        """Whether the device has streams."""

    def current(self) -> Any:
        """The current stream of the device; None if it has no streams."""
        return None if self._module is None else self._module.current_stream(self.device)

    def follow(self, others: Iterable[Any]) -> None:
        """Make later work on the current stream run after all work issued on `others` so far."""
        if self._module is None:
            return
        current = self.current()
        for stream in others:
            if stream is not None and stream != current:
                current.wait_stream(stream)

    def keep(self, tensor: Tensor, allocated_on: Any = None) -> None:
        """
        Keep the memory of `tensor`, once freed, from being reused before the current stream is done with it.

        The allocator by itself only considers the stream that allocated it. That one needs no keeping, if it is known.
        """
        if self._module is not None:
            current = self.current()
            # torch.Stream answers False to both `== None` and `!= None` (2.13).
            if allocated_on is None or current != allocated_on:
                tensor.record_stream(current)


class ChunkStreams(Streams):
    """
    The two streams besides the current one on which storages communicate, and the events that order them.

    Gathers and reductions have a stream each, so that a prefetched all-gather does not queue behind the reduce-scatter
    of the previous unit. Both are None if the device has no streams.
    """

    @functools.cached_property
    def gather(self) -> Any:
        """Where all-gathers are issued."""
        return self._new_stream()

    @functools.cached_property
    def reduce(self) -> Any:
        """Where reduce-scatters, and the steps after them, are issued."""
        return self._new_stream()

    def on(self, stream: Any) -> AbstractContextManager[Any]:
        """A context in which `stream` is current; for None it changes nothing."""
        return nullcontext() if stream is None else self._module.stream(stream)

    def record(self) -> Any:
        """An event at the current end of the current stream; None without streams."""
        return None if self._module is None else self.current().record_event()

    def wait(self, event: Any) -> None:
        """Let work issued on the current stream from now on run after `event`. The host does not wait."""
        if event is not None:
            self.current().wait_event(event)

    def order(self, later: Any, event: Any) -> None:
        """Let work issued on the stream `later` from now on run after `event`."""
        if event is not None:
            later.wait_event(event)

    def hold_host(self, event: Any) -> None:
        """Block the host until `event` has happened, for host memory that a stream reads or writes."""
        if event is not None:
            event.synchronize()

    def orders(self, group: ProcessGroup) -> bool:
        """Whether waiting for a work of `group` orders streams without blocking the host."""
        return self.exist and dist.get_backend(group) not in _HOST_ORDERED_BACKENDS

    def _new_stream(self) -> Any:
        # High priority, as in FSDP2: a collective that is ready should not wait for kernels enqueued earlier.
        return None if self._module is None else self._module.Stream(device=self.device, priority=-1)
