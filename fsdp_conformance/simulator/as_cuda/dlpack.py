"""
DLPack under CUDA's names: libraries in this process exchange tensors on the device without a copy.

A tensor on the device says kDLCUDA, and `__dlpack__(stream=...)` orders the consumer's stream after the current one, as
on CUDA. The capsule itself says kDLExtDev: only torch can read it. Libraries for real GPUs refuse it, and NumPy
refuses it as it does on CUDA, unless it asks for a copy on the CPU.
"""

from __future__ import annotations

import functools
from typing import Any

import torch
import torch.utils.dlpack

from fsdp_conformance.simulator.as_cuda.stream_handles import stream_of
from fsdp_conformance.simulator.device import SIMULATED, streams
from fsdp_conformance.simulator.device.devices import current_device, index_of
from fsdp_conformance.simulator.replacements import Replacements

_CUDA = 2
_EXTENSION = 12

#: Streams that consumers name by number instead of by handle: nothing to wait for, and CUDA's default streams.
_UNORDERED, _DEFAULT, _PER_THREAD = -1, 1, 2


def install(replaced: Replacements) -> None:
    """Replace the methods of tensors, and what torch's own `from_dlpack` asks."""
    give: Any = torch.Tensor.__dlpack__
    place: Any = torch.Tensor.__dlpack_device__

    @functools.wraps(place)
    def device_for_consumer(self: torch.Tensor) -> Any:
        return _numbered(self.device) if self.device.type == SIMULATED else place(self)

    @functools.wraps(give)
    def give_to_consumer(
        self: torch.Tensor,
        *,
        stream: Any = _UNORDERED,
        max_version: tuple[int, int] | None = None,
        dl_device: tuple[Any, int] | None = None,
        copy: bool | None = None,
    ) -> Any:
        # The keywords that are not given are left out: versions of torch have different ones.
        given: dict[str, Any] = {"max_version": max_version, "dl_device": dl_device, "copy": copy}
        options = {name: value for name, value in given.items() if value is not None}
        if self.device.type != SIMULATED:
            return give(self, stream=stream, **options)
        _check_device(self)
        _order(stream, self.device)
        if dl_device is not None and int(dl_device[0]) == _CUDA:
            options["dl_device"] = (_device_type(_EXTENSION), dl_device[1])
        return give(self, stream=_UNORDERED, **options)

    replaced.set(torch.Tensor, __dlpack__=give_to_consumer, __dlpack_device__=device_for_consumer)
    to_number = getattr(torch._C, "_torchDeviceToDLDevice", None)
    if to_number is not None:  # not in every version

        def number_for_consumer(device: torch.device) -> Any:
            return _numbered(device) if device.type == SIMULATED else to_number(device)

        replaced.set(torch._C, _torchDeviceToDLDevice=number_for_consumer)


def _numbered(device: torch.device) -> tuple[Any, int]:
    return _device_type(_CUDA), index_of(device)


def _device_type(number: int) -> Any:
    return torch.utils.dlpack.DLDeviceType(number)


def _check_device(tensor: torch.Tensor) -> None:
    current = current_device()
    if tensor.device.index != current:
        raise BufferError(
            f"Can't export tensors on a different CUDA device index. Expected: {tensor.device.index}. "
            f"Current device: {current}."
        )


def _order(stream: Any, device: torch.device) -> None:
    """Let the consumer's stream wait for the current one."""
    if stream is not None and type(stream) is not int:
        raise TypeError("stream must be ``int`` or ``none``")
    if stream == _UNORDERED:
        return
    if stream == _PER_THREAD:
        raise BufferError("per-thread default stream is not supported.")
    if stream == 0:
        raise AssertionError(f"unsupported stream on CUDA: {stream}.")
    index = device.index
    consumer = stream_of(_DEFAULT if stream is None else stream, index)
    producer = streams.current_stream(index)
    if consumer != producer:
        consumer.wait_stream(producer)
