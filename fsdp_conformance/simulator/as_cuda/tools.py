"""
The tools with which programs look at a GPU, under CUDA's names: profilers, memory history and limit, CUDA's runtime.

Nothing is recorded. A program that turns a profiler on, or saves a snapshot of the memory, runs as it does on a GPU.
"""

from __future__ import annotations

import types
from collections.abc import Mapping
from types import TracebackType
from typing import Any, Self

import torch
import torch.autograd.profiler
import torch.cuda.profiler

from fsdp_conformance.simulator.as_cuda import device_properties, dlpack, stream_handles
from fsdp_conformance.simulator.as_cuda.names import NotSimulated, translated
from fsdp_conformance.simulator.device import memory
from fsdp_conformance.simulator.device.streams import Stream
from fsdp_conformance.simulator.replacements import Replacements

_SUCCESS = 0


def install(replaced: Replacements) -> None:
    """Replace them."""
    runtime = _Runtime()
    for module in (torch.cuda, torch.cuda.profiler):
        replaced.set(module, cudart=lambda: runtime, check_error=_check_error)
    replaced.set(torch.autograd.profiler, emit_nvtx=_EmitNvtx, profile=_Profile)
    dlpack.install(replaced)
    replaced.set(Stream, cuda_stream=property(stream_handles.handle_of))
    fraction = _MemoryFraction()
    answers: dict[str, Any] = {
        "memory_snapshot": lambda mempool_id=None, include_traces=True: _segments(),
        "set_per_process_memory_fraction": translated(fraction.set),
        "get_per_process_memory_fraction": translated(fraction.get),
        "memory_stats_as_nested_dict": lambda device=None: _nested(torch.cuda.memory_stats(device)),
        "device_memory_used": translated(memory.memory_reserved),
        "host_memory_stats_as_nested_dict": _host_memory_stats,
        "reset_peak_host_memory_stats": memory.reset_peak_host_memory_stats,
        "reset_accumulated_host_memory_stats": memory.reset_accumulated_host_memory_stats,
    }
    for module in (torch.cuda, torch.cuda.memory):
        replaced.set(module, **{name: answer for name, answer in answers.items() if hasattr(module, name)})
    # torch's own `_dump_snapshot` writes what `_snapshot` returns.
    replaced.set(torch.cuda.memory, _record_memory_history=_record_nothing, _snapshot=_snapshot)


class _Runtime:
    """The calls of CUDA's runtime that programs make through `torch.cuda.cudart()`."""

    cudaError = types.SimpleNamespace(success=_SUCCESS)  # noqa: N815 - CUDA's name

    def cudaProfilerStart(self) -> int:  # noqa: N802
        return _SUCCESS

    def cudaProfilerStop(self) -> int:  # noqa: N802
        return _SUCCESS

    def cudaMemGetInfo(self, device: int) -> tuple[int, int]:  # noqa: N802
        return device_properties.mem_get_info(device)

    def __getattr__(self, name: str) -> Any:
        raise NotSimulated(f"torch.cuda.cudart().{name}", "there is no CUDA runtime")


def _check_error(res: int) -> None:
    if res != _SUCCESS:
        raise RuntimeError(f"CUDA driver error: {res}")


class _Profile(torch.autograd.profiler.profile):
    """A profile of the device alone is one of the CPU: nothing takes time on the simulated device."""

    def __init__(self, enabled: bool = True, *, use_cpu: bool = True, use_device: str | None = None, **rest: Any):
        is_simulated = use_device == "cuda"
        super().__init__(
            enabled, use_cpu=use_cpu or is_simulated, use_device=None if is_simulated else use_device, **rest
        )


class _EmitNvtx:
    """`torch.autograd.profiler.emit_nvtx`: the host waits for the device at both ends, as on CUDA."""

    def __init__(self, enabled: bool = True, record_shapes: bool = False) -> None:
        self.enabled = enabled
        self.record_shapes = record_shapes

    def __enter__(self) -> Self:
        if self.enabled:
            torch.cuda.synchronize()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if self.enabled:
            torch.cuda.synchronize()


class _MemoryFraction:
    """The part of each device's memory that this process may use."""

    def __init__(self) -> None:
        self._fraction = 1.0
        self._total: int | None = None

    def set(self, fraction: float, device: Any = None) -> None:
        """Limit the memory. The devices of a process have the same limit."""
        if not isinstance(fraction, float):
            raise TypeError("Invalid type for fraction argument, must be `float`")
        if not 0 <= fraction <= 1:
            raise ValueError(f"Invalid fraction value: {fraction}. Allowed range: 0~1")
        if self._total is None:
            self._total = device_properties.total_memory()
        self._fraction = fraction
        memory.set_memory_limit(max(1, int(self._total * fraction)))

    def get(self, device: Any = None) -> float:
        """The last one that was set."""
        return self._fraction


def _nested(flat: Mapping[str, Any]) -> dict[str, Any]:
    """{"a": {"b": 1}} for {"a.b": 1}."""
    nested: dict[str, Any] = {}
    for name, value in flat.items():
        *path, last = name.split(".")
        inside = nested
        for part in path:
            inside = inside.setdefault(part, {})
        inside[last] = value
    return nested


def _host_memory_stats() -> dict[str, Any]:
    """Of pinned memory. What is freed is not kept, and nothing takes time."""
    stats = memory.host_memory_stats()
    counts = {
        "current": stats["num_allocations"], "peak": stats["peak_num_allocations"],
        "allocated": stats["total_num_allocations"], "freed": stats["total_num_frees"],
    }  # fmt: skip
    sizes = {
        "current": stats["allocated"], "peak": stats["peak_allocated"],
        "allocated": stats["total_allocated"], "freed": stats["total_freed"],
    }  # fmt: skip
    times = {
        name: dict.fromkeys(("total", "max", "min", "count", "avg"), 0)
        for name in ("host_alloc_time", "host_free_time")
    }
    return {
        **{name: dict(counts) for name in ("allocations", "active_requests")},
        **{name: dict(sizes) for name in ("allocated_bytes", "active_bytes")},
        "num_host_alloc": counts["allocated"],
        "num_host_free": counts["freed"],
        **times,
    }


def _segments() -> list[dict[str, Any]]:
    """
    The memory of each device as one segment.

    It has a block of everything that is allocated, and one of everything that is cached.
    """
    segments = []
    for device in range(torch.cuda.device_count()):
        allocated, reserved = memory.memory_allocated(device), memory.memory_reserved(device)
        sizes = (("active_allocated", allocated), ("inactive", reserved - allocated))
        segments.append({
            "device": device, "address": 0, "total_size": reserved, "allocated_size": allocated,
            "active_size": allocated, "requested_size": allocated, "stream": 0, "segment_type": "large",
            "segment_pool_id": (0, 0), "is_expandable": False, "frames": [],
            "blocks": [
                {"address": 0, "size": size, "requested_size": size, "state": state, "frames": []}
                for state, size in sizes
                if size
            ],
        })  # fmt: skip
    return segments


def _record_nothing(enabled: str | None = "all", *args: Any, **kwargs: Any) -> None:
    """`_record_memory_history`: there is no history."""
    if enabled not in (None, "state", "all", True, False):
        raise RuntimeError(f"expected enabled to be None, 'state' or 'all', got {enabled!r}")


def _snapshot(*args: Any, **kwargs: Any) -> dict[str, Any]:
    segments = _segments()
    traces: list[list[Any]] = [[] for _ in segments]
    return {"segments": segments, "device_traces": traces, "allocator_settings": {}, "external_annotations": []}
