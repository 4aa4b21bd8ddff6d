"""
The properties of a GPU that programs read: an H100's, with a name of its own.

The size of the memory is the same wherever a program asks for it: in the properties, in `torch.cuda.mem_get_info` and
in CUDA's runtime.
"""

from __future__ import annotations

import types
import uuid
from collections.abc import Callable
from typing import Any

import torch

from fsdp_conformance.simulator.as_cuda.names import simulated
from fsdp_conformance.simulator.device import memory
from fsdp_conformance.simulator.device.devices import device_count, index_of
from fsdp_conformance.simulator.replacements import Replacements

__all__ = ["CAPABILITY", "NAME", "install", "mem_get_info", "properties", "show_memory", "total_memory"]

#: The device name that programs read.
NAME = "simulated accelerator"
CAPABILITY = (9, 0)

#: Of each device, unless the user says how much it has.
_TOTAL_BYTES = 80 << 30

_shown_bytes: int | None = None


def show_memory(replaced: Replacements, nbytes: int | None) -> None:
    """Programs read that each device has this many bytes; None for the default."""

    def show(shown: int | None) -> None:
        global _shown_bytes
        _shown_bytes = shown

    before = _shown_bytes
    replaced.on_undo(lambda: show(before))
    show(nbytes)


def total_memory() -> int:
    """The bytes of each device."""
    return _shown_bytes or _TOTAL_BYTES


def mem_get_info(device: Any = None) -> tuple[int, int]:
    """Free and total bytes. A limit for this process (`set_per_process_memory_fraction`) does not change the total."""
    total = total_memory()
    return max(0, total - memory.memory_reserved(simulated(device))), total


class _Properties(types.SimpleNamespace):
    """Printed as torch prints them."""

    def __repr__(self) -> str:
        return (
            f"_CudaDeviceProperties(name='{self.name}', major={self.major}, minor={self.minor}, "
            f"total_memory={self.total_memory >> 20}MB, multi_processor_count={self.multi_processor_count}, "
            f"uuid={self.uuid}, pci_bus_id={self.pci_bus_id}, pci_device_id={self.pci_device_id}, "
            f"pci_domain_id={self.pci_domain_id}, L2_cache_size={self.L2_cache_size >> 20}MB)"
        )


def properties(device: Any = None) -> types.SimpleNamespace:
    """The properties of a device. Raises the error of torch for a device that does not exist."""
    index = index_of(simulated(device))
    if not 0 <= index < device_count():
        raise AssertionError("Invalid device id")
    return _Properties(
        name=NAME,
        major=CAPABILITY[0],
        minor=CAPABILITY[1],
        total_memory=total_memory(),
        multi_processor_count=132,
        warp_size=32,
        max_threads_per_block=1024,
        max_threads_per_multi_processor=2048,
        regs_per_multiprocessor=65536,
        shared_memory_per_block=49152,
        shared_memory_per_block_optin=232448,
        shared_memory_per_multiprocessor=233472,
        L2_cache_size=50 << 20,
        clock_rate=1980000,  # kHz
        memory_clock_rate=2619000,  # kHz
        memory_bus_width=5120,
        # As in a server whose GPUs are on PCI buses of their own.
        uuid=uuid.uuid5(uuid.NAMESPACE_DNS, f"{NAME} {index}"),
        pci_bus_id=index + 1,
        pci_device_id=0,
        pci_domain_id=0,
        is_integrated=0,
        is_multi_gpu_board=0,
        gcnArchName="",
    )


def install(replaced: Replacements) -> None:
    """Replace the functions of torch.cuda that say what a device is."""
    answers: dict[str, Callable[..., Any]] = {
        "get_device_properties": properties,
        "get_device_name": lambda device=None: properties(device).name,
        "get_device_capability": lambda device=None: CAPABILITY,
        "get_arch_list": lambda: [f"sm_{CAPABILITY[0]}{CAPABILITY[1]}"],
        "get_gencode_flags": lambda: "",
        "clock_rate": lambda device=None: properties(device).clock_rate // 1000,  # MHz
    }
    replaced.set(torch.cuda, **answers)
    for module in (torch.cuda, torch.cuda.memory):
        replaced.set(module, mem_get_info=mem_get_info)
