"""Memory that an accelerator's libraries keep after their first use is allocated before bytes are counted."""

from __future__ import annotations

import threading
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from fsdp_conformance.driver.watch import AcceleratorWatch
from fsdp_conformance.harness import warm_up
from fsdp_conformance.tests.simulator.simulator_process import compiled, in_process_of_its_own

pytestmark = compiled

_PRODUCTS = (torch.ops.aten.mm.default, torch.ops.aten.addmm.default)


class Handles(TorchDispatchMode):
    """A library with a handle for each thread and dtype, which takes a workspace that it keeps, like cuBLAS."""

    def __init__(self) -> None:
        super().__init__()
        self.workspaces: dict[tuple[int, torch.dtype], torch.Tensor] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in _PRODUCTS:
            key = (threading.get_ident(), args[0].dtype)
            if key not in self.workspaces:
                self.workspaces[key] = torch.empty(1 << 20, dtype=torch.uint8, device=args[0].device)
        return func(*args, **(kwargs or {}))


def _train(device: torch.device, dtype: torch.dtype) -> None:
    layer = torch.nn.Linear(8, 8, device=device, dtype=dtype)
    layer(torch.ones(4, 8, device=device, dtype=dtype, requires_grad=True)).sum().backward()


@in_process_of_its_own
def test_workspaces_are_there_before_the_first_mark() -> None:
    """They exist for every dtype and in autograd's thread; afterwards a step leaves no extra memory."""
    device = torch.device("sim", 0)
    counting = AcceleratorWatch(device)
    with Handles() as library:
        counting.begin()
        before = counting.allocated_bytes()
        assert before == len(library.workspaces) << 20
        assert {dtype for _, dtype in library.workspaces} == set(warm_up._DTYPES)
        assert len({thread for thread, _ in library.workspaces}) == 2, "the caller's thread and autograd's"
        for dtype in warm_up._DTYPES:
            _train(device, dtype)
        assert counting.allocated_bytes() == before


@in_process_of_its_own
def test_without_warming_up_the_first_step_pays() -> None:
    """The control: it is the library that keeps the bytes."""
    device = torch.device("sim", 0)
    counting = AcceleratorWatch(device)
    with Handles():
        before = counting.allocated_bytes()
        _train(device, torch.float32)
        assert counting.allocated_bytes() - before >= 2 << 20


@in_process_of_its_own
def test_it_draws_no_random_number() -> None:
    """Or a model would be built with other values on an accelerator than on the CPU."""
    torch.manual_seed(5)
    state = torch.get_rng_state()
    warm_up.warm_up(torch.device("sim", 0))

    assert torch.equal(state, torch.get_rng_state())
