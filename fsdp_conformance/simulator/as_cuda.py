"""
Runs a script that uses "cuda" on the simulated accelerator: `install()` translates its calls to torch.

It wraps torch's entry points, not its internals: factories, methods of tensors, modules and storages that take a
device, `torch.device` itself, autocast, GradScaler, meshes, process groups, checkpoints, and `torch.cuda`
(`cuda_module`). It does not use a TorchFunctionMode: modes belong to one thread, while backward hooks, data loaders and
the script's own threads run in others, and a mode would see every operation.

For the script, a simulated device has `device.type == "cuda"` and `tensor.is_cuda`; for torch it is what it is
(`cuda_names.script_asks`). Printed, it is "sim:0". Features without a counterpart raise NotSimulated.
"""

from __future__ import annotations

import ctypes
import functools
import gc
import re
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.parallel.comm
import torch.utils.cpp_extension
from torch.distributed import device_mesh, distributed_c10d
from torch.utils import _device

from fsdp_conformance.config import SIMULATED
from fsdp_conformance.simulator import cuda_module
from fsdp_conformance.simulator.cuda_names import (
    COLLECTIVES,
    CUDA,
    NotSimulated,
    replace,
    script_asks,
    simulated,
    simulated_backend,
    simulated_map,
    stand_in,
    translated,
)
from fsdp_conformance.simulator.labels import Labels

#: Factories that are missing from torch's own list.
_MORE_FACTORIES = (
    "normal", "empty_like", "full_like", "ones_like", "rand_like", "randint_like", "randn_like", "zeros_like",
)  # fmt: skip

#: Tensor methods that take a device.
_METHODS = (
    "to", "new", "new_empty", "new_empty_strided", "new_full", "new_ones", "new_tensor", "new_zeros", "pin_memory",
    "is_pinned",
)  # fmt: skip

#: Functions of torch that take a device type.
_ABOUT_DEVICES = (
    "get_autocast_dtype", "set_autocast_dtype", "set_autocast_enabled", "set_default_device", "get_device_module",
)  # fmt: skip

#: Priority of our handling of storages in checkpoints: before torch's own, which start at 10.
_PRIORITY = 5

_TENSOR_TYPES = {
    "FloatTensor": torch.float32,
    "DoubleTensor": torch.float64,
    "HalfTensor": torch.float16,
    "BFloat16Tensor": torch.bfloat16,
    "LongTensor": torch.int64,
    "IntTensor": torch.int32,
    "ShortTensor": torch.int16,
    "CharTensor": torch.int8,
    "ByteTensor": torch.uint8,
    "BoolTensor": torch.bool,
}


def install(labels: Labels) -> list[str]:
    """
    Start translating, in this process. Returns a sentence for each thing that could not be done.

    There is no way back: a process that runs a script is not used for anything else.
    """
    # torch's list of factories is for `set_default_device`, and must contain the originals, not the wrappers.
    factories = _device._device_constructors()
    notes = _install_device()
    cuda_module.install(labels)
    _install_factories(factories)
    _install_tensors()
    _install_mixed_precision()
    _install_distributed()
    _install_checkpoints()
    _install_refusals()
    return notes


def _install_device() -> list[str]:
    """`torch.device`, the classes that take one, and `device.type` for the script."""
    real = torch.device
    notes = []
    if not _patch_type_attribute(real):
        notes.append("device.type is 'sim' for the script, because this Python does not let torch.device be patched")
    replace(torch, **{kind.__name__: stand_in(kind) for kind in (real, torch.Generator, torch.Stream, torch.Event)})
    return notes


def _patch_type_attribute(real: type) -> bool:
    """
    Make `device.type` "cuda" for the script. Returns whether it worked.

    C++ classes do not support `setattr`, but behind the view of the class dictionary is an ordinary one. CPython is
    then told that the class has changed. The result is verified, because none of this is documented.
    """
    members = next((found for found in gc.get_referents(real.__dict__) if isinstance(found, dict)), None)
    if members is None or "type" not in members:
        return False
    original = members["type"]

    def type_for_caller(device: torch.device) -> str:
        kind: str = original.__get__(device)
        return CUDA if kind == SIMULATED and script_asks() else kind

    members["type"] = property(type_for_caller)
    ctypes.pythonapi.PyType_Modified(ctypes.py_object(real))
    # Ask as a script would, from code that belongs to no known file.
    answer = eval(compile("device.type", "<script>", "eval"), {"device": real(SIMULATED, 0)})  # noqa: S307 - ours
    return bool(answer == CUDA and real(SIMULATED, 0).type == SIMULATED)


def _install_factories(factories: set[Callable[..., Any]]) -> None:
    for module in (torch, torch.fft, torch.nested, torch.sparse):
        for name, value in list(vars(module).items()):
            is_one = _hashable(value) and value in factories
            if is_one or (module is torch and name in _MORE_FACTORIES):
                replace(module, **{name: translated(value)})
    for name in _ABOUT_DEVICES:
        if hasattr(torch, name):
            replace(torch, **{name: translated(getattr(torch, name))})
    asked = torch.is_autocast_enabled
    replace(
        torch,
        # Without an argument it means CUDA.
        is_autocast_enabled=lambda device_type=CUDA: asked(simulated(device_type)),
        get_autocast_gpu_dtype=functools.partial(torch.get_autocast_dtype, CUDA),
        set_default_tensor_type=_set_default_tensor_type,
    )


def _install_tensors() -> None:
    methods = {name: translated(getattr(torch.Tensor, name)) for name in _METHODS}
    typed = _tensor_type_method(torch.Tensor.type)
    replace(torch.Tensor, **methods, cuda=_tensor_cuda, is_cuda=property(_is_cuda), type=typed)
    replace(torch.UntypedStorage, cuda=_storage_cuda, to=translated(torch.UntypedStorage.to))
    # nn.Module.to parses its arguments with this.
    replace(torch._C._nn, _parse_to=translated(torch._C._nn._parse_to))


def _tensor_cuda(
    self: torch.Tensor,
    device: Any = None,
    non_blocking: bool = False,
    memory_format: torch.memory_format = torch.preserve_format,
) -> torch.Tensor:
    return self.to(_place(device), non_blocking=non_blocking, memory_format=memory_format)


def _storage_cuda(self: torch.UntypedStorage, device: Any = None, non_blocking: bool = False) -> Any:
    return self.to(device=_place(device), non_blocking=non_blocking)


def _place(device: Any) -> torch.device:
    """The device in `cuda(device)`: an index, a name, a device, or None for the current one."""
    if device is None:
        return torch.device(SIMULATED, getattr(torch, SIMULATED).current_device())
    return torch.device(SIMULATED, device) if isinstance(device, int) else torch.device(device)


def _is_cuda(self: torch.Tensor) -> bool:
    return self.device.type == SIMULATED and script_asks()


def _tensor_type_method(original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def typed(self: torch.Tensor, dtype: Any = None, non_blocking: bool = False, **kwargs: Any) -> Any:
        if dtype is None:
            return original(self).replace(f"torch.{SIMULATED}.", f"torch.{CUDA}.")
        found = _cuda_tensor_type(dtype)
        if found is not None:
            return self.to(device=SIMULATED, dtype=found, non_blocking=non_blocking)
        return original(self, dtype, non_blocking, **kwargs)

    return typed


def _cuda_tensor_type(kind: Any) -> torch.dtype | None:
    """The dtype of `torch.cuda.FloatTensor` and the like, given as a class or by name."""
    name = kind if isinstance(kind, str) else f"{getattr(kind, '__module__', '')}.{getattr(kind, '__name__', '')}"
    found = re.fullmatch(r"torch\.cuda\.(\w+)", name)
    return _TENSOR_TYPES.get(found[1]) if found else None


def _set_default_tensor_type(kind: Any, _original: Callable[..., Any] = torch.set_default_tensor_type) -> None:
    dtype = _cuda_tensor_type(kind)
    if dtype is None:
        _original(kind)
        return
    torch.set_default_dtype(dtype)
    torch.set_default_device(SIMULATED)


def _install_mixed_precision() -> None:
    mode, scaler = torch.amp.autocast_mode, torch.amp.grad_scaler
    replace(mode.autocast, __init__=translated(mode.autocast.__init__))
    available = translated(mode.is_autocast_available)
    decorators = {name: translated(getattr(mode, name)) for name in ("custom_fwd", "custom_bwd")}
    for module in (mode, torch.amp):
        replace(module, is_autocast_available=available, **decorators)
    # These were bound to "cuda" when torch was imported.
    bound = {name: functools.partial(decorator, device_type=CUDA) for name, decorator in decorators.items()}
    for module in (torch.cuda.amp, torch.cuda.amp.autocast_mode):
        replace(module, **bound)
    init = scaler.GradScaler.__init__

    @functools.wraps(init)
    def scaler_init(self: torch.amp.GradScaler, device: str = CUDA, *args: Any, **kwargs: Any) -> None:
        init(self, simulated(device), *args, **kwargs)

    replace(scaler.GradScaler, __init__=scaler_init)


def _install_distributed() -> None:
    for name in ("init_process_group", "new_group", "new_subgroups", "new_subgroups_by_enumeration"):
        wrapper = _with_backend(getattr(distributed_c10d, name))
        for module in (distributed_c10d, dist):
            replace(module, **{name: wrapper})
    asked, said = distributed_c10d.is_nccl_available, distributed_c10d.get_backend

    def is_nccl_available() -> bool:
        return True if script_asks() else asked()

    @functools.wraps(said)
    def get_backend(group: Any = None) -> Any:
        backend = said(group)
        return "nccl" if COLLECTIVES in str(backend) and script_asks() else backend

    for module in (distributed_c10d, dist):
        replace(module, is_nccl_available=is_nccl_available, get_backend=get_backend)
    make = translated(device_mesh.init_device_mesh)
    for module in (device_mesh, dist):
        replace(module, init_device_mesh=make)
    replace(device_mesh.DeviceMesh, __init__=translated(device_mesh.DeviceMesh.__init__))


def _with_backend(function: Callable[..., Any]) -> Callable[..., Any]:
    """The function with `backend` translated: the first argument of init_process_group, a keyword of the others."""

    @functools.wraps(function)
    def translating(*args: Any, **kwargs: Any) -> Any:
        if args and isinstance(args[0], str):
            args = (simulated_backend(args[0]), *args[1:])
        if "backend" in kwargs:
            kwargs["backend"] = simulated_backend(kwargs["backend"])
        return function(*args, **kwargs)

    return translating


def _install_checkpoints() -> None:
    """Storages on sim:0 are saved as "cuda:0", and "cuda:0" is loaded to sim:0."""

    def tag(storage: Any) -> str | None:
        device = storage.device
        return f"{CUDA}:{device.index or 0}" if device.type == SIMULATED else None

    def restore(storage: Any, location: str) -> Any:
        place = simulated(location)
        return None if place == location else storage.to(device=torch.device(place))

    torch.serialization.register_package(_PRIORITY, tag, restore)
    load = torch.load

    @functools.wraps(load)
    def loading(f: Any, map_location: Any = None, *args: Any, **kwargs: Any) -> Any:
        return load(f, simulated_map(map_location), *args, **kwargs)

    for module in (torch, torch.serialization):
        replace(module, load=loading)


def _install_refusals() -> None:
    """Reject what would compile code for a GPU, or copy between the GPUs of one process."""
    for name in ("load", "load_inline"):
        refusing = _without_cuda(getattr(torch.utils.cpp_extension, name), name)
        replace(torch.utils.cpp_extension, **{name: refusing})
    for name in ("broadcast", "broadcast_coalesced", "gather", "scatter"):
        replace(torch.nn.parallel.comm, **{name: _without_data_parallel})


def _without_data_parallel(*args: Any, **kwargs: Any) -> Any:
    raise NotSimulated(
        "torch.nn.DataParallel", "its copies exist only in builds for CUDA. Use DDP, with one rank per GPU"
    )


def _without_cuda(function: Callable[..., Any], name: str) -> Callable[..., Any]:
    @functools.wraps(function)
    def checking(*args: Any, **kwargs: Any) -> Any:
        sources = kwargs.get("sources", args[1] if len(args) > 1 and name == "load" else ())
        files = [sources] if isinstance(sources, str) else list(sources or ())
        if kwargs.get("with_cuda") or kwargs.get("cuda_sources") or any(str(file).endswith(".cu") for file in files):
            raise NotSimulated(
                f"a CUDA kernel of torch.utils.cpp_extension.{name}", "it runs the CPU kernels of torch's own operators"
            )
        return function(*args, **kwargs)

    return checking


def _hashable(value: object) -> bool:
    return getattr(type(value), "__hash__", None) is not None and callable(value)
