"""
Replacements for torch's test harness, CUDA and FullyShardedDataParallel in PyTorch's distributed tests.

ci/upstream puts an import of this module before the others of every test file. It then replaces, in torch's modules:

- the base classes of tests by those of `harness.torch_compat`
- on simulated GPUs: nothing else, but races between ranks that are threads fail no test
- on the CPU: what names "cuda" or "nccl" by its counterpart on the CPU, so that tests written for CUDA run, and
  `skip_if_lt_x_gpu` by ours, which runs the test on the CPU
- with the reference engine as subject: torch's FullyShardedDataParallel by the engine's: ci/upstream_engine.py

ci/upstream prints what is adapted under its table: `ADAPTATIONS` there.
"""

from __future__ import annotations

import functools
import os
import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
import torch.distributed as dist

# Compiles itself when it is imported, which needs torch's own factories.
import torch.distributed.optim
from torch import nn
from torch.distributed import device_mesh, distributed_c10d, fsdp
from torch.distributed.fsdp import fully_sharded_data_parallel
from torch.nn.parallel import distributed as data_parallel
from torch.testing._internal import common_device_type
from torch.testing._internal.distributed._tensor import common_dtensor
from torch.utils import _device

from fsdp_conformance.harness import torch_compat
from fsdp_conformance.harness.torch_testing import common_distributed, common_fsdp

#: "torch", or "reference" for the engine in place of torch's FullyShardedDataParallel.
SUBJECT = os.environ.get("FSDP_CONFORMANCE_UPSTREAM_SUBJECT", "torch")

#: "cpu", or "simulated": then pytest's own option provides what is called CUDA.
RANKS = os.environ.get("FSDP_CONFORMANCE_UPSTREAM_RANKS", "cpu")

#: What a machine with two GPUs would say.
_DEVICES = 2
_NAME = re.compile(r"cuda(:\d+)?\Z")
_BACKEND = re.compile(r"nccl")


def install() -> None:
    """Replace all of it, in this process."""
    _use_our_ranks()
    if RANKS == "cpu":
        _take_cuda_as_cpu()
    else:
        _excuse_threads()
    if SUBJECT == "reference":
        import upstream_engine

        upstream_engine.use_the_engine(_without_index if RANKS == "cpu" else None)


def _excuse_threads() -> None:
    """Races between ranks that are threads fail no test: see `ADAPTATIONS`."""
    mark = pytest.mark.simulated_cuda(devices=1, hazards="report")
    _set(common_distributed.MultiThreadedTestCase, pytestmark=[mark])


def _set(*owners: object, **values: Any) -> None:
    for owner in owners:
        for name, value in values.items():
            setattr(owner, name, value)


def _use_our_ranks() -> None:
    names = ("MultiProcessTestCase", "DistributedTestBase")
    ours = {name: getattr(torch_compat, name) for name in names}
    _set(common_distributed, common_fsdp, **ours)
    _set(common_fsdp, FSDPTest=torch_compat.FSDPTest)
    # Its name in older tests.
    _set(common_fsdp, test_compiled_fsdp=getattr(common_fsdp, "compiled_fsdp_test", None))
    # Classes that torch made from its own base keep it; these are what test files derive from.
    _set(common_dtensor, MultiProcessTestCase=torch_compat.MultiProcessTestCase)
    _set(common_dtensor, DTensorTestBase=torch_compat.DTensorTestBase)


# --- cuda is the CPU --------------------------------------------------------------------------------------------------


def _on_cpu(value: Any) -> Any:
    """ "cpu" for the name of a CUDA device; other values unchanged."""
    return "cpu" if type(value) is str and _NAME.match(value) else value


def _translated(function: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(function)
    def translating(*args: Any, **kwargs: Any) -> Any:
        return function(*map(_on_cpu, args), **{name: _on_cpu(value) for name, value in kwargs.items()})

    return translating


def _placed(function: Callable[..., Any]) -> Callable[..., Any]:
    """For `to` and its like, whose first argument may be an index; booleans and dtypes are none."""

    @functools.wraps(function)
    def placing(*args: Any, **kwargs: Any) -> Any:
        moved = ["cpu" if type(value) is int else _on_cpu(value) for value in args]
        if type(kwargs.get("device")) is int:
            kwargs["device"] = "cpu"
        return function(*moved, **{name: _on_cpu(value) for name, value in kwargs.items()})

    return placing


class _DeviceClass(type):
    """`torch.device`, which cannot be patched: makes real devices, of which every one is an instance of it."""

    real = torch.device

    def __call__(cls, *args: Any, **kwargs: Any) -> torch.device:
        device = args[0] if args else kwargs.get("device", kwargs.get("type"))
        if type(device) is int or _on_cpu(device) == "cpu":
            return cls.real("cpu")
        return cls.real(*args, **kwargs)

    def __instancecheck__(cls, instance: object) -> bool:
        return isinstance(instance, cls.real)

    def __eq__(cls, other: object) -> bool:
        return other is cls or other is cls.real

    def __hash__(cls) -> int:
        return hash(cls.real)


class _Nothing:
    """A stream or an event that has always finished."""

    def __init__(self, *_: Any, **__: Any) -> None:
        self.device = _DeviceClass.real("cpu")

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return lambda *_, **__: None

    def query(self) -> bool:
        return True

    def elapsed_time(self, _: Any) -> float:
        return 0.0


@contextmanager
def _no_stream(*_: Any, **__: Any) -> Iterator[None]:
    yield


def _take_cuda_as_cpu() -> None:
    factories = _device._device_constructors()
    for module in (torch, torch.fft):
        for name, value in list(vars(module).items()):
            if callable(value) and getattr(type(value), "__hash__", None) is not None and value in factories:
                _set(module, **{name: _translated(value)})
    _set(torch, device=_DeviceClass("device", (), {"__module__": "torch", "__qualname__": "device"}))
    same = {"cuda": lambda self, *_, **__: self}
    _set(torch.Tensor, **same, pin_memory=same["cuda"], to=_placed(torch.Tensor.to))
    for name in ("new_empty", "new_full", "new_ones", "new_tensor", "new_zeros"):
        _set(torch.Tensor, **{name: _translated(getattr(torch.Tensor, name))})
    _set(nn.Module, **same)
    _set(torch._C._nn, _parse_to=_placed(torch._C._nn._parse_to))
    _set(torch, get_device_module=_translated(torch.get_device_module))
    _set(torch.amp.autocast_mode.autocast, __init__=_translated(torch.amp.autocast_mode.autocast.__init__))
    _set(torch.amp.grad_scaler.GradScaler, __init__=_translated(torch.amp.grad_scaler.GradScaler.__init__))
    _replace_cuda_module()
    _replace_process_groups()
    _make_tests_for_cpu()


def _replace_cuda_module() -> None:
    def nothing(*_: Any, **__: Any) -> None:
        return None

    silent = ("set_device", "synchronize", "empty_cache", "reset_peak_memory_stats", "_sleep", "init")
    zero = ("memory_allocated", "max_memory_allocated", "memory_reserved", "max_memory_reserved")
    _set(
        torch.cuda,
        **dict.fromkeys(silent, nothing),
        **dict.fromkeys(zero, lambda *_, **__: 0),
        current_device=lambda: torch.device("cpu"),
        device_count=lambda: _DEVICES,
        # Not torch.manual_seed, which calls this one.
        manual_seed=torch.default_generator.manual_seed,
        Stream=_Nothing,
        Event=_Nothing,
        current_stream=_Nothing,
        default_stream=_Nothing,
        stream=_no_stream,
    )
    _set(torch.cuda.nccl, version=lambda: (2, 27, 0))


def _replace_process_groups() -> None:
    def with_gloo(function: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(function)
        def starting(*args: Any, **kwargs: Any) -> Any:
            if args and isinstance(args[0], str):
                args = (_BACKEND.sub("gloo", args[0]), *args[1:])
            if isinstance(kwargs.get("backend"), str):
                kwargs["backend"] = _BACKEND.sub("gloo", _NAME.sub("cpu", kwargs["backend"]))
            kwargs.pop("device_id", None)
            return function(*args, **kwargs)

        return starting

    for name in ("init_process_group", "new_group", "new_subgroups", "new_subgroups_by_enumeration"):
        _set(distributed_c10d, dist, **{name: with_gloo(getattr(distributed_c10d, name))})
    _set(device_mesh, dist, init_device_mesh=_translated(device_mesh.init_device_mesh))
    _set(device_mesh.DeviceMesh, __init__=_translated(device_mesh.DeviceMesh.__init__))
    replicated = data_parallel.DistributedDataParallel.__init__

    @functools.wraps(replicated)
    def replicate(self: Any, module: nn.Module, *args: Any, **kwargs: Any) -> None:
        replicated(self, module, *args, **{**kwargs, "device_ids": None, "output_device": None})

    _set(data_parallel.DistributedDataParallel, __init__=replicate)
    _set(fully_sharded_data_parallel.FullyShardedDataParallel, __init__=_without_index(fsdp.FullyShardedDataParallel))


def _without_index(kind: Any) -> Callable[..., None]:
    """A constructor that takes no `device_id`, an index, or CUDA's name as the CPU."""
    original = kind.__init__

    @functools.wraps(original)
    def init(self: Any, *args: Any, **kwargs: Any) -> None:
        device = kwargs.get("device_id")
        # Without an accelerator torch's class wants to be told.
        if device is None or type(device) is int or _on_cpu(device) == "cpu":
            kwargs["device_id"] = torch.device("cpu")
        original(self, *args, **kwargs)

    return init


def _make_tests_for_cpu() -> None:
    original = common_device_type.instantiate_device_type_tests

    @functools.wraps(original)
    def instantiate(generic: Any, scope: Any, except_for: Any = None, only_for: Any = None, **kwargs: Any) -> None:
        made: Any = original
        made(generic, scope, except_for=None, only_for=("cpu",), **kwargs)

    _set(common_device_type, instantiate_device_type_tests=instantiate)

    train = common_fsdp.FSDPTestMixin._test_fsdp_parity

    @functools.wraps(train)
    def train_where_it_can_move(self: Any, *args: Any, **kwargs: Any) -> None:
        offload = kwargs.get("cpu_offload")
        moves = common_fsdp.DEVICEInitMode.DEVICE_AFTER in (*args, kwargs.get("device_init_mode"))
        # Offloaded parameters must not be moved to the GPU; here they stay where they are.
        if not (moves and offload is not None and offload.offload_params):
            train(self, *args, **kwargs)

    _set(common_fsdp.FSDPTestMixin, _test_fsdp_parity=train_where_it_can_move)

    _set(common_distributed, skip_if_lt_x_gpu=functools.partial(torch_compat.skip_if_lt_x_gpu, allow_cpu=True))
    # Classes that want a GPU for each rank get the CPU.
    _set(torch_compat.MultiProcessTestCase, cpu_world_size=_DEVICES)


install()
