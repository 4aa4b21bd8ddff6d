"""
What the simulated accelerator says of its memory, as `torch.cuda` does.

Bytes are exact: a storage of n bytes counts n, from its allocation to its end. CUDA rounds up to 512 and splits larger
blocks, so that its numbers are larger. What a thread allocates in `checker.suspended()` is not counted.

Freed blocks are cached per device, stream and exact size, last in first out, and keep their history for the checker.
Memory that nobody has written is NaN, new or reused.

Pinned memory belongs to no device. A copy into it that does not block arrives when the host has waited for its stream;
until then the host finds NaN. A copy out of it takes what is there when it is issued. While such copies are under way
the operations of torch on pinned memory are looked at, in every thread of the host; what goes past torch (numpy,
tolist, a process group for CPU tensors) is not: it finds NaN, and what it writes is found when the host waits.
"""

from __future__ import annotations

from collections import OrderedDict
from typing import Any

from fsdp_conformance.simulator import build
from fsdp_conformance.simulator.device import index_of

__all__ = [
    "empty_cache",
    "host_memory_stats",
    "max_memory_allocated",
    "max_memory_reserved",
    "mem_get_info",
    "memory_allocated",
    "memory_reserved",
    "memory_stats",
    "reset_accumulated_memory_stats",
    "reset_max_memory_allocated",
    "reset_peak_memory_stats",
]


def memory_allocated(device: Any = None) -> int:
    """Bytes of the storages that a device holds now."""
    return int(_stats(device)["allocated"])


def max_memory_allocated(device: Any = None) -> int:
    """The largest number of bytes that a device has held since the peak was reset."""
    return int(_stats(device)["peak_allocated"])


def memory_reserved(device: Any = None) -> int:
    """Bytes of storages and of blocks that are cached for reuse."""
    return int(_stats(device)["reserved"])


def max_memory_reserved(device: Any = None) -> int:
    """The largest number of reserved bytes since the peak was reset."""
    return int(_stats(device)["peak_reserved"])


def reset_peak_memory_stats(device: Any = None) -> None:
    """The peaks are what is held now."""
    build.load().reset_peak_memory_stats(index_of(device))


def reset_max_memory_allocated(device: Any = None) -> None:
    """As `reset_peak_memory_stats`."""
    reset_peak_memory_stats(device)


def reset_accumulated_memory_stats(device: Any = None) -> None:
    """The sums of all allocations and frees begin anew."""
    build.load().reset_accumulated_memory_stats(index_of(device))


def memory_stats(device: Any = None) -> dict[str, int]:
    """The numbers under the names that `torch.cuda.memory_stats` has for them."""
    stats = _stats(device)
    of_bytes = {
        "current": stats["allocated"],
        "peak": stats["peak_allocated"],
        "allocated": stats["total_allocated"],
        "freed": stats["total_freed"],
    }
    of_count = {
        "current": stats["num_allocations"],
        "peak": stats["peak_num_allocations"],
        "allocated": stats["total_num_allocations"],
        "freed": stats["total_num_frees"],
    }
    named = {
        **{f"{name}.all.{key}": value for name in ("allocation", "active") for key, value in of_count.items()},
        **{
            f"{name}.all.{key}": value
            for name in ("allocated_bytes", "active_bytes", "requested_bytes")
            for key, value in of_bytes.items()
        },
        "reserved_bytes.all.current": stats["reserved"],
        "reserved_bytes.all.peak": stats["peak_reserved"],
        "num_alloc_retries": 0,
        "num_ooms": 0,
    }
    return OrderedDict(sorted(named.items()))


def host_memory_stats() -> dict[str, int]:
    """The numbers for pinned memory, which belongs to no device."""
    return dict(build.load().memory_stats(-1))


def mem_get_info(device: Any = None) -> tuple[int, int]:
    """Bytes that are free, and all bytes: each device says that it has as much memory as the machine."""
    free, total = build.load().memory_info(index_of(device))
    return free, total


def empty_cache() -> None:
    """Give the cached blocks of all devices back to the machine."""
    build.load().empty_cache()


def _stats(device: Any) -> dict[str, int]:
    return dict(build.load().memory_stats(index_of(device)))
