"""
Triton kernels: Triton's interpreter runs them if it is on, else they are refused by name.

With `TRITON_INTERPRET=1` in the environment Triton runs a kernel in Python, on copies of its arguments in the memory of
the host. Here that counts as one operation of the current stream: it writes the tensors that it has changed, and reads
the others. The copies are Triton's, not the program's, so they are neither checked nor waits.

`triton.autotune` times the configurations of a kernel on a GPU. Here all are equally fast, and it takes the first.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor

from fsdp_conformance.simulator import checker
from fsdp_conformance.simulator.as_cuda.names import NotSimulated
from fsdp_conformance.simulator.device import SIMULATED, build
from fsdp_conformance.simulator.import_hook import when_imported
from fsdp_conformance.simulator.replacements import Replacements

_JIT, _INTERPRETER, _AUTOTUNER = "triton.runtime.jit", "triton.runtime.interpreter", "triton.runtime.autotuner"

_WHY = "it is compiled for a GPU. Set TRITON_INTERPRET=1, and Triton's interpreter runs it, with its accesses checked"


def install(replaced: Replacements) -> None:
    """Replace both ways to run a kernel, and the timing of its configurations, as soon as Triton is imported."""
    replaced.on_undo(when_imported(_JIT, functools.partial(_refuse, replaced)))
    replaced.on_undo(when_imported(_INTERPRETER, functools.partial(_interpret, replaced)))
    replaced.on_undo(when_imported(_AUTOTUNER, functools.partial(_autotune, replaced)))


def _refuse(replaced: Replacements) -> None:
    def run(self: Any, *args: Any, **kwargs: Any) -> Any:
        raise NotSimulated(f"the Triton kernel {_name_of(self)}", _WHY)

    replaced.set(sys.modules[_JIT].JITFunction, run=run)


def _interpret(replaced: Replacements) -> None:
    executor = sys.modules[_INTERPRETER].GridExecutor
    replaced.set(executor, __call__=_checked(executor.__call__))


def _autotune(replaced: Replacements) -> None:
    def bench(self: Any, *args: Any, config: Any, **kwargs: Any) -> list[float]:
        return [0.0, 0.0, 0.0]  # the quantiles of the time

    replaced.set(sys.modules[_AUTOTUNER].Autotuner, _bench=bench)


def _checked(call: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(call)
    def checking(self: Any, *args: Any, **kwargs: Any) -> Any:
        tensors = list(_tensors_in([*args, *kwargs.values()]))
        if not tensors:
            return call(self, *args, **kwargs)
        with checker.suspended():
            before = [_bytes_of(tensor) for tensor in tensors]
            result = call(self, *args, **kwargs)
            changed = [not torch.equal(old, _bytes_of(tensor)) for old, tensor in zip(before, tensors, strict=True)]
        reads, writes = (
            [tensor for tensor, is_changed in zip(tensors, changed, strict=True) if is_changed is kind]
            for kind in (False, True)
        )
        if build.active().note_kernel(reads, writes, f"Triton kernel {_name_of(self)}"):
            with checker.suspended():  # the mode "poison": what has raced becomes NaN
                for tensor in writes:
                    if tensor.is_floating_point():
                        tensor.fill_(float("nan"))
        return result

    return checking


def _tensors_in(values: Any) -> Iterator[Tensor]:
    """The tensors on the device, in tuples, descriptors and wrappers too; each once."""
    seen: set[int] = set()
    for value in values:
        if isinstance(value, Tensor):
            if value.device.type == SIMULATED and id(value) not in seen:
                seen.add(id(value))
                yield value
        elif isinstance(value, (list, tuple)):
            yield from _tensors_in(value)
        elif (base := getattr(value, "base", None)) is not None:  # a TensorDescriptor, a TensorWrapper
            yield from _tensors_in([base])


def _bytes_of(tensor: Tensor) -> Tensor:
    return tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8)


def _name_of(kernel: Any) -> str:
    function = getattr(kernel, "fn", kernel)
    return str(getattr(function, "__name__", type(function).__name__))
