"""
Process groups that a program makes itself, without `init_process_group`: `ProcessGroupNCCL(store, rank, size)` and
`ProcessGroupGloo(store, rank, size)`.

One of gloo's takes tensors on the CPU, which gloo exchanges, and on GPUs, for which it also has a simulated group.
That group accepts what NCCL accepts: one tensor for each rank and call, and no bitwise reductions.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import PrefixStore, ProcessGroupGloo
from torch.distributed import distributed_c10d

from fsdp_conformance.simulator.as_cuda.names import script_asks
from fsdp_conformance.simulator.device import SIMULATED, build, process_group

__all__ = ["process_group_gloo", "process_group_nccl"]

#: The methods of gloo's groups that take tensors on GPUs. Calls of several tensors (coalesced) raise gloo's error.
_COLLECTIVES = (
    "_allgather_base", "_reduce_scatter_base", "allgather", "allreduce", "alltoall", "alltoall_base", "broadcast",
    "gather", "recv", "recv_anysource", "reduce", "reduce_scatter", "scatter", "send",
    "all_gather_single", "all_to_all_single", "reduce_scatter_single",  # since torch 2.14
)  # fmt: skip


def process_group_nccl() -> type:
    """The parts of ProcessGroupNCCL that programs use: its options, and groups that they create with it."""

    class Options(build.active().ProcessGroupOptions):  # type: ignore[misc]
        def __init__(self, is_high_priority_stream: bool = False) -> None:
            super().__init__(distributed_c10d.default_pg_timeout.total_seconds())
            self.is_high_priority_stream = is_high_priority_stream

    def make(
        _: type, store: Any, rank: int, size: int, options: Any = None, *, timeout: timedelta | None = None
    ) -> dist.Backend:
        return process_group.made_directly(store, rank, size, timeout or _timeout_in(options))

    return type("ProcessGroupNCCL", (), {"Options": Options, "__new__": make})


def process_group_gloo() -> type:
    """
    Takes the place of ProcessGroupGloo: makes groups for tensors on GPUs, too, where a program asks.

    torch itself gets the real ones, and creates simulated groups next to them.
    """
    names = {"__module__": ProcessGroupGloo.__module__, "__qualname__": ProcessGroupGloo.__qualname__}
    return _GlooStandIn(ProcessGroupGloo.__name__, (), names)


def _timeout_in(options: Any) -> timedelta:
    given = options if isinstance(options, timedelta) else getattr(options, "_timeout", None)
    return given or distributed_c10d.default_pg_timeout


class _MadeGloo(ProcessGroupGloo):
    """A gloo group together with a simulated one. Both connect at once: not all ranks take part in a send."""

    def __init__(self, store: Any, rank: int, size: int, *more: Any, **kwargs: Any) -> None:
        super().__init__(store, rank, size, *more, **kwargs)
        given = [*more, *kwargs.values()]
        # A program may make a group of NCCL's with the same store.
        own = PrefixStore("beside gloo", store)
        self._on_devices = process_group.made_directly(own, rank, size, _timeout_in(given[0] if given else None))


def _by_device(name: str, on_cpu: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(on_cpu)
    def collective(self: _MadeGloo, *args: Any, **kwargs: Any) -> Any:
        if _is_on_device([args, list(kwargs.values())]):
            return getattr(self._on_devices, name)(*args, **kwargs)
        return on_cpu(self, *args, **kwargs)

    return collective


def _is_on_device(values: Iterable[Any]) -> bool:
    for value in values:
        if isinstance(value, torch.Tensor):
            if value.device.type == SIMULATED:
                return True
        elif isinstance(value, list | tuple) and _is_on_device(value):
            return True
    return False


for _name in (name for name in _COLLECTIVES if hasattr(ProcessGroupGloo, name)):
    setattr(_MadeGloo, _name, _by_device(_name, getattr(ProcessGroupGloo, _name)))


class _GlooStandIn(type):
    """The metaclass of the classes that replace ProcessGroupGloo."""

    def __call__(cls, *args: Any, **kwargs: Any) -> Any:
        return (_MadeGloo if script_asks() else ProcessGroupGloo)(*args, **kwargs)

    def __instancecheck__(cls, instance: object) -> bool:
        return isinstance(instance, ProcessGroupGloo)

    def __subclasscheck__(cls, subclass: type) -> bool:
        return issubclass(subclass, ProcessGroupGloo)

    def __getattr__(cls, name: str) -> Any:
        return getattr(ProcessGroupGloo, name)

    def __eq__(cls, other: object) -> bool:
        return other is cls or other is ProcessGroupGloo

    def __hash__(cls) -> int:
        return hash(ProcessGroupGloo)
