"""
How the engine communicates: collectives of flat tensors, and the order between the streams that they run on.

torch 2.13 renamed `all_gather_into_tensor` and `reduce_scatter_tensor`. This is the only place that looks them up.

The CPU has no streams. There, `Streams` does nothing, at the price of one comparison: events are None, and the host
waits for the works of collectives.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager, nullcontext
from types import ModuleType
from typing import cast

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup, Work

from fsdp_conformance.engine.errors import EngineError

#: Backends whose Work.wait() blocks the host, so that nothing can be enqueued ahead of their collectives.
_HOST_ORDERED_BACKENDS = frozenset({"gloo", "mpi", "ucc"})

# --- collectives ------------------------------------------------------------------------------------------------------

_all_gather: Callable[..., object] = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
_reduce_scatter: Callable[..., object] = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor


def all_gather(output: Tensor, shard: Tensor, group: ProcessGroup) -> Work:
    """
    Start gathering every rank's `shard` into `output`, in group order.

    output: 1D, contiguous, group size x shard.numel(); `shard` may be this rank's own slice of it.
    """
    return cast(Work, _all_gather(output, shard, group=group, async_op=True))


def reduce_scatter(shard: Tensor, inputs: Tensor, group: ProcessGroup) -> Work:
    """
    Start summing `inputs` over the ranks, each keeping its own slice in `shard`.

    inputs: 1D, contiguous, group size x shard.numel(); `shard` may be this rank's own slice of it.
    """
    return cast(Work, _reduce_scatter(shard, inputs, group=group, async_op=True))


def broadcast(tensor: Tensor, source: int, group: ProcessGroup) -> Work:
    """Start overwriting `tensor` (1D, contiguous) with that of group rank `source`."""
    return cast(Work, dist.broadcast(tensor, dist.get_global_rank(group, source), group=group, async_op=True))


def scatter(output: Tensor, parts: Sequence[Tensor], source: int, group: ProcessGroup) -> Work:
    """Start filling `output` (1D, contiguous) with this rank's entry of the parts of group rank `source`."""
    scatter_list = list(parts) or None  # only the source has any
    rank = dist.get_global_rank(group, source)
    return cast(Work, dist.scatter(output, scatter_list, src=rank, group=group, async_op=True))


def all_to_all(
    output: Tensor, output_sizes: Sequence[int], inputs: Tensor, input_sizes: Sequence[int], group: ProcessGroup
) -> Work:
    """
    Start sending part i of `inputs` to group rank i, and receiving part i of `output` from it.

    output, inputs: 1D, contiguous, in one part for each rank, of these sizes, which may be 0.
    """
    work = dist.all_to_all_single(output, inputs, list(output_sizes), list(input_sizes), group=group, async_op=True)
    return cast(Work, work)


def all_reduce(tensor: Tensor, group: ProcessGroup) -> Work:
    """Start summing `tensor` over the ranks, in place."""
    return cast(Work, dist.all_reduce(tensor, group=group, async_op=True))


def all_reduce_max(tensor: Tensor, group: ProcessGroup) -> Work:
    """Start taking the maximum of `tensor` over the ranks, in place."""
    return cast(Work, dist.all_reduce(tensor, op=dist.ReduceOp.MAX, group=group, async_op=True))


def resolve_group(group: ProcessGroup | None) -> ProcessGroup:
    """
    The group itself, or the default one for None.

    Raises EngineError if this rank is not in it, or if there is no default group yet.
    """
    resolved: object = group if group is not None else dist.group.WORLD
    if resolved is None:
        raise EngineError(
            "process_group must be given if torch.distributed is not initialised, got None", where="engine"
        )
    # `new_group` returns a placeholder on ranks outside the group.
    if not isinstance(resolved, ProcessGroup) or dist.get_rank(resolved) < 0:
        raise EngineError(f"process_group must contain this rank, got {resolved!r}", where="engine")
    return resolved


# --- streams ----------------------------------------------------------------------------------------------------------


class Streams:
    """The current stream of a device, and its order relative to others."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._module: ModuleType | None = (
            None if device.type in ("cpu", "meta") else torch.get_device_module(device.type)
        )
        self.exist = self._module is not None
        """True if the device has streams."""

    def current(self) -> torch.Stream | None:
        """The current stream of the device; None if it has no streams."""
        return None if self._module is None else self._module.current_stream(self.device)

    def follow(self, others: Iterable[torch.Stream | None]) -> None:
        """Make later work on the current stream run after all work issued on `others` so far."""
        current = self.current()
        if current is None:
            return
        for stream in others:
            if stream is not None and stream != current:
                current.wait_stream(stream)

    def keep(self, tensor: Tensor, allocated_on: torch.Stream | None = None) -> None:
        """
        Keep the memory of `tensor`, once freed, from being reused before the current stream is done with it.

        The allocator by itself only considers the stream that allocated it. That one needs no keeping, if it is known.
        """
        current = self.current()
        # torch.Stream answers False to both `== None` and `!= None` (2.13).
        if current is not None and (allocated_on is None or current != allocated_on):
            tensor.record_stream(current)


class ChunkStreams(Streams):
    """
    The two streams besides the current one on which storages communicate, and the events that order them.

    Gathers and reductions have a stream each, so that a prefetched all-gather does not queue behind the reduce-scatter
    of the previous unit. Both are None if the device has no streams.
    """

    @functools.cached_property
    def gather(self) -> torch.Stream | None:
        """The stream that all-gathers are issued on."""
        return self._new_stream()

    @functools.cached_property
    def reduce(self) -> torch.Stream | None:
        """The stream that reduce-scatters, and the steps after them, are issued on."""
        return self._new_stream()

    def on(self, stream: torch.Stream | None) -> AbstractContextManager[object]:
        """A context in which `stream` is current; for None it changes nothing."""
        return nullcontext() if stream is None or self._module is None else self._module.stream(stream)

    def record(self) -> torch.Event | None:
        """An event at the current end of the current stream; None without streams."""
        current = self.current()
        return None if current is None else current.record_event()

    def wait(self, event: torch.Event | None) -> None:
        """Let work issued on the current stream from now on run after `event`. The host does not wait."""
        if event is not None:
            self.order(self.current(), event)

    def order(self, later: torch.Stream | None, event: torch.Event | None) -> None:
        """Let work issued on the stream `later` from now on run after `event`."""
        if event is not None and later is not None:
            later.wait_event(event)

    def hold_host(self, event: torch.Event | None) -> None:
        """Block the host until `event` has happened, for host memory that a stream reads or writes."""
        if event is not None:
            event.synchronize()

    def orders(self, group: ProcessGroup) -> bool:
        """True if waiting for a work of `group` orders streams without blocking the host."""
        return self.exist and dist.get_backend(group) not in _HOST_ORDERED_BACKENDS

    def _new_stream(self) -> torch.Stream | None:
        # High priority, as in FSDP2: a collective that is ready should not wait for kernels enqueued earlier.
        return None if self._module is None else self._module.Stream(device=self.device, priority=-1)
