"""
State that an engine must not change: random numbers, global settings of torch, the user's parameters.

    surroundings   the state of a process that training must not change; `left_alone` compares two such states
    settings       the part of it that wrapping must not change either
    Attached       parameters as user code sees them after wrapping: objects, dtypes, flags, a note of the user's
    replaced       functions of torch and its optimizers that have been replaced
"""

from __future__ import annotations

import hashlib
import inspect
import random
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from fsdp_conformance.checks.result import CheckResult, Tally
from fsdp_conformance.history.training import random_state

#: The attribute by which `Attached` recognises a parameter.
_NOTE = "note_of_the_user"


def surroundings() -> dict[str, str]:
    """The state of this process that training must not change, by name, as text that can be compared."""
    state = {
        "torch's random numbers": random_state(),
        "Python's random numbers": _digest(repr(random.getstate()).encode()),
        **settings(),
    }
    numpy = sys.modules.get("numpy")
    if numpy is not None:
        state["NumPy's random numbers"] = _digest(repr(numpy.random.get_state()).encode())
    return state


def settings() -> dict[str, str]:
    """The global settings of torch in this process, by name."""
    return {
        "the default dtype": str(torch.get_default_dtype()),
        "whether gradients are enabled": str(torch.is_grad_enabled()),
        "inference mode": str(torch.is_inference_mode_enabled()),
        "autocast on the CPU": str(torch.is_autocast_enabled("cpu")),
        "deterministic algorithms": str(torch.get_deterministic_debug_mode()),
        "anomaly detection": str(torch.is_anomaly_enabled()),
        "the number of threads": str(torch.get_num_threads()),
        "the precision of matrix products": torch.get_float32_matmul_precision(),
    }


def left_alone(
    before: Mapping[str, str], after: Mapping[str, str], *, rank: int, step: int | None, requirement: str
) -> CheckResult:
    """The surroundings after a step are the same as before it. Without a step, `after` is from after wrapping."""
    tally = Tally("surroundings", requirement, rank=rank)
    for name, value in before.items():
        if name in after:
            tally.compare(
                after[name] == value, name, expected=value, got=after[name],
                details=f"{'wrapping' if step is None else 'training'} must not change it",
                step=step, phase="init" if step is None else "step", likely=f"the engine changes {name}",
            )  # fmt: skip
    return tally.result()


@dataclass(slots=True)
class Attached:
    """The parameters of a wrapped model, to each of which the user has attached a note."""

    objects: dict[str, nn.Parameter]
    dtypes: dict[str, torch.dtype] = field(init=False)

    def __post_init__(self) -> None:
        self.dtypes = {name: parameter.dtype for name, parameter in self.objects.items()}
        for name, parameter in self.objects.items():
            setattr(parameter, _NOTE, name)

    def judged(self, now: Mapping[str, nn.Parameter], *, rank: int, step: int, requirement: str) -> CheckResult:
        """The parameters after a step are the same objects, with the same dtypes, and still have their notes."""
        tally = Tally("parameters of the user", requirement, rank=rank)
        for name, parameter in self.objects.items():
            where: dict[str, Any] = {"fqn": name, "step": step, "phase": "step"}
            current = now.get(name)
            tally.compare(
                current is parameter, "parameter", expected="the object that the optimizer got",
                got="none" if current is None else "another object", **where,
            )  # fmt: skip
            if current is not None:
                got, dtype = current.dtype, self.dtypes[name]
                tally.compare(got == dtype, "dtype of the parameter", expected=dtype, got=got, **where)
                note = getattr(current, _NOTE, None)
                tally.compare(note == name, "attribute of the parameter", expected=repr(name), got=repr(note), **where)
        return tally.result()


def torch_functions() -> dict[str, Any]:
    """Functions and methods that an engine may be tempted to replace, by name."""
    return dict(_functions())


def replaced(before: Mapping[str, Any]) -> list[str]:
    """The names of the functions in `before` that have been replaced since."""
    current = torch_functions()
    return [name for name, function in before.items() if current.get(name) is not function]


def _functions() -> Iterator[tuple[str, Any]]:
    for name, kind in vars(torch.optim).items():
        if isinstance(kind, type) and issubclass(kind, torch.optim.Optimizer):
            yield f"torch.optim.{name}", kind
            # Not `step`: torch itself wraps it in the class when the first optimizer of the class is made.
            yield from ((f"torch.optim.{name}.{key}", vars(kind).get(key)) for key in ("__init__", "zero_grad"))
    for place, owner in (
        ("torch", torch), ("torch.nn.functional", nn.functional), ("torch.nn.Module", nn.Module),
        ("torch.Tensor", Tensor), ("torch.autograd", torch.autograd), ("torch.nn.utils", nn.utils),
    ):  # fmt: skip
        # Most methods of tensors are those of a base class in C++.
        names = dir(owner) if owner is Tensor else list(vars(owner))
        for name in (name for name in names if not name.startswith("__")):
            function = inspect.getattr_static(owner, name)
            if callable(function) and not isinstance(function, type):
                yield f"{place}.{name}", function


def _digest(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()[:12]
