"""
The memory of GPUs, as NVML counts it: whoever holds it, and without starting CUDA in this process.

NVML comes with the driver. Without it the memory is unknown, and no case is refused.
"""

from __future__ import annotations

import ctypes
import functools
from dataclasses import dataclass
from typing import Any

MIB = 1 << 20

#: What a rank may take of a GPU: a context, the kernels that it loads, buffers of communicators, and a small model;
#: and as much again for the rank of the next case, which is prepared meanwhile. An estimate, not measured.
RANK_MIB = 4096


@dataclass(frozen=True, slots=True)
class DeviceMemory:
    """Memory of one GPU."""

    total_mib: int
    free_mib: int


class _Numbers(ctypes.Structure):
    """nvmlMemory_t."""

    _fields_ = (("total", ctypes.c_ulonglong), ("free", ctypes.c_ulonglong), ("used", ctypes.c_ulonglong))


def memory_of(uuid: str) -> DeviceMemory | None:
    """The memory of the GPU (or the MIG device) with that UUID; None if NVML is absent or does not know it."""
    library = _nvml()
    if library is None:
        return None
    handle, numbers = ctypes.c_void_p(), _Numbers()
    if library.nvmlDeviceGetHandleByUUID(uuid.encode(), ctypes.byref(handle)) != 0:
        return None
    if library.nvmlDeviceGetMemoryInfo(handle, ctypes.byref(numbers)) != 0:
        return None
    return DeviceMemory(total_mib=int(numbers.total) // MIB, free_mib=int(numbers.free) // MIB)


@functools.cache
def _nvml() -> Any:
    """The library, initialised; None if this machine has none."""
    try:
        library = ctypes.CDLL("libnvidia-ml.so.1")
    except OSError:
        return None
    return library if library.nvmlInit_v2() == 0 else None
