"""
CUDA's names translated to those of the simulated accelerator, and who is asking: the script or torch.

A script that asks for "cuda" gets the device "sim": its arguments to torch are translated. Torch's answers are not,
because torch needs them unchanged, except where scripts branch on them: for the script, `device.type` is "cuda" and
`is_cuda` is True. So the answer to these depends on the caller. Texts (`str(device)`) say "cuda" for everyone.
"""

from __future__ import annotations

import functools
import os
import re
import sys
from collections.abc import Callable, Iterable
from functools import lru_cache
from types import FrameType
from typing import Any

from fsdp_conformance.simulator.device import SIMULATED
from fsdp_conformance.simulator.frames import Owner, below_torch, owner

CUDA = "cuda"

#: Torch's version of CUDA, where something asks for one.
CUDA_VERSION = "12.8"

#: The backend that replaces NCCL.
COLLECTIVES = "simccl"

_WORD = re.compile(r"cuda(?::(\d+))?\Z")

#: A script may also run code that has no file.
_SCRIPT = frozenset({Owner.USER, Owner.NO_FILE, Owner.RUNNER})

#: The parts of torch that ask for tests and scripts: its test harness and torchrun; collectives with gradients and the
#: log of errors, which branch on the name of the backend. Below torch's directory.
_ASKING = (
    "testing/", "distributed/run.py", "distributed/launcher/", "distributed/nn/functional.py",
    "distributed/c10d_logger.py",
)  # fmt: skip

#: Directories whose code sees the device as it is, next to torch's and this package's machinery.
_own_names: set[str] = set()


class NotSimulated(NotImplementedError):
    """A feature of CUDA without a counterpart on the simulated accelerator."""

    def __init__(self, what: str, why: str) -> None:
        super().__init__(f"{what} has no counterpart on the simulated accelerator: {why}")


def simulated(value: Any) -> Any:
    """ "sim" for "cuda", "sim:1" for "cuda:1"; other values unchanged."""
    if type(value) is str and value.startswith(CUDA):
        match = _WORD.match(value)
        if match:
            return SIMULATED if match[1] is None else f"{SIMULATED}:{match[1]}"
    return value


def simulated_backend(backend: Any) -> Any:
    """
    The backend of a process group: "nccl" becomes the simulated backend, alone or in "cpu:gloo,cuda:nccl".

    gloo would move GPU tensors through the host; here they use the simulated backend instead.
    """
    if not isinstance(backend, str):
        return backend
    if ":" in backend:
        pairs = (pair.strip().partition(":") for pair in backend.split(","))
        return ",".join(
            f"{SIMULATED}:{COLLECTIVES}" if device == CUDA else f"{device}:{name}" for device, _, name in pairs
        )
    return {"nccl": COLLECTIVES, "gloo": f"cpu:gloo,{SIMULATED}:{COLLECTIVES}"}.get(backend.lower(), backend)


def asks_for_gloo(backend: Any) -> bool | None:
    """True if a backend means gloo for GPUs: "gloo", "cpu:gloo,cuda:gloo"; None if there is none."""
    if not isinstance(backend, str):
        return None
    pairs = dict(pair.strip().lower().partition(":")[::2] for pair in backend.split(","))
    return "gloo" in pairs or pairs.get(CUDA) == "gloo"


def simulated_map(location: Any) -> Any:
    """`map_location` of torch.load: a name, a mapping from names to names, or a function."""
    if isinstance(location, dict):
        # The keys are names in the file, which are "cuda" in both cases.
        return {key: simulated(value) for key, value in location.items()}
    return simulated(location)


def translated(function: Callable[..., Any]) -> Callable[..., Any]:
    """The function, with CUDA's names among its arguments translated."""

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
    """
    True if the caller's caller (at depth 1) is the script or a library that it uses, not torch or this package.

    torch.testing asks for the test that uses it, torchrun for the script, the standard library for its caller.
    """
    return asks_for_script(sys._getframe(depth + 1))


def asks_for_script(frame: FrameType | None) -> bool:
    """True if the code of a frame asks for the script: see `script_asks`."""
    while frame is not None:
        answer = _asks_for_script(frame.f_code.co_filename)
        if answer is not None:
            return answer
        frame = frame.f_back
    return True


def keep_own_names(directories: Iterable[str]) -> None:
    """
    From now on, code below these directories sees the device as "sim" in this process.

    For a program that judges an engine next to which it runs: the engine sees "cuda", the program does not.
    """
    _own_names.update(directory.rstrip(os.sep) + os.sep for directory in directories)
    _asks_for_script.cache_clear()


@lru_cache(maxsize=4096)
def _asks_for_script(file: str) -> bool | None:
    """True if code in a file asks for the script; None if its caller decides."""
    if file.startswith(tuple(_own_names)):
        return False
    who = owner(file)
    if who is Owner.TORCH:
        return (below_torch(file) or "").startswith(_ASKING)
    return None if who is Owner.PYTHON else who in _SCRIPT


def shown_to_script(depth: int = 1) -> bool:
    """True if the caller's caller wants text for people: all but this package do, as torch puts it in messages."""
    return owner(sys._getframe(depth + 1).f_code.co_filename) is not Owner.MACHINERY


class _StandIn(type):
    """The metaclass of stand-ins: calling one makes an instance of the real class, from translated arguments."""

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


def stand_in(real: type) -> type:
    """
    A class that makes instances of `real`, and of which every instance of `real` is an instance.

    For C++ classes that cannot be subclassed or patched: `torch.device("cuda")` returns the simulated device, and
    `isinstance(device, torch.device)` keeps its meaning. Pickles refer to it as to `real`.
    """
    names = {"_real": real, "__module__": real.__module__, "__qualname__": real.__qualname__, "__doc__": real.__doc__}
    return _StandIn(real.__name__, (), names)
