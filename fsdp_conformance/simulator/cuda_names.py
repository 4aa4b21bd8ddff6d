"""
The words of CUDA in those of the simulated accelerator, and who is asking.

A script that says "cuda" under `--as-cuda` gets the device "sim". What it says to torch is translated on the way in.
What torch says to it stays as it is, for torch itself; to the script, `device.type` says "cuda" and `is_cuda` True,
because scripts decide by them. So the two questions are answered by who asks.
"""

from __future__ import annotations

import functools
import os
import re
import sys
import sysconfig
from collections.abc import Callable
from typing import Any

import torch

from fsdp_conformance.config import SIMULATED

CUDA = "cuda"

#: The collectives of the simulated accelerator, in place of NCCL.
COLLECTIVES = "simccl"

_WORD = re.compile(r"cuda(?::(\d+))?\Z")

_TORCH = os.path.dirname(torch.__file__) + os.sep
_STDLIB = sysconfig.get_path("stdlib") + os.sep
_PACKAGE = os.path.dirname(os.path.dirname(os.path.abspath(__file__))) + os.sep
_OWN = tuple(_PACKAGE + part + os.sep for part in ("simulator", "harness"))


class NotSimulated(NotImplementedError):
    """Something of CUDA that has no counterpart on the simulated accelerator."""

    def __init__(self, what: str, why: str) -> None:
        super().__init__(f"{what} has no counterpart on the simulated accelerator: {why}")


def simulated(value: Any) -> Any:
    """ "sim" for "cuda", "sim:1" for "cuda:1"; anything else as it is."""
    if type(value) is str and value.startswith(CUDA):
        found = _WORD.match(value)
        if found:
            return SIMULATED if found[1] is None else f"{SIMULATED}:{found[1]}"
    return value


def simulated_backend(backend: Any) -> Any:
    """
    The backend of a process group: "nccl" is the simulated accelerator's, alone or in "cpu:gloo,cuda:nccl".

    gloo carries tensors of a GPU through the host; here they take the simulated collectives instead.
    """
    if not isinstance(backend, str):
        return backend
    if ":" in backend:
        pairs = (pair.strip().partition(":") for pair in backend.split(","))
        return ",".join(
            f"{SIMULATED}:{COLLECTIVES}" if device == CUDA else f"{device}:{name}" for device, _, name in pairs
        )
    return {"nccl": COLLECTIVES, "gloo": f"cpu:gloo,{SIMULATED}:{COLLECTIVES}"}.get(backend.lower(), backend)


def simulated_map(location: Any) -> Any:
    """`map_location` of torch.load: a word, a mapping from words to words, or a function."""
    if isinstance(location, dict):
        # Storages carry the name that they were saved under, which is "cuda" for either.
        return {key: simulated(value) for key, value in location.items()}
    return simulated(location)


def translated(function: Callable[..., Any]) -> Callable[..., Any]:
    """The function, with every word of CUDA among its arguments translated."""

    @functools.wraps(function)
    def translating(*args: Any, **kwargs: Any) -> Any:
        for value in args:
            if type(value) is str:
                args = tuple(map(simulated, args))
                break
        for name, value in kwargs.items():
            if type(value) is str:
                kwargs[name] = simulated(value)
        return function(*args, **kwargs)

    return translating


def script_asks(depth: int = 1) -> bool:
    """Whether the caller's caller (at depth 1) is the script or a library that it uses, not torch or this package."""
    return _is_script(sys._getframe(depth + 1).f_code.co_filename)


def is_own(filename: str) -> bool:
    """Whether a file is of this package's machinery."""
    return filename.startswith(_OWN)


@functools.lru_cache(maxsize=4096)
def _is_script(filename: str) -> bool:
    if filename.startswith(_TORCH) or is_own(filename):
        return False
    # site-packages may lie below the standard library's folder.
    return not (filename.startswith(_STDLIB) and "site-packages" not in filename)


class _StandIn(type):
    """The class of classes that stand for another one, whose instances they make from translated arguments."""

    _real: type

    def __call__(cls, *args: Any, **kwargs: Any) -> Any:
        return translated(cls._real)(*args, **kwargs)

    def __instancecheck__(cls, instance: object) -> bool:
        return isinstance(instance, cls._real)

    def __subclasscheck__(cls, subclass: type) -> bool:
        return issubclass(subclass, cls._real)

    def __getattr__(cls, name: str) -> Any:
        return getattr(cls._real, name)

    def __eq__(cls, other: object) -> bool:
        return other is cls or other is cls._real

    def __hash__(cls) -> int:
        return hash(cls._real)


def replace(owner: object, **values: Any) -> None:
    """Put these in the place of the attributes of that name."""
    for name, value in values.items():
        setattr(owner, name, value)


def stand_in(real: type) -> type:
    """
    A class that makes instances of `real`, and of which every instance of `real` is one.

    For classes of C++ that cannot be subclassed or patched: `torch.device("cuda")` gives the simulated device, and
    `isinstance(device, torch.device)` keeps its meaning. Pickles name it as they name `real`.
    """
    names = {"_real": real, "__module__": real.__module__, "__qualname__": real.__qualname__, "__doc__": real.__doc__}
    return _StandIn(real.__name__, (), names)
