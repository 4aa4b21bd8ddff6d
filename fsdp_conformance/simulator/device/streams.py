"""Streams and events of the simulated accelerator, as `torch.cuda` has them."""

from __future__ import annotations

from types import TracebackType
from typing import Any, Self

import torch

from fsdp_conformance.simulator.device import SIMULATED, build
from fsdp_conformance.simulator.device.devices import current_device, index_of

__all__ = [
    "Event",
    "Stream",
    "StreamContext",
    "current_stream",
    "default_stream",
    "set_stream",
    "stream",
    "stream_by_id",
    "synchronize",
]


class Stream(torch.Stream):
    """
    A stream of a device. Its operations run in order; only waits order them with operations on other streams.

    Taken from a pool of 32 per device and priority, as on CUDA: the 33rd stream is the first again.
    """

    def __new__(cls, device: Any = None, priority: int = 0, **kwargs: Any) -> Self:
        if "stream_id" in kwargs:
            return super().__new__(cls, priority=priority, **kwargs)
        return super().__new__(cls, device=torch.device(SIMULATED, index_of(device)), priority=priority)

    @property
    def priority(self) -> int:
        """-1 for a high-priority stream, else 0. It has no effect on the order of execution."""
        return int(build.load().priority_of(self.stream_id))

    @staticmethod
    def priority_range() -> tuple[int, int]:
        """The least and the greatest priority."""
        return 0, -1

    def wait_event(self, event: torch.Event) -> None:
        """Order later work on this stream after the work that the event has recorded."""
        super().wait_event(event)

    def wait_stream(self, stream: torch.Stream) -> None:
        """Order later work on this stream after all work on the other stream so far."""
        super().wait_stream(stream)

    def record_event(self, event: torch.Event | None = None) -> torch.Event:
        """Record the work on this stream so far, in the given event or in a new one."""
        if event is None:
            event = Event()
        event.record(self)
        return event

    def __repr__(self) -> str:
        return f"<torch.sim.Stream device={self.device} id={self.stream_id}>"


class Event(torch.Event):
    """A point in the work of a stream: everything before it was recorded."""

    def __new__(cls, enable_timing: bool = False, blocking: bool = False, interprocess: bool = False) -> Self:
        if interprocess:
            raise NotImplementedError("interprocess must be False: processes cannot share memory of sim")
        return super().__new__(cls, device=torch.device(SIMULATED, current_device()), enable_timing=enable_timing)

    def record(self, stream: torch.Stream | None = None) -> None:
        """Record the work on a stream so far, by default the current stream."""
        super().record(current_stream() if stream is None else stream)

    def wait(self, stream: torch.Stream | None = None) -> None:
        """Make a stream, by default the current one, wait for the recorded work."""
        super().wait(current_stream() if stream is None else stream)

    def elapsed_time(self, end: torch.Event) -> float:
        """Milliseconds of host time between the recording of two events."""
        # torch 2.13 does not accept a subclass for `end`.
        return float(build.load().elapsed_time(self.event_id, end.event_id))

    def __repr__(self) -> str:
        return f"<torch.sim.Event device={self.device}>"


class StreamContext:
    """A context in which a stream and its device are the current ones. None changes nothing."""

    def __init__(self, stream: torch.Stream | None) -> None:
        self.stream = stream
        self._before: list[tuple[int, Stream | None]] = []

    def __enter__(self) -> None:
        if self.stream is None:
            return
        # Restore both: the stream that was current on the stream's device, and the device.
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
    return stream_by_id(build.load().current_stream_id(index), index)


def default_stream(device: Any = None) -> Stream:
    """The stream of a device on which operations run unless another is chosen."""
    return stream_by_id(0, index_of(device))


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


def stream_by_id(stream_id: int, index: int) -> Stream:
    """The stream of a device with a `stream_id`: 0 is the default stream."""
    return Stream(
        stream_id=stream_id, device_index=index, device_type=int(torch._C._autograd.DeviceType.PrivateUse1.value)
    )
