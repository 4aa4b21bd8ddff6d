"""The devices of type `sim`: which one is current, and how they are named."""

from __future__ import annotations

from types import TracebackType
from typing import Any, Final

import torch

from fsdp_conformance.simulator.device import SIMULATED, build

__all__ = [
    "MAX_DEVICES",
    "current_device",
    "device",
    "device_count",
    "device_of",
    "index_of",
    "initialize",
    "is_active",
    "is_initialized",
    "set_device",
]

#: A device index has 8 bits.
MAX_DEVICES: Final = 127

#: Whether this process has used a device.
_initialized = False


def is_active() -> bool:
    """True if the device is registered with torch in this process."""
    return build.loaded() is not None and torch._C._get_privateuse1_backend_name() == SIMULATED


def device_count() -> int:
    """The number of devices; 0 before `activation.activate`."""
    return int(build.active().num_devices()) if is_active() else 0


def is_initialized() -> bool:
    """
    True if the program has used a device: made a tensor there, asked for the current device or set it.

    As with CUDA, torch's DeviceMesh sets the device of a rank if the program has not.
    """
    return _initialized


def initialize() -> None:
    """Count the device as used. There is nothing else to initialize."""
    global _initialized
    _initialized = True


def current_device() -> int:
    """The index of this thread's current device."""
    initialize()
    return int(build.active().current_device())


def set_device(device: Any) -> None:
    """Make a device (an index, "sim:3", a torch.device) this thread's current one."""
    initialize()
    index = index_of(device)
    if index >= 0:
        build.active().set_current_device(index)


class device:  # noqa: N801 - torch.cuda.device has this name
    """A context in which a device is the current one. None and -1 change nothing."""

    def __init__(self, device: Any) -> None:
        self.idx = -1 if device is None else index_of(device)
        self.prev_idx = -1

    def __enter__(self) -> None:
        self.prev_idx = current_device()
        set_device(self.idx)

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        set_device(self.prev_idx)


class device_of(device):  # noqa: N801 - torch.cuda.device_of has this name
    """A context in which the device of a tensor is the current one. Tensors on other devices change nothing."""

    def __init__(self, tensor: torch.Tensor) -> None:
        super().__init__(tensor.device if tensor.device.type == SIMULATED else None)


def index_of(device: Any) -> int:
    """
    The index for an index, a string, a torch.device, or None (the current device).

    Raises ValueError for a device of another type.
    """
    if device is None:
        return current_device()
    if isinstance(device, int):
        return device
    device = torch.device(device)
    if device.type != SIMULATED:
        raise ValueError(f"device must be of type {SIMULATED!r}, got {str(device)!r}")
    return current_device() if device.index is None else int(device.index)
