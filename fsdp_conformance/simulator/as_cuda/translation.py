"""
Runs a script that uses "cuda" on the simulated accelerator: `install()` translates its calls to torch.

It wraps torch's entry points, not its internals: factories, methods of tensors, modules and storages that take a
device, `torch.device` itself, autocast, GradScaler, meshes, process groups, checkpoints, and `torch.cuda`
(`cuda_module`). It does not use a TorchFunctionMode: modes belong to one thread, while backward hooks, data loaders and
the script's own threads run in others, and a mode would see every operation.

For the script, a simulated device has `device.type == "cuda"` and `tensor.is_cuda`; for torch it is what it is
(`cuda_names.script_asks`). Printed, it is "cuda:0", in messages of torch's C++ too (`messages`). Features without a
counterpart raise NotSimulated.
"""

from __future__ import annotations

import functools
import inspect
import sys
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.parallel.comm
from torch import _utils
from torch.nn.parameter import UninitializedTensorMixin  # type: ignore[attr-defined]
from torch.utils import _device
from torch.utils.data import dataloader

from fsdp_conformance.simulator.as_cuda import (
    attention,
    backends,
    custom_operators,
    distributed,
    dtensor_rng,
    refusals,
    sharing,
    tensor_types,
    triton_kernels,
    varlen,
)
from fsdp_conformance.simulator.as_cuda import error_messages as messages
from fsdp_conformance.simulator.as_cuda import torch_cuda as cuda_module
from fsdp_conformance.simulator.as_cuda.names import (
    CUDA,
    CUDA_VERSION,
    NotSimulated,
    script_asks,
    shown_to_script,
    simulated,
    simulated_map,
    translated,
)
from fsdp_conformance.simulator.checker.labels import Labels
from fsdp_conformance.simulator.device import SIMULATED, build
from fsdp_conformance.simulator.frames import Owner, owner
from fsdp_conformance.simulator.import_hook import when_imported
from fsdp_conformance.simulator.replacements import Replacements

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

#: Ways to make a tensor in a format that the device has not.
_FORMATS = {
    "compressed sparse tensors": (
        "sparse_compressed_tensor", "sparse_csr_tensor", "sparse_csc_tensor", "sparse_bsr_tensor", "sparse_bsc_tensor",
        "Tensor.to_sparse_csr", "Tensor.to_sparse_csc", "Tensor.to_sparse_bsr", "Tensor.to_sparse_bsc",
    ),
    "quantized tensors": (
        "quantize_per_tensor", "quantize_per_tensor_dynamic", "quantize_per_channel", "_empty_affine_quantized",
    ),
}  # fmt: skip

#: Priority of our handling of storages in checkpoints: before torch's own, which start at 10.
_PRIORITY = 5


def install(labels: Labels) -> Replacements:
    """
    Start translating, in this process. The accelerator must be active.

    `undo()` of the result stops it. What a program has taken meanwhile stays with it: tensors on the device, and
    functions of torch's that it imported by name, which still translate.
    """
    replaced = Replacements()
    # torch's list of factories is for `set_default_device`, and must contain the originals, not the wrappers.
    factories = _device._device_constructors()
    _install_device(replaced)
    refusals.install(replaced)
    cuda_module.install(replaced, labels)
    _install_factories(replaced, factories)
    _install_tensors(replaced)
    tensor_types.install(replaced)
    custom_operators.install(replaced)
    _install_mixed_precision(replaced)
    distributed.install(replaced)
    backends.install(replaced)
    sharing.install(replaced)
    attention.install(replaced)
    varlen.install(replaced)
    triton_kernels.install(replaced)
    dtensor_rng.install(replaced)
    _install_checkpoints(replaced)
    _install_refusals(replaced)
    messages.install(replaced)
    return replaced


def show_version(replaced: Replacements) -> None:
    """
    Programs find a version of CUDA in `torch.version.cuda`, which many of them parse.

    torch itself finds what it was built with: its tests would otherwise expect CUDA graphs and NVIDIA's libraries.
    """
    built_with = torch.version.cuda
    if built_with is not None:
        return

    def attribute(name: str) -> str | None:
        if name != "cuda":
            raise AttributeError(f"module {torch.version.__name__!r} has no attribute {name!r}")
        return CUDA_VERSION if owner(sys._getframe(1).f_code.co_filename) is Owner.USER else built_with

    del torch.version.cuda
    replaced.on_undo(functools.partial(setattr, torch.version, "cuda", built_with))
    replaced.set(torch.version, __getattr__=attribute)


def _install_device(replaced: Replacements) -> None:
    """`torch.device`, the classes that take one, and what a device says of itself."""
    extension = build.active()
    # The classes do not change, for isinstance, annotations and torch.jit.
    extension.translate_constructors([torch.device, torch.Generator, torch.Stream, torch.Event])
    replaced.on_undo(extension.leave_constructors)
    kind, long, short, reduce = (vars(torch.device)[name] for name in ("type", "__repr__", "__str__", "__reduce__"))

    def type_for_caller(device: torch.device) -> str:
        device_type: str = kind.__get__(device)
        return CUDA if device_type == SIMULATED and script_asks() else device_type

    def repr_for_caller(device: torch.device) -> str:
        text: str = long(device)
        return text.replace(f"'{SIMULATED}'", f"'{CUDA}'") if shown_to_script() else text

    def str_for_caller(device: torch.device) -> str:
        text: str = short(device)
        return CUDA + text.removeprefix(SIMULATED) if text.startswith(SIMULATED) and shown_to_script() else text

    def reduce_as_cuda(device: torch.device) -> Any:
        # A file is read where there may be GPUs, or where CUDA's names are translated.
        made, words = reduce(device)
        return made, tuple(CUDA if word == SIMULATED else word for word in words)

    replaced.set_on_class(
        torch.device,
        type=property(type_for_caller),
        __repr__=repr_for_caller,
        __str__=str_for_caller,
        __reduce__=reduce_as_cuda,
    )


def _install_factories(replaced: Replacements, factories: set[Callable[..., Any]]) -> None:
    for module in (torch, torch.fft, torch.nested, torch.sparse):
        for name, value in list(vars(module).items()):
            is_one = _hashable(value) and value in factories
            if is_one or (module is torch and name in _MORE_FACTORIES):
                replaced.set(module, **{name: translated(value)})
    for name in _ABOUT_DEVICES:
        if hasattr(torch, name):
            replaced.set(torch, **{name: translated(getattr(torch, name))})
    is_enabled, of_type = torch.is_autocast_enabled, torch.get_device_module

    def get_device_module(device: Any = None) -> Any:
        device_module = of_type(device)
        return torch.cuda if device_module is getattr(torch, SIMULATED) and script_asks() else device_module

    replaced.set(
        torch,
        # Without an argument it means CUDA.
        is_autocast_enabled=lambda device_type=CUDA: is_enabled(simulated(device_type)),
        get_autocast_gpu_dtype=functools.partial(torch.get_autocast_dtype, CUDA),
        get_device_module=get_device_module,
    )
    other = getattr(_utils, "_is_privateuse1_backend_available", None)
    if other is not None:
        # torch.testing asks: its tests are to run once for each device, under the name of CUDA.
        replaced.set(_utils, _is_privateuse1_backend_available=lambda: other() and not script_asks())


def _install_tensors(replaced: Replacements) -> None:
    methods = {name: translated(getattr(torch.Tensor, name)) for name in _METHODS}
    allowed = UninitializedTensorMixin._allowed_methods
    allowed_names = {name for name in (*methods, "cuda") if getattr(torch.Tensor, name) in allowed}
    replaced.set(torch.Tensor, **methods, cuda=_tensor_cuda)
    # Parameters of lazy modules may be moved before they have a shape.
    moving = [getattr(torch.Tensor, name) for name in allowed_names]
    replaced.set(UninitializedTensorMixin, _allowed_methods=[*allowed, *moving])
    replaced.set(torch.UntypedStorage, cuda=_storage_cuda, to=translated(torch.UntypedStorage.to))
    _install_loaders(replaced)
    # nn.Module.to parses its arguments with this.
    replaced.set(torch._C._nn, _parse_to=translated(torch._C._nn._parse_to))


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


def _install_loaders(replaced: Replacements) -> None:
    """In torch 2.6, data loaders ask whether there is CUDA before they pin memory; in 2.8, for an accelerator."""
    iterator = dataloader._BaseDataLoaderIter
    init = iterator.__init__

    @functools.wraps(init)
    def pinning_init(self: Any, loader: Any) -> None:
        init(self, loader)
        if not loader.pin_memory_device:
            self._pin_memory = loader.pin_memory

    if "torch.cuda.is_available()" in inspect.getsource(init):
        replaced.set(iterator, __init__=pinning_init)


def _install_mixed_precision(replaced: Replacements) -> None:
    extension = build.active()
    extension.set_cuda_names(True)
    replaced.on_undo(functools.partial(extension.set_cuda_names, False))
    mode, scaler = torch.amp.autocast_mode, torch.amp.grad_scaler
    replaced.set(mode.autocast, __init__=translated(mode.autocast.__init__))
    available = translated(mode.is_autocast_available)
    decorators = {name: translated(getattr(mode, name)) for name in ("custom_fwd", "custom_bwd")}
    for module in (mode, torch.amp):
        replaced.set(module, is_autocast_available=available, **decorators)
    # These were bound to "cuda" when torch was imported.
    bound = {name: functools.partial(decorator, device_type=CUDA) for name, decorator in decorators.items()}
    for module in (torch.cuda.amp, torch.cuda.amp.autocast_mode):
        replaced.set(module, **bound)
    init = scaler.GradScaler.__init__

    @functools.wraps(init)
    def scaler_init(self: torch.amp.GradScaler, device: str = CUDA, *args: Any, **kwargs: Any) -> None:
        init(self, simulated(device), *args, **kwargs)

    replaced.set(scaler.GradScaler, __init__=scaler_init)


def _install_checkpoints(replaced: Replacements) -> None:
    """Storages on sim:0 are saved as "cuda:0", and "cuda:0" is loaded to sim:0."""

    def tag(storage: Any) -> str | None:
        device = storage.device
        return f"{CUDA}:{device.index or 0}" if device.type == SIMULATED else None

    def restore(storage: Any, location: str) -> Any:
        place = simulated(location)
        return None if place == location else storage.to(device=torch.device(place))

    registered = torch.serialization._package_registry
    before = list(registered)
    torch.serialization.register_package(_PRIORITY, tag, restore)
    (entry,) = (entry for entry in registered if entry not in before)
    replaced.on_undo(functools.partial(registered.remove, entry))
    load = torch.load

    @functools.wraps(load)
    def loading(f: Any, map_location: Any = None, *args: Any, **kwargs: Any) -> Any:
        return load(f, simulated_map(map_location), *args, **kwargs)

    for module in (torch, torch.serialization):
        replaced.set(module, load=loading)


def _install_refusals(replaced: Replacements) -> None:
    """Reject what would compile code for a GPU, or copy between the GPUs of one process; and formats of tensors."""
    for kind, names in _FORMATS.items():
        for name in names:
            owner: Any = torch.Tensor if name.startswith("Tensor.") else torch
            bare = name.removeprefix("Tensor.")
            if hasattr(owner, bare):
                replaced.set(owner, **{bare: _without_format(getattr(owner, bare), name, kind)})
    replaced.on_undo(when_imported("torch.utils.cpp_extension", functools.partial(_refuse_kernels, replaced)))


def _refuse_kernels(replaced: Replacements) -> None:
    module = sys.modules["torch.utils.cpp_extension"]
    for name in ("load", "load_inline"):
        replaced.set(module, **{name: _without_cuda(getattr(module, name), name)})


def _without_format(function: Callable[..., Any], name: str, kind: str) -> Callable[..., Any]:
    @functools.wraps(function)
    def checking(*args: Any, **kwargs: Any) -> Any:
        tensors = (value for value in (*args, *kwargs.values()) if isinstance(value, torch.Tensor))
        places = [tensor.device.type for tensor in tensors]
        if kwargs.get("device") is not None:
            places = [torch.device(kwargs["device"]).type]
        if SIMULATED in places:
            why = f"it has no {kind}. Use dense tensors, or sparse ones in coordinate format"
            raise NotSimulated(f"torch.{name} on a GPU", why)
        return function(*args, **kwargs)

    return checking


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
