"""
Memory statistics of the simulated accelerator, as in `torch.cuda`.

Bytes are exact: a storage of n bytes counts as n from its allocation until it is freed. CUDA's numbers are larger, as
it rounds up to 512 bytes and splits larger blocks. Allocations of a thread in `checker.suspended()` are not counted.

Freed blocks are cached by device, stream and exact size, last in, first out, and keep their history for the checker.
Uninitialized memory is NaN, whether new or reused. Blocks of 64 MiB and more take up memory of the host only where
they are written. With a limit (`set_memory_limit`), an allocation that does not fit raises torch.OutOfMemoryError, once
the cached blocks have been freed and that did not help.

Pinned memory belongs to no device. A non-blocking copy into it completes when the host has waited for its stream; until
then the host finds NaN. A copy from it reads the contents at the time of the call. While such copies are in flight,
torch's operations on pinned memory are checked in every thread of the host. Accesses that bypass torch (NumPy, tolist)
are noticed while a copy into the memory is in flight; writes into the source of a copy are detected at the next wait.
A system call that is given such memory (a file's write, for example) fails with EFAULT.
"""

from __future__ import annotations

from collections import OrderedDict
from typing import Any

from fsdp_conformance.errors import ConfigError
from fsdp_conformance.simulator.device import build
from fsdp_conformance.simulator.device.devices import index_of

__all__ = [
    "empty_cache",
    "host_memory_stats",
    "max_memory_allocated",
    "max_memory_reserved",
    "mem_get_info",
    "memory_allocated",
    "memory_reserved",
    "memory_stats",
    "reset_accumulated_host_memory_stats",
    "reset_accumulated_memory_stats",
    "reset_max_memory_allocated",
    "reset_peak_host_memory_stats",
    "reset_peak_memory_stats",
    "set_memory_limit",
]


def memory_allocated(device: Any = None) -> int:
    """Bytes of the storages that a device holds now."""
    return int(_stats(device)["allocated"])


def max_memory_allocated(device: Any = None) -> int:
    """The largest number of bytes that a device has held since the peak was reset."""
    return int(_stats(device)["peak_allocated"])


def memory_reserved(device: Any = None) -> int:
    """Bytes of storages, plus those of cached blocks."""
    return int(_stats(device)["reserved"])


def max_memory_reserved(device: Any = None) -> int:
    """The largest number of reserved bytes since the peak was reset."""
    return int(_stats(device)["peak_reserved"])


def reset_peak_memory_stats(device: Any = None) -> None:
    """Reset the peaks to the current values."""
    build.load().reset_peak_memory_stats(index_of(device))


def reset_max_memory_allocated(device: Any = None) -> None:
    """The same as `reset_peak_memory_stats`."""
    reset_peak_memory_stats(device)


def reset_accumulated_memory_stats(device: Any = None) -> None:
    """Reset the sums of all allocations and frees."""
    build.load().reset_accumulated_memory_stats(index_of(device))


def free_staging() -> int:
    """
    Free the host memory that collectives keep for their next values, before the memory of this process is measured.

    Return its bytes.
    """
    return int(build.load().free_staging())


def memory_stats(device: Any = None) -> dict[str, int]:
    """The statistics, under the names of `torch.cuda.memory_stats`."""
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
    statistics = {
        **{f"{name}.all.{key}": value for name in ("allocation", "active") for key, value in of_count.items()},
        **{
            f"{name}.all.{key}": value
            for name in ("allocated_bytes", "active_bytes", "requested_bytes")
            for key, value in of_bytes.items()
        },
        "reserved_bytes.all.current": stats["reserved"],
        "reserved_bytes.all.peak": stats["peak_reserved"],
        "num_alloc_retries": stats["num_alloc_retries"],
        "num_ooms": stats["num_ooms"],
    }
    return OrderedDict(sorted(statistics.items()))


def host_memory_stats() -> dict[str, int]:
    """The statistics for pinned memory, which belongs to no device."""
    return dict(build.load().memory_stats(-1))


def reset_peak_host_memory_stats() -> None:
    """Reset the peaks of pinned memory to the current values."""
    build.load().reset_peak_memory_stats(-1)


def reset_accumulated_host_memory_stats() -> None:
    """Reset the sums of all allocations and frees of pinned memory."""
    build.load().reset_accumulated_memory_stats(-1)


def mem_get_info(device: Any = None) -> tuple[int, int]:
    """Free and total bytes. Without a limit, each device claims to have as much memory as the machine."""
    free, total = build.load().memory_info(index_of(device))
    return free, total


def set_memory_limit(nbytes: int | None) -> None:
    """From now on each device has this many bytes; None for no limit. Raises ConfigError unless it is positive."""
    if nbytes is not None and nbytes <= 0:
        raise ConfigError([f"nbytes must be positive, or None for no limit, got {nbytes}"], where="set_memory_limit")
    build.load().set_memory_limit(nbytes or 0)


def empty_cache() -> None:
    """Free the cached blocks of all devices."""
    build.load().empty_cache()


def _stats(device: Any) -> dict[str, int]:
    return dict(build.load().memory_stats(index_of(device)))
