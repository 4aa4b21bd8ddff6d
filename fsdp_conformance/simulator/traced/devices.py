"""Where a program is on CUDA, and what the hooks do not say: queries, and the lines that make streams."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch

from fsdp_conformance.simulator.replacements import Replacements
from fsdp_conformance.simulator.traced.trace import Trace

__all__ = ["CudaDevice", "follow_objects", "handle_on_cuda"]


class CudaDevice:
    """CUDA, as torch sees it in this thread."""

    type = "cuda"

    def current(self) -> int:
        """The index of the current device."""
        return torch.cuda.current_device()

    def stream(self, index: int) -> int:
        """The number of a device's current stream."""
        return int(torch._C._cuda_getCurrentRawStream(index))


def handle_on_cuda(stream: torch.Stream) -> int:
    """The number by which the hooks know a stream."""
    known = torch.cuda.Stream(  # type: ignore[no-untyped-call]
        stream_id=stream.stream_id, device_index=stream.device_index, device_type=stream.device_type
    )
    return int(known.cuda_stream)


def follow_objects(
    trace: Trace,
    replaced: Replacements,
    *,
    stream_type: Any,
    event_type: Any,
    stream_number: Callable[[Any], int],
    event_number: Callable[[Any], int],
) -> None:
    """Tell `trace` which lines make streams, and which queries were answered with yes: hooks do not report these."""
    make, query_stream, query_event = stream_type.__new__, stream_type.query, event_type.query

    def new(cls: Any, *args: Any, **kwargs: Any) -> Any:
        stream = make(cls, *args, **kwargs)
        if "stream_id" not in kwargs:  # else it is one that exists
            with torch.get_device_module(stream.device.type).device(stream.device):
                trace.stream_made(stream_number(stream))
        return stream

    @functools.wraps(query_stream)
    def is_stream_done(stream: Any) -> bool:
        is_done = bool(query_stream(stream))
        if is_done:
            with torch.get_device_module(stream.device.type).device(stream.device):
                trace.stream_synchronized(stream_number(stream))
        return is_done

    @functools.wraps(query_event)
    def is_event_done(event: Any) -> bool:
        is_done = bool(query_event(event))
        if is_done:
            trace.event_synchronized(event_number(event))
        return is_done

    replaced.set(stream_type, __new__=staticmethod(new), query=is_stream_done)
    replaced.set(event_type, query=is_event_done)
