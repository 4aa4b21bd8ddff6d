"""
Registering the simulated accelerator with torch.

    activate()
    model = nn.Linear(3, 5, device="sim")
"""

from __future__ import annotations

import atexit
import os
from typing import Final

import torch
from torch.utils.backend_registration import generate_methods_for_privateuse1_backend, rename_privateuse1_backend

from fsdp_conformance.errors import ConfigError, EnvironmentUnavailable
from fsdp_conformance.simulator.device import SIMULATED, batch_norm, build, process_group, torch_sim
from fsdp_conformance.simulator.device.devices import MAX_DEVICES, is_active

__all__ = ["DEFAULT_NUM_DEVICES", "NUM_DEVICES", "activate"]

#: The environment variable with the number of devices, used if `activate` is not given one.
NUM_DEVICES: Final = "FSDP_CONFORMANCE_SIM_DEVICES"

DEFAULT_NUM_DEVICES: Final = 8

#: torch's name for the slot of an external backend, until a backend takes it.
_VACANT: Final = "privateuseone"


def activate(num_devices: int | None = None) -> None:
    """
    Register the device with torch as "sim", with `num_devices` devices (1 to 127), compiling it if necessary.

    Also registers "simccl" as the backend of its process groups. A second call can only change the number of devices;
    do that before the first backward pass, when autograd starts a thread for each device. No thread is started here, so
    the process may be forked afterwards.

    Raises EnvironmentUnavailable if the device cannot be compiled, or if another backend has taken its slot in torch.
    """
    count = _num_devices() if num_devices is None else num_devices
    if is_active():
        if num_devices is not None:
            build.active().set_num_devices(count)
        return
    taken = torch._C._get_privateuse1_backend_name()
    if taken != _VACANT:
        raise EnvironmentUnavailable(
            f"torch has one slot (PrivateUse1) for an external device, which the simulated accelerator needs and "
            f"{taken!r} has taken. Start a process that does not load {taken!r} (TORCH_DEVICE_BACKEND_AUTOLOAD=0)."
        )
    extension = build.load()
    extension.set_num_devices(count)
    extension.activate()
    extension.Checker.get().mode = "record"
    rename_privateuse1_backend(SIMULATED)
    torch._register_device_module(SIMULATED, torch_sim)  # type: ignore[no-untyped-call]
    generate_methods_for_privateuse1_backend(for_storage=True)
    batch_norm.register()
    process_group.register()
    atexit.register(extension.empty_cache)


def _num_devices() -> int:
    text = os.environ.get(NUM_DEVICES, "")
    if not text:
        return DEFAULT_NUM_DEVICES
    if not text.isdecimal() or not 1 <= int(text) <= MAX_DEVICES:
        raise ConfigError(
            [f"{NUM_DEVICES} must be a number of devices from 1 to {MAX_DEVICES}, got {text!r}"],
            where="the environment",
        )
    return int(text)
