"""
`torch.cuda` as a script sees it under CUDA's names: its functions refer to the simulated accelerator.

Functions that `torch.sim` has under the same name are taken from there. Of the others, some are answered here, some do
nothing, NVTX ranges become labels, and all remaining ones raise NotSimulated with the reason.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
import types
from collections.abc import Callable, Iterator
from typing import Any

import torch

from fsdp_conformance.simulator.as_cuda import tools as cuda_tools
from fsdp_conformance.simulator.as_cuda.names import NotSimulated, script_asks, stand_in, translated
from fsdp_conformance.simulator.checker.labels import Labels
from fsdp_conformance.simulator.device import SIMULATED, build
from fsdp_conformance.simulator.replacements import Replacements

#: The device name that scripts read.
NAME = "simulated accelerator"
_CAPABILITY = (9, 0)
_TOTAL_BYTES = 80 << 30
_NCCL_VERSION = (2, 28, 9)

#: The modules that torch.cuda gets its functions from; a script may use them directly.
_PARTS = ("memory", "random", "streams", "graphs", "_utils")

#: Taken from torch.sim under the same name.
_SAME = (
    "Event", "Stream", "current_device", "current_stream", "default_stream", "device", "device_count",
    "empty_cache", "get_rng_state", "get_rng_state_all", "initial_seed", "manual_seed", "manual_seed_all",
    "max_memory_allocated", "max_memory_reserved", "mem_get_info", "memory_allocated", "memory_reserved",
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

_GRAPHS = "a graph replays work without the calls that the checker tracks. Run the script without graphs"
_MEMORY = "its allocator cannot be replaced"
_HANDLE = "there is no CUDA runtime"

#: What raises NotSimulated and why; every other callable in torch.cuda raises it with _HANDLE.
_REFUSED = {
    "CUDAGraph": _GRAPHS,
    "graph": _GRAPHS,
    "make_graphed_callables": _GRAPHS,
    "graph_pool_handle": _GRAPHS,
    "MemPool": _MEMORY,
    "CUDAPluggableAllocator": _MEMORY,
    "change_current_allocator": _MEMORY,
    "use_mem_pool": _MEMORY,
}


def install(replaced: Replacements, labels: Labels) -> None:
    """Replace the functions of torch.cuda."""
    simulator = getattr(torch, SIMULATED)
    answers: dict[str, Any] = {}
    for name in _SAME:
        answers[name] = _taken(getattr(simulator, name, None), name)
    for old, new in _RENAMED.items():
        answers[old] = answers[new]
    answers |= _answers(simulator)
    for name, value in list(vars(torch.cuda).items()):
        if name not in answers and _could_be_called(name, value):
            answers[name] = _refusal(name, value)
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
    cuda_tools.install(replaced)


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
        "set_sync_debug_mode": _nothing,
        "get_sync_debug_mode": lambda: 0,
        "get_device_name": lambda device=None: NAME,
        "get_device_capability": lambda device=None: _CAPABILITY,
        "get_device_properties": lambda device=None: _properties(),
        "get_arch_list": lambda: [f"sm_{_CAPABILITY[0]}{_CAPABILITY[1]}"],
        "get_gencode_flags": lambda: "",
        "is_bf16_supported": lambda including_emulation=True: True,
        "is_tf32_supported": lambda: True,
        "can_device_access_peer": lambda device, peer: True,
        "is_current_stream_capturing": lambda: False,
        "memory_summary": memory_summary,
        "get_allocator_backend": lambda: "native",
    }


def _properties() -> types.SimpleNamespace:
    """The device properties that scripts read."""
    return types.SimpleNamespace(
        name=NAME,
        major=_CAPABILITY[0],
        minor=_CAPABILITY[1],
        total_memory=_TOTAL_BYTES,
        multi_processor_count=132,
        warp_size=32,
        max_threads_per_multi_processor=2048,
        regs_per_multiprocessor=65536,
        shared_memory_per_block=49152,
        shared_memory_per_multiprocessor=233472,
        L2_cache_size=50 << 20,
        is_integrated=False,
        is_multi_gpu_board=False,
        gcnArchName="",
    )


def _taken(value: Any, name: str) -> Any:
    if value is None:
        return _refusal(name, None)
    return stand_in(value) if isinstance(value, type) else translated(value)


def _could_be_called(name: str, value: Any) -> bool:
    """True if it is one of torch.cuda's callables that would use a GPU: not an error class, tensor type or module."""
    if name.startswith("_") or not callable(value) or isinstance(value, types.ModuleType):
        return False
    if not getattr(value, "__module__", "").startswith(("torch.cuda", "torch._C")):
        return False
    if isinstance(value, type):
        return name in _REFUSED or name in ("ExternalStream", "GreenContext")
    return not inspect.isclass(value)


def _refusal(name: str, value: Any) -> Any:
    """A replacement of that name that raises when it is used."""
    why = _REFUSED.get(name, _HANDLE)

    # Looks like the original: torch's compiler unwraps decorators when it is imported.
    @functools.wraps(value)
    def refuse(*args: Any, **kwargs: Any) -> Any:
        raise NotSimulated(f"torch.cuda.{name}", why)

    if isinstance(value, type):
        return type(name, (), {"__new__": refuse, "__module__": "torch.cuda"})
    return refuse


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
