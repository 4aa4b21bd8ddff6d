"""
`torch.cuda` as a script sees it under CUDA's names: its functions refer to the simulated accelerator.

Functions that `torch.sim` has under the same name are taken from there. Of the others, some are answered here, some do
nothing, NVTX ranges become labels, and all remaining ones raise NotSimulated with the reason.
"""

from __future__ import annotations

import contextlib
import types
from collections.abc import Callable, Iterator
from typing import Any

import torch

from fsdp_conformance.simulator.as_cuda import device_properties, graphs, stream_handles, surface
from fsdp_conformance.simulator.as_cuda import tools as cuda_tools
from fsdp_conformance.simulator.as_cuda.names import script_asks, stand_in, translated
from fsdp_conformance.simulator.as_cuda.refusals import refusal
from fsdp_conformance.simulator.checker.labels import Labels
from fsdp_conformance.simulator.device import SIMULATED, build
from fsdp_conformance.simulator.replacements import Replacements

_NCCL_VERSION = (2, 28, 9)

#: The modules that torch.cuda gets its functions from; a script may use them directly.
_PARTS = ("memory", "random", "streams", "graphs", "_utils")

#: Taken from torch.sim under the same name.
_SAME = (
    "Event", "Stream", "current_device", "current_stream", "default_stream", "device", "device_count",
    "empty_cache", "get_rng_state", "get_rng_state_all", "initial_seed", "manual_seed", "manual_seed_all",
    "max_memory_allocated", "max_memory_reserved", "memory_allocated", "memory_reserved",
    "memory_stats", "reset_accumulated_memory_stats", "reset_peak_memory_stats", "seed", "seed_all", "set_device",
    "set_rng_state", "set_rng_state_all", "set_stream", "stream", "synchronize", "StreamContext",
)  # fmt: skip

#: Older names.
_RENAMED = {
    "memory_cached": "memory_reserved",
    "max_memory_cached": "max_memory_reserved",
    "reset_max_memory_allocated": "reset_peak_memory_stats",
    "reset_max_memory_cached": "reset_peak_memory_stats",
}

#: torch's own functions, which call others of torch.cuda.
_KEPT = ("host_memory_stats", "make_graphed_callables")

_SYNC_DEBUG_MODES = {"default": 0, "warn": 1, "error": 2}

#: Why a callable of torch.cuda raises NotSimulated that the table of names does not know yet.
_UNKNOWN = "there is no CUDA runtime"


def install(replaced: Replacements, labels: Labels) -> None:
    """Replace the functions of torch.cuda."""
    simulator = getattr(torch, SIMULATED)
    answers: dict[str, Any] = {}
    for name in _SAME:
        answers[name] = _taken(getattr(simulator, name))
    for old, new in _RENAMED.items():
        answers[old] = answers[new]
    answers |= _answers(simulator) | graphs.install(replaced)
    answers["ExternalStream"] = stream_handles.ExternalStream
    if hasattr(torch.cuda, "get_stream_from_external"):  # not in every version
        answers["get_stream_from_external"] = translated(stream_handles.stream_from_external)
    answers["default_generators"] = tuple(map(simulator.default_generator, range(simulator.device_count())))
    known = {*answers, *_KEPT, *surface.refused()[torch.cuda.__name__]}
    for name, value in list(vars(torch.cuda).items()):
        if name not in known and _could_be_called(name, value):
            answers[name] = refusal(f"torch.cuda.{name}", value, _UNKNOWN)
    # From here on tensors and streams are simulated; classes that are only names stay.
    for name, value in answers.items():
        for module in (torch.cuda, *(getattr(torch.cuda, part, None) for part in _PARTS)):
            if module is torch.cuda or hasattr(module, name):
                replaced.set(module, **{name: value})
    replaced.set(torch.cuda, _sleep=_nothing)
    replaced.set(torch.cuda.nccl, version=lambda: _NCCL_VERSION)
    for kind in (simulator.Stream, simulator.Event):
        replaced.set(kind, __repr__=_as_cuda(kind.__repr__))
    _install_for_tests(replaced)
    _install_ranges(replaced, labels)
    device_properties.install(replaced)
    cuda_tools.install(replaced)
    replaced.on_undo(lambda: build.active().set_sync_debug_mode(0))


def _as_cuda(text_of: Callable[[Any], str]) -> Callable[[Any], str]:
    """A text about a stream or an event, with CUDA's names."""
    return lambda self: text_of(self).replace(f"torch.{SIMULATED}.", "torch.cuda.").replace(f"={SIMULATED}", "=cuda")


def _install_for_tests(replaced: Replacements) -> None:
    """Functions of torch._C that torch.testing calls: it runs tests of instantiate_device_type_tests on a stream."""

    def set_stream(stream_id: int, device_index: int, device_type: int) -> None:
        # As on CUDA, this also makes the device the current one.
        extension = build.active()
        extension.set_current_device(device_index)
        extension.set_current_stream(stream_id, device_index)

    replaced.set(
        torch._C,
        _cuda_setStream=set_stream,
        _cuda_setDevice=getattr(torch, SIMULATED).set_device,
        # Tests of memory free these before they measure; there are none.
        _cuda_clearCublasWorkspaces=_nothing,
    )


def _answers(simulator: Any) -> dict[str, Any]:
    """The functions that torch.cuda has and torch.sim has not."""
    available: Callable[[], bool] = torch.cuda.is_available
    initialized: Callable[[], bool] = torch.cuda.is_initialized

    def is_initialized() -> bool:
        return bool(simulator.is_initialized()) if script_asks() else initialized()

    def is_available() -> bool:
        # torch itself branches on it to handle CUDA tensors, which these are not.
        return True if script_asks() else available()

    def memory_summary(device: Any = None, abbreviated: bool = False) -> str:
        stats = simulator.memory_stats(translated(lambda given: given)(device))
        return "\n".join(f"{name}: {value}" for name, value in sorted(stats.items()))

    class device_of(simulator.device):  # type: ignore[misc]  # noqa: N801 - torch.cuda has this name
        def __init__(self, obj: Any) -> None:
            super().__init__(obj.get_device() if obj.device.type == SIMULATED else None)

    return {
        "device_of": device_of,
        "is_available": is_available,
        "is_initialized": is_initialized,
        "init": simulator.init,
        "ipc_collect": _nothing,
        "set_sync_debug_mode": _set_sync_debug_mode,
        "get_sync_debug_mode": build.active().sync_debug_mode,
        "is_bf16_supported": lambda including_emulation=True: True,
        "is_tf32_supported": lambda: True,
        "can_device_access_peer": lambda device, peer_device: True,
        "memory_summary": memory_summary,
        "get_allocator_backend": lambda: "native",
    }


def _taken(value: Any) -> Any:
    return stand_in(value) if isinstance(value, type) else translated(value)


def _could_be_called(name: str, value: Any) -> bool:
    """True if it is a function of torch.cuda, which may use a GPU: not an error, a type of tensors or a module."""
    if name.startswith("_") or not callable(value) or isinstance(value, type | types.ModuleType):
        return False
    return getattr(value, "__module__", "").startswith(("torch.cuda", "torch._C"))


def _set_sync_debug_mode(debug_mode: int | str) -> None:
    mode = _SYNC_DEBUG_MODES.get(debug_mode) if isinstance(debug_mode, str) else debug_mode
    if mode is None:
        raise RuntimeError("invalid value of debug_mode, expected one of `default`, `warn`, `error`")
    build.active().set_sync_debug_mode(mode)


def _nothing(*args: Any, **kwargs: Any) -> None:
    """For functions that only tune how a GPU works."""


def _install_ranges(replaced: Replacements, labels: Labels) -> None:
    """NVTX names what runs for a profiler; here the names appear in hazards."""

    @contextlib.contextmanager
    def marked(text: str, *args: Any, **kwargs: Any) -> Iterator[None]:
        labels.push(text.format(*args, **kwargs))
        try:
            yield
        finally:
            labels.pop()

    answers: dict[str, Callable[..., Any]] = {
        "range_push": labels.push,
        "range_pop": labels.pop,
        "range_start": lambda text: 0,
        "range_end": _nothing,
        "mark": _nothing,
        "range": marked,
    }
    replaced.set(torch.cuda.nvtx, **answers)
