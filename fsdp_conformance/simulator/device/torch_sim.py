"""The module `torch.sim`: the functions that torch's wrappers expect of a device module."""

from __future__ import annotations

import sys
from typing import Any, NamedTuple

import torch

from fsdp_conformance.simulator.device import rng
from fsdp_conformance.simulator.device.devices import (
    current_device,
    device,
    device_count,
    device_of,
    index_of,
    initialize,
    is_initialized,
    set_device,
)
from fsdp_conformance.simulator.device.memory import (
    empty_cache,
    host_memory_stats,
    max_memory_allocated,
    max_memory_reserved,
    mem_get_info,
    memory_allocated,
    memory_reserved,
    memory_stats,
    reset_accumulated_memory_stats,
    reset_max_memory_allocated,
    reset_peak_memory_stats,
)
from fsdp_conformance.simulator.device.rng import (
    default_generator,
    get_rng_state,
    get_rng_state_all,
    initial_seed,
    manual_seed,
    manual_seed_all,
    seed,
    seed_all,
    separate_generators,
    set_rng_state_all,
)
from fsdp_conformance.simulator.device.streams import (
    Event,
    Stream,
    StreamContext,
    current_stream,
    default_stream,
    set_stream,
    stream,
    synchronize,
)
from fsdp_conformance.simulator.device.thread_ranks import thread_world

__all__ = [
    "DeviceProperties",
    "Event",
    "Stream",
    "StreamContext",
    "current_device",
    "current_stream",
    "default_generator",
    "default_stream",
    "device",
    "device_count",
    "device_of",
    "empty_cache",
    "get_amp_supported_dtype",
    "get_device_capability",
    "get_device_name",
    "get_device_properties",
    "get_rng_state",
    "get_rng_state_all",
    "host_memory_stats",
    "init",
    "initial_seed",
    "is_available",
    "is_bf16_supported",
    "is_initialized",
    "manual_seed",
    "manual_seed_all",
    "max_memory_allocated",
    "max_memory_reserved",
    "mem_get_info",
    "memory_allocated",
    "memory_reserved",
    "memory_stats",
    "reset_accumulated_memory_stats",
    "reset_max_memory_allocated",
    "reset_peak_memory_stats",
    "seed",
    "seed_all",
    "separate_generators",
    "set_device",
    "set_rng_state",  # noqa: F822 - see __getattr__
    "set_rng_state_all",
    "set_stream",
    "stream",
    "synchronize",
    "thread_world",
]


def __getattr__(name: str) -> Any:
    """
    `set_rng_state`, except for DTensor.

    If a device module has it, DTensor assumes that its state is a seed and an offset, as on CUDA, and moves the offset.
    Here the state is the CPU's, so DTensor must draw as on the CPU: each rank for its shard, from its own generator.
    """
    if name == "set_rng_state" and sys._getframe(1).f_globals.get("__name__") != "torch.distributed.tensor._random":
        return rng.set_rng_state
    raise AttributeError(f"module 'torch.sim' has no attribute {name!r}")


class DeviceProperties(NamedTuple):
    """The properties of a device."""

    name: str
    total_memory: int
    """Bytes."""
    major: int = 0
    minor: int = 0
    multi_processor_count: int = 1


def is_available() -> bool:
    """True: this module exists only after the device was activated."""
    return True


def init() -> None:
    """Count the device as used; there is nothing else to do."""
    initialize()


def _lazy_init() -> None:
    """Called by torch when a program first uses the device."""
    initialize()


def _is_in_bad_fork() -> bool:
    """False: a process may fork after using the device, unless autograd has started its threads."""
    return False


def get_device_name(device: Any = None) -> str:
    """The name of a device."""
    return "simulated accelerator"


def get_device_capability(device: Any = None) -> tuple[int, int]:
    """(0, 0): CUDA's capability numbers do not apply."""
    return (0, 0)


def get_device_properties(device: Any = None) -> DeviceProperties:
    """Name and memory size."""
    return DeviceProperties(name=get_device_name(device), total_memory=mem_get_info(index_of(device))[1])


def is_bf16_supported(including_emulation: bool = True) -> bool:
    """True: the CPU's kernels support it."""
    return True


def get_amp_supported_dtype() -> list[torch.dtype]:
    """The dtypes that `torch.autocast("sim")` supports: those of the CPU."""
    return [torch.bfloat16, torch.float16]
