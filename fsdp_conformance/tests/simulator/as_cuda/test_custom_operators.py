"""Operators that a program defines with torch.library, with kernels for CUDA."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, library

from fsdp_conformance.simulated_cuda import simulated_cuda
from fsdp_conformance.simulator import checker
from fsdp_conformance.simulator.checker.hazard import HazardKind
from fsdp_conformance.tests.simulator.simulator_process import compiled, in_process_of_its_own

pytestmark = [compiled, pytest.mark.slow]


def on_cpu(x: Tensor) -> Tensor:
    return x + 1


def on_cuda(x: Tensor) -> Tensor:
    return x + 100


def with_library_keys() -> None:
    one = library.Library("keys", "DEF")
    one.define("op(Tensor x) -> Tensor")
    one.impl("op", on_cpu, "CPU")
    one.impl("op", on_cuda, "CUDA")
    KEPT.append(one)


def with_library_of_cuda() -> None:
    with_other = library.Library("of_cuda", "DEF")
    with_other.define("op(Tensor x) -> Tensor")
    with_other.impl("op", on_cpu, "CPU")
    one = library.Library("of_cuda", "IMPL", "CUDA")
    one.impl("op", on_cuda)
    KEPT.extend((one, with_other))


def with_impl() -> None:
    library.define("impl::op", "(Tensor x) -> Tensor")
    library.impl("impl::op", "cpu")(on_cpu)
    library.impl("impl::op", ["cuda"])(on_cuda)


def with_custom_op() -> None:
    op = library.custom_op("custom::op", on_cuda, mutates_args=(), device_types="cuda")
    op.register_kernel("cpu")(on_cpu)


def with_default() -> None:
    op = library.custom_op("default::op", on_cpu, mutates_args=())
    op.register_kernel("cuda")(on_cuda)


def with_register_kernel() -> None:
    library.custom_op("registered::op", on_cpu, mutates_args=())
    library.register_kernel("registered::op", "cuda", on_cuda)


#: Libraries end with the last reference to them.
KEPT: list[library.Library] = []

WAYS: dict[str, Callable[[], None]] = {
    "keys": with_library_keys,
    "of_cuda": with_library_of_cuda,
    "impl": with_impl,
    "custom": with_custom_op,
    "default": with_default,
    "registered": with_register_kernel,
}


@in_process_of_its_own
def test_the_kernel_for_cuda_runs() -> None:
    """In each way to register one; the CPU keeps its own."""
    with simulated_cuda(1):
        for namespace, define in WAYS.items():
            define()
            op = getattr(torch.ops, namespace).op
            assert op(torch.zeros(2, device="cuda")).tolist() == [100, 100], namespace
            assert op(torch.zeros(2)).tolist() == [1, 1], namespace


@in_process_of_its_own
def test_a_kernel_for_the_cpu_alone_is_none_for_cuda() -> None:
    """CUDA has no kernel, and says so; nor do kernels of torch's own operations count."""
    with simulated_cuda(1):
        only = library.custom_op("only::op", on_cpu, mutates_args=(), device_types="cpu")
        with pytest.raises(
            NotImplementedError, match="Could not run 'only::op' with arguments from the 'CUDA' backend"
        ):
            only(torch.zeros(2, device="cuda"))
        assert only(torch.zeros(2)).tolist() == [1, 1]
        only.register_kernel("cuda")(on_cuda)
        assert only(torch.zeros(2, device="cuda")).tolist() == [100, 100]


@in_process_of_its_own
def test_autograd_autocast_factories_and_disabled_kernels() -> None:
    """Other functions that take the name of a device."""
    with simulated_cuda(1):
        op = library.custom_op("more::op", on_cuda, mutates_args=(), device_types="cuda")
        op.register_autograd(lambda ctx, grad: grad * 7)
        op.register_autocast("cuda", torch.float16)
        x = torch.zeros(2, device="cuda", requires_grad=True)
        op(x).sum().backward()
        assert x.grad is not None
        assert x.grad.tolist() == [7, 7]
        with torch.autocast("cuda"):
            assert op(x).dtype == torch.float16

        def make(n: int, device: torch.device) -> Tensor:
            return torch.full((n,), 5.0, device=device)

        made = library.custom_op("more::make", make, mutates_args=(), device_types=["cpu", "cuda"])
        assert made(2, torch.device("cuda")).is_cuda
        assert not made(2, torch.device("cpu")).is_cuda

        switched = library.custom_op("more::switched", on_cpu, mutates_args=())
        switched.register_kernel("cuda")(on_cuda)
        with switched.set_kernel_enabled("cuda", enabled=False):
            assert switched(torch.zeros(1, device="cuda")).tolist() == [1]
        assert switched(torch.zeros(1, device="cuda")).tolist() == [100]


@in_process_of_its_own
def test_kernels_are_checked() -> None:
    """A kernel that reads what another stream writes is a race."""
    with simulated_cuda(1, hazards="report"):
        op = library.custom_op("raced::op", on_cuda, mutates_args=(), device_types="cuda")
        for waits in (False, True):
            x = torch.ones(2, device="cuda")
            side = torch.cuda.Stream()
            side.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(side):
                x.mul_(2)
            if waits:
                torch.cuda.current_stream().wait_stream(side)
            op(x)
            kinds = [hazard.kind for hazard in checker.hazards()]
            assert kinds == ([] if waits else [HazardKind.READ_AFTER_WRITE])
            checker.clear()
