"""
Operators that a program defines with `torch.library`: their kernels for CUDA run on the simulated device.

Such a kernel is Python code, and what it asks of torch is checked like the rest of the program. An operator that the
program implements for the CPU alone raises CUDA's error, where the device would run the CPU's kernel. Operators that
torch itself defines for CUDA keep their kernels: most of them are written in Triton or call NVIDIA's libraries.
"""

from __future__ import annotations

import functools
import re
import sys
from collections.abc import Callable
from typing import Any

import torch
import torch.library
from torch._library.custom_ops import CustomOpDef

from fsdp_conformance.simulator.as_cuda.names import asks_for_script, simulated
from fsdp_conformance.simulator.device import build
from fsdp_conformance.simulator.frames import below_torch
from fsdp_conformance.simulator.replacements import Replacements

__all__ = ["install"]

#: torch's files, below its directory, that register operators for their callers.
_REGISTERING = ("library.py", "_library/", "_custom_op", "_compile.py", "_dynamo/", "utils/_contextlib.py")

#: The keys of CUDA by which operations are dispatched: "CUDA", "AutogradCUDA", "SparseCUDA".
_KEY = re.compile(r"(\w*)CUDA")


def install(replaced: Replacements) -> None:
    """Replace the functions that register kernels."""
    library: Any = torch.library.Library
    replaced.set(
        library,
        __init__=_with_key(library.__init__, 3),
        impl=_noting_cpu_only(_with_key(library.impl, 3), library.impl),
        fallback=_with_key(library.fallback, 2),
    )
    replaced.on_undo(build.active().clear_cpu_only)
    operator: Any = CustomOpDef
    for owner, names in (
        (operator, ("register_kernel", "set_kernel_enabled", "register_autocast")),
        (torch.library, ("register_kernel", "register_autocast", "impl", "get_kernel")),
    ):
        for name in names:
            if hasattr(owner, name):  # not in every version
                replaced.set(owner, **{name: _with_devices(getattr(owner, name))})


def _program_registers() -> bool:
    """True if the program registers a kernel, itself or through torch's functions for that; not torch."""
    frame = sys._getframe(2)
    while frame.f_back is not None:
        file = frame.f_code.co_filename
        if not (below_torch(file) or "").startswith(_REGISTERING) and file != __file__:
            return asks_for_script(frame)
        frame = frame.f_back
    return True


def _key(key: Any) -> Any:
    """ "PrivateUse1" for "CUDA"; other keys unchanged."""
    match = _KEY.fullmatch(key) if isinstance(key, str) else None
    if match is None:
        return key
    renamed = f"{match[1]}PrivateUse1"
    return renamed if torch._C._parse_dispatch_key(renamed) else key


def _device_or_key(value: Any) -> Any:
    """For the name of a device, of a key, or several of them."""
    if isinstance(value, (list, tuple)):
        return type(value)(map(_device_or_key, value))
    return _key(simulated(value))


def _with_key(function: Callable[..., Any], place: int) -> Callable[..., Any]:
    """The function, with its argument `dispatch_key`, which may be at `place`, translated for the program."""

    @functools.wraps(function)
    def translating(*args: Any, **kwargs: Any) -> Any:
        if _program_registers():
            if "dispatch_key" in kwargs:
                kwargs["dispatch_key"] = _key(kwargs["dispatch_key"])
            args = (*args[:place], *map(_key, args[place : place + 1]), *args[place + 1 :])
        return function(*args, **kwargs)

    return translating


def _with_devices(function: Callable[..., Any]) -> Callable[..., Any]:
    """The function, with the names of devices and keys among its arguments translated for the program."""

    @functools.wraps(function)
    def translating(*args: Any, **kwargs: Any) -> Any:
        if _program_registers():
            args = tuple(map(_device_or_key, args))
            kwargs = {name: _device_or_key(value) for name, value in kwargs.items()}
        return function(*args, **kwargs)

    return translating


def _noting_cpu_only(register: Callable[..., Any], original: Callable[..., Any]) -> Callable[..., Any]:
    """
    `Library.impl`, which also notes what the program implements for the CPU.

    An operation that has a kernel for the device as well, or one for all devices, never asks whether it was noted.
    torch's own operations stay out: they have kernels for CUDA.
    """

    @functools.wraps(original)
    def implement(library: Any, op_name: Any, fn: Any, dispatch_key: str = "", **options: Any) -> Any:
        result = register(library, op_name, fn, dispatch_key, **options)
        if (dispatch_key or library.dispatch_key) == "CPU" and library.ns != "aten" and _program_registers():
            name = op_name if isinstance(op_name, str) else op_name._schema.name
            build.active().add_cpu_only(f"{library.ns}::{name.rpartition('::')[2]}")
        return result

    return implement
