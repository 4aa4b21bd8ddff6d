"""Streams and events of the simulated accelerator, as `torch.cuda` has them."""

from __future__ import annotations

from types import TracebackType
from typing import Any, Self

import torch

from fsdp_conformance.config import SIMULATED
from fsdp_conformance.simulator import build
from fsdp_conformance.simulator.device import current_device, index_of

__all__ = [
    "Event",
    "Stream",
    "StreamContext",
    "current_stream",
    "default_stream",
    "set_stream",
    "stream",
    "synchronize",
]


class Stream(torch.Stream):
    """
    A stream of a device. Operations that are put on it follow one another; nothing orders them with other streams' but
    waits.

    From a pool of 32 per device and priority, as on CUDA: the 33rd is the first again.
    """

    def __new__(cls, device: Any = None, priority: int = 0, **kwargs: Any) -> Self:
        if "stream_id" in kwargs:
            return super().__new__(cls, priority=priority, **kwargs)
        return super().__new__(cls, device=torch.device(SIMULATED, index_of(device)), priority=priority)

    @property
    def priority(self) -> int:
        """-1 for a stream of high priority, else 0. Nothing runs earlier for it."""
        return int(build.load().priority_of(self.stream_id))

    def wait_event(self, event: torch.Event) -> None:
        """What is put on this stream from now on comes after what the event has recorded."""
        super().wait_event(event)

    def wait_stream(self, stream: torch.Stream) -> None:
        """What is put on this stream from now on comes after what has been put on the other one."""
        super().wait_stream(stream)

    def record_event(self, event: torch.Event | None = None) -> torch.Event:
        """Record what has been put on this stream, in the event given or in a new one."""
        if event is None:
            event = Event()
        event.record(self)
        return event

    def __repr__(self) -> str:
        return f"<torch.sim.Stream device={self.device} id={self.stream_id}>"


class Event(torch.Event):
    """What a stream has been given until the event was recorded."""

    def __new__(cls, enable_timing: bool = False, blocking: bool = False, interprocess: bool = False) -> Self:
        if interprocess:
            raise NotImplementedError("interprocess=True, but should be False: memory of sim is not shared")
        return super().__new__(cls, device=torch.device(SIMULATED, current_device()), enable_timing=enable_timing)

    def record(self, stream: torch.Stream | None = None) -> None:
        """Record what has been put on a stream, the current one by default."""
        super().record(current_stream() if stream is None else stream)

    def wait(self, stream: torch.Stream | None = None) -> None:
        """Make a stream, the current one by default, wait for what is recorded."""
        super().wait(current_stream() if stream is None else stream)

    def elapsed_time(self, end: torch.Event) -> float:
        """Milliseconds of the host between the two records."""
        # torch 2.13 takes no subclass for `end`.
        return float(build.load().elapsed_time(self.event_id, end.event_id))

    def __repr__(self) -> str:
        return f"<torch.sim.Event device={self.device}>"


class StreamContext:
    """A context in which a stream, and its device, are the current ones. None changes nothing."""

    def __init__(self, stream: torch.Stream | None) -> None:
        self.stream = stream
        self._before: list[tuple[int, Stream | None]] = []

    def __enter__(self) -> None:
        if self.stream is None:
            return
        # Of the stream's own device the stream that was current there is restored; and the device itself.
        self._before.append((current_device(), current_stream(self.stream.device_index)))
        set_stream(self.stream)

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self.stream is None:
            return
        device, stream = self._before.pop()
        if stream is not None:
            set_stream(stream)
        build.load().set_current_device(device)


def stream(stream: torch.Stream | None) -> StreamContext:
    """A context in which the stream is the current one of its device."""
    return StreamContext(stream)


def current_stream(device: Any = None) -> Stream:
    """This thread's current stream of a device."""
    index = index_of(device)
    return _stream(build.load().current_stream_id(index), index)


def default_stream(device: Any = None) -> Stream:
    """The stream of a device on which operations run where nobody has chosen another."""
    return _stream(0, index_of(device))


def set_stream(stream: torch.Stream | None) -> None:
    """Make a stream the current one of its device, and that device the current one."""
    if stream is None:
        return
    extension = build.load()
    extension.set_current_device(stream.device_index)
    extension.set_current_stream(stream.stream_id, stream.device_index)


def synchronize(device: Any = None) -> None:
    """The host waits for all streams of a device."""
    build.load().host_waits_device(index_of(device))


def _stream(stream_id: int, index: int) -> Stream:
    return Stream(
        stream_id=stream_id, device_index=index, device_type=int(torch._C._autograd.DeviceType.PrivateUse1.value)
    )
