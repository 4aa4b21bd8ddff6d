"""
The device `sim`: makes it known to torch, and answers which of its devices is the current one.

    device.activate()
    model = nn.Linear(3, 5, device="sim")

Its functions for Python (`torch.sim`) are those of `torch.cuda` that torch's own wrappers ask of a device.
"""

from __future__ import annotations

import atexit
import os
from types import TracebackType
from typing import Any, Final

import torch
from torch.utils.backend_registration import generate_methods_for_privateuse1_backend, rename_privateuse1_backend

from fsdp_conformance.config import SIMULATED
from fsdp_conformance.errors import ConfigError, EnvironmentUnavailable
from fsdp_conformance.simulator import build

__all__ = [
    "DEFAULT_NUM_DEVICES",
    "NUM_DEVICES",
    "activate",
    "current_device",
    "device",
    "device_count",
    "device_of",
    "is_active",
    "set_device",
]

#: The variable that says how many devices there are, where `activate` is not told.
NUM_DEVICES: Final = "FSDP_CONFORMANCE_SIM_DEVICES"

DEFAULT_NUM_DEVICES: Final = 8

#: What torch calls the place of a backend that is not its own, until one takes it.
_VACANT: Final = "privateuseone"

_active = False


def activate(num_devices: int | None = None) -> None:
    """
    Make the device known to torch as "sim", with `num_devices` devices (1 to 127), compiling it where necessary.

    Also registers "simccl" as the backend of its process groups. A second call changes at most the number of devices;
    that should come before the first backward pass, as autograd starts a thread for each device then. No thread is
    started here: the process may be forked afterwards.

    Raises EnvironmentUnavailable where the device cannot be compiled, and where another backend has its place in torch.
    """
    global _active
    count = _num_devices() if num_devices is None else num_devices
    if _active:
        if num_devices is not None:
            _extension().set_num_devices(count)
        return
    taken = torch._C._get_privateuse1_backend_name()
    if taken != _VACANT:
        raise EnvironmentUnavailable(
            f"the backend of PrivateUse1 is {taken!r}, but should be vacant: torch has one place for a device from "
            f"outside, and the simulated accelerator needs it. Start a process that does not load {taken!r} "
            "(TORCH_DEVICE_BACKEND_AUTOLOAD=0)."
        )
    extension = build.load()
    extension.set_num_devices(count)
    extension.activate()
    extension.Checker.get().mode = "record"
    from fsdp_conformance.simulator import torch_sim

    rename_privateuse1_backend(SIMULATED)
    torch._register_device_module(SIMULATED, torch_sim)  # type: ignore[no-untyped-call]
    generate_methods_for_privateuse1_backend(for_storage=True)
    _register_collectives()
    atexit.register(extension.empty_cache)
    _active = True


def is_active() -> bool:
    """Whether the device is known to torch in this process."""
    return _active


def device_count() -> int:
    """The number of devices; 0 before `activate`."""
    return int(_extension().num_devices()) if _active else 0


def current_device() -> int:
    """The index of this thread's current device."""
    return int(_extension().current_device())


def set_device(device: Any) -> None:
    """Make a device (an index, "sim:3", a torch.device) this thread's current one."""
    index = index_of(device)
    if index >= 0:
        _extension().set_current_device(index)


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
    """A context in which the device of a tensor is the current one. A tensor elsewhere changes nothing."""

    def __init__(self, tensor: torch.Tensor) -> None:
        super().__init__(tensor.device if tensor.device.type == SIMULATED else None)


def index_of(device: Any) -> int:
    """
    The index that is meant by an index, a string, a torch.device, or None (the current device).

    Raises ValueError for a device of another type.
    """
    if device is None:
        return current_device()
    if isinstance(device, int):
        return device
    device = torch.device(device)
    if device.type != SIMULATED:
        raise ValueError(f"device={device}, but should be one of type {SIMULATED!r}")
    return current_device() if device.index is None else int(device.index)


def _num_devices() -> int:
    text = os.environ.get(NUM_DEVICES, "")
    if not text:
        return DEFAULT_NUM_DEVICES
    if not text.isdecimal() or not 1 <= int(text) <= 127:
        raise ConfigError(
            [f"{NUM_DEVICES}={text!r}, but should be a number of devices from 1 to 127"], where="the environment"
        )
    return int(text)


def _register_collectives() -> None:
    from fsdp_conformance.simulator import process_group, threads

    process_group.register()
    threads.enable()


def _extension() -> Any:
    extension = build.loaded()
    if extension is None:
        raise EnvironmentUnavailable(
            "the simulated accelerator is not active, but should be: call fsdp_conformance.simulator.device.activate()"
        )
    return extension
