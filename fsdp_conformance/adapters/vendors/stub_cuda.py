"""
Streams, events and devices of CUDA that do nothing, for engines whose Python uses them on every device.

A run with them judges an engine's sharding, not the order of its streams. Adapters that install them name SHIM in their
`shims`.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable
from typing import Any
from unittest.mock import patch

import torch

from fsdp_conformance.adapters.vendors.real_ranks import refuse_gpus_and_simulated_ranks
from fsdp_conformance.plan import SIMULATED, Plan

#: What an adapter says that it changes.
SHIM = "on the CPU, torch.cuda's streams, events and devices, Tensor.cuda and Tensor.record_stream do nothing"


class Stream:
    """All work is on it, and it is done."""

    device = torch.device("cpu")

    def __init__(self, *args: Any, **kwargs: Any) -> None: ...
    def wait_stream(self, stream: object) -> None: ...
    def wait_event(self, event: object) -> None: ...
    def synchronize(self) -> None: ...

    def record_event(self, event: Any = None) -> Any:
        return event or Event()

    def query(self) -> bool:
        return True

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Stream)

    def __hash__(self) -> int:
        return 1

    def __enter__(self) -> Stream:
        return self

    def __exit__(self, *args: object) -> None: ...


class Event:
    """It has happened."""

    def __init__(self, *args: Any, **kwargs: Any) -> None: ...
    def record(self, stream: object = None) -> None: ...
    def wait(self, stream: object = None) -> None: ...
    def synchronize(self) -> None: ...

    def query(self) -> bool:
        return True


def install(plan: Plan, engine: str) -> None:
    """
    Replace them in this process, which must be that of one rank.

    On the simulated accelerator nothing is replaced: it has streams (`Adapter.cuda_names`). Raises Unsupported for a
    plan with another device, and EnvironmentUnavailable on simulated ranks.
    """
    if plan.device == SIMULATED:
        return
    refuse_gpus_and_simulated_ranks(plan, engine, because="its adapter changes torch, which simulated ranks share")
    cuda: Any = torch.cuda
    cuda.Stream, cuda.Event = Stream, Event
    # A separate function for each: torch._dynamo rejects one that has two names.
    for name in ("current_stream", "default_stream"):
        setattr(cuda, name, _returns(Stream()))
    for name in ("stream", "device"):
        setattr(cuda, name, _returns(contextlib.nullcontext()))
    for name in ("current_device", "memory_allocated", "max_memory_allocated", "memory_reserved"):
        setattr(cuda, name, _returns(0))
    for name in ("synchronize", "empty_cache", "set_device"):
        setattr(cuda, name, _returns(None))
    cuda.is_current_stream_capturing = _returns(False)
    cuda.nvtx.range_push, cuda.nvtx.range_pop = _returns(0), _returns(0)
    tensor: Any = torch.Tensor
    tensor.record_stream = _returns(None)
    tensor.cuda = _itself


def seems_available_in(cls: type, method: str) -> None:
    """Let a method of an engine's class find CUDA available, so that it makes its streams, which do nothing here."""
    original = getattr(cls, method)
    if getattr(original, "sees_cuda", False):
        return

    @functools.wraps(original)
    def with_cuda(*args: Any, **kwargs: Any) -> Any:
        with patch.object(torch.cuda, "is_available", return_value=True):
            return original(*args, **kwargs)

    vars(with_cuda)["sees_cuda"] = True
    setattr(cls, method, with_cuda)


def _returns(value: Any) -> Callable[..., Any]:
    def stub(*args: Any, **kwargs: Any) -> Any:
        return value

    return stub


def _itself(tensor: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
    return tensor
