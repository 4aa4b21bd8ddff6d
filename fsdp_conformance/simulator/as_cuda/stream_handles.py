"""
The numbers under which libraries pass streams to each other: `stream.cuda_stream`, and streams made from one.

A number stands for the same stream, as on CUDA: an `ExternalStream` is ordered with the stream that it was made from. A
stream that the program has made without torch does not exist here.
"""

from __future__ import annotations

from typing import Any

import torch

from fsdp_conformance.simulator.as_cuda.names import simulated
from fsdp_conformance.simulator.device import streams
from fsdp_conformance.simulator.device.devices import index_of

#: CUDA's numbers of the default stream, and of the one that each host thread has.
_DEFAULT, _PER_THREAD = (0, 1), 2

#: The handle of the stream with the id 1; below it are the numbers above.
_FIRST_HANDLE = 1 << 12

#: Streams of a device, without the default stream: 32 of each priority.
_NUM_STREAMS = 64


def handle_of(stream: torch.Stream) -> int:
    """`stream.cuda_stream`: 0 for the default stream."""
    number = int(stream.stream_id)
    return _FIRST_HANDLE + number - 1 if number else 0


def stream_of(handle: int, index: int) -> streams.Stream:
    """The stream of a device with a handle. Raises ValueError if there is none."""
    if handle in _DEFAULT:
        return streams.default_stream(index)
    if not _FIRST_HANDLE <= handle < _FIRST_HANDLE + _NUM_STREAMS:
        why = "per-thread default streams are not simulated" if handle == _PER_THREAD else "no stream has it"
        raise ValueError(f"stream must be the `cuda_stream` of a stream of this program, got {handle}: {why}")
    return streams.stream_by_id(handle - _FIRST_HANDLE + 1, index)


class ExternalStream(streams.Stream):
    """`torch.cuda.ExternalStream`: the stream with a handle."""

    def __new__(cls, stream_ptr: int, device: Any = None, **kwargs: Any) -> Any:
        """The stream itself, which need not be an instance of this class: CUDA's is a separate object for it."""
        return stream_of(int(stream_ptr), index_of(simulated(device)))


def stream_from_external(data_ptr: int, device: Any = None) -> streams.Stream:
    """`torch.cuda.get_stream_from_external`."""
    return stream_of(int(data_ptr), index_of(device))
