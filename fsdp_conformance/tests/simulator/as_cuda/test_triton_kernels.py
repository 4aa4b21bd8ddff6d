"""
Triton kernels, with a stand-in for Triton that runs a kernel as its interpreter does: on copies on the host.

Triton itself (3.9.0) has the same methods. Triton is too large to be a dependency of the tests.
"""

from __future__ import annotations

import sys
import types
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from fsdp_conformance.simulated_cuda import simulated_cuda
from fsdp_conformance.simulator import checker
from fsdp_conformance.simulator.as_cuda.names import NotSimulated
from fsdp_conformance.simulator.checker.hazard import HazardKind
from fsdp_conformance.tests.simulator.simulator_process import compiled, in_process_of_its_own

pytestmark = compiled


class GridExecutor:
    """The interpreter: it copies the arguments to the host, runs the function, and copies all of them back."""

    def __init__(self, fn: Callable[..., None]) -> None:
        self.fn = fn

    def __call__(self, *args: Any, **kwargs: Any) -> None:
        copies = [_to_host(arg) for arg in args]
        self.fn(*copies, **kwargs)
        for arg, copy in zip(args, copies, strict=True):
            if isinstance(arg, Tensor):
                arg.copy_(copy)


class JITFunction:
    """A kernel that is compiled for a GPU."""

    def __init__(self, fn: Callable[..., None]) -> None:
        self.fn = fn

    def run(self, *args: Any, **kwargs: Any) -> None:
        raise AssertionError("libcuda.so cannot be found")


class Autotuner:
    """It takes the fastest configuration of a kernel, which it finds out on a GPU."""

    def __init__(self, kernel: GridExecutor, factors: list[float]) -> None:
        self.kernel, self.factors = kernel, factors

    def _bench(self, *args: Any, config: float, **kwargs: Any) -> list[float]:
        raise AssertionError("libcuda.so cannot be found")

    def run(self, *args: Any) -> None:
        fastest = min(self.factors, key=lambda factor: self._bench(*args, config=factor))
        self.kernel(*args, fastest)


def _to_host(arg: Any) -> Any:
    return arg.cpu() if isinstance(arg, Tensor) else arg


def _import_triton() -> None:
    for name in ("triton", *(f"triton.runtime{part}" for part in ("", ".jit", ".interpreter", ".autotuner"))):
        module: Any = types.ModuleType(name)
        module.__spec__ = types.SimpleNamespace(_initializing=False)
        module.JITFunction, module.GridExecutor, module.Autotuner = JITFunction, GridExecutor, Autotuner
        sys.modules[name] = module


def scale(x: Tensor, out: Tensor, factor: float) -> None:
    """A kernel."""
    out[:] = x * factor


@pytest.mark.slow
@in_process_of_its_own
def test_a_compiled_kernel_is_refused_by_name() -> None:
    _import_triton()
    with simulated_cuda(1), pytest.raises(NotSimulated, match=r"the Triton kernel scale .* Set TRITON_INTERPRET=1"):
        JITFunction(scale).run(torch.ones(2, device="cuda"), grid=(1,))


@pytest.mark.slow
@in_process_of_its_own
def test_an_interpreted_kernel_is_one_operation_of_its_stream() -> None:
    """Its result need not be written before, its copies are no waits, and what it reads and writes can race."""
    _import_triton()
    kernel = GridExecutor(scale)
    with simulated_cuda(1, hazards="report"):
        x, side = torch.ones(4, device="cuda"), torch.cuda.Stream()
        for waits in (True, False):
            out = torch.empty(4, device="cuda")
            side.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(side):
                kernel(x, out, 3.0)
            if waits:
                torch.cuda.current_stream().wait_stream(side)
            out.add_(1)
            found = checker.hazards()
            checker.clear_hazards()
            assert [hazard.kind for hazard in found] == [] if waits else [HazardKind.READ_AFTER_WRITE]
            torch.cuda.synchronize()
            assert out.tolist() == [4.0] * 4
        assert found[0].then.site.op == "Triton kernel scale"


@pytest.mark.slow
@in_process_of_its_own
def test_a_kernel_reads_what_it_does_not_change() -> None:
    _import_triton()
    with simulated_cuda(1, hazards="report"):
        x, out, side = torch.ones(4, device="cuda"), torch.empty(4, device="cuda"), torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            x.mul_(2)
        GridExecutor(scale)(x, out, 3.0)
        (hazard,) = checker.hazards()
        checker.clear_hazards()
        assert (hazard.kind, hazard.now.site.op) == (HazardKind.READ_AFTER_WRITE, "Triton kernel scale")


@pytest.mark.slow
@in_process_of_its_own
def test_tensors_of_the_host_are_left_to_triton() -> None:
    _import_triton()
    with simulated_cuda(1):
        out = torch.empty(4)
        GridExecutor(scale)(torch.ones(4), out, 3.0)
        assert out.tolist() == [3.0] * 4


@in_process_of_its_own
def test_an_autotuned_kernel_takes_its_first_configuration() -> None:
    """No GPU is there to time them. The kernel runs once, as one operation."""
    _import_triton()
    with simulated_cuda(1):
        out = torch.empty(4, device="cuda")
        Autotuner(GridExecutor(scale), [3.0, 2.0]).run(torch.ones(4, device="cuda"), out)
        assert out.tolist() == [3.0] * 4
