"""Ordering only: kernels that compute nothing but numbers are left out, and everything else is as with them."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from fsdp_conformance.plan import SIMULATED
from fsdp_conformance.simulator import checker
from fsdp_conformance.simulator.checker import ordering
from fsdp_conformance.simulator.device import memory
from fsdp_conformance.tests.simulator.simulator_process import in_process_of_its_own


def trained(model: nn.Module, data: torch.Tensor, optimizer: torch.optim.Optimizer, steps: int) -> list[float]:
    """The loss of each step."""
    losses = []
    for _ in range(steps):
        optimizer.zero_grad()
        loss = F.cross_entropy(model(data), data.argmax(-1))
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        losses.append(loss.item())
    return losses


def observed(steps: int = 3) -> tuple[dict[str, Any], list[float]]:
    """The observable results of a training run other than its numbers, and its losses."""
    torch.manual_seed(0)
    checker.clear()
    memory.reset_peak_memory_stats(0)
    before, accesses = memory.memory_allocated(0), checker.accesses()
    model = nn.Sequential(nn.Linear(8, 16), nn.LayerNorm(16), nn.GELU(), nn.Dropout(0.1), nn.Linear(16, 8)).to("sim")
    optimizer = torch.optim.AdamW(model.parameters(), foreach=True)
    losses = trained(model, torch.randn(4, 8, device="sim"), optimizer, steps)
    state = {
        "accesses": checker.accesses() - accesses,
        "hazards": len(checker.hazards()),
        "peak": memory.max_memory_allocated(0) - before,
        "shapes": [(tuple(tensor.shape), tensor.stride(), tensor.dtype) for tensor in model.state_dict().values()],
    }
    return state, losses


@in_process_of_its_own
def test_all_but_the_numbers_is_the_same() -> None:
    """Accesses, memory and shapes are the same, without hazards; only the losses are not computed."""
    full, losses = observed()

    with ordering.ordering_only():
        left_out, zeros = observed()

    assert full["accesses"] > 300
    assert left_out == full
    assert losses[-1] != 0.0
    assert zeros[1:] == [0.0, 0.0]
    assert observed() == (full, losses)


@in_process_of_its_own
def test_what_decides_what_happens_next_is_computed() -> None:
    """Integers, booleans, first values, sizes that depend on values, and copies."""
    with ordering.ordering_only():
        for _ in range(2):
            numbers = torch.arange(6, dtype=torch.float32, device="sim")

            assert numbers.tolist() == [0, 1, 2, 3, 4, 5]
            assert (numbers > 2).tolist() == [False, False, False, True, True, True]
            assert numbers.argmax().item() == 5
            assert numbers.nonzero().shape == (5, 1)
            assert numbers[numbers > 3].shape == (2,)
            assert torch.full((2,), 7.0, device="sim").clone().shape == (2,)
            assert numbers.to(torch.int64).sum().item() == 15
            assert torch.zeros(3, device="sim").normal_().abs().ne(0).shape == (3,)
            assert numbers.cpu().tolist() == [0, 1, 2, 3, 4, 5]
            assert torch.sort(numbers, descending=True).indices.tolist() == [5, 4, 3, 2, 1, 0]


@in_process_of_its_own
def test_results_are_left_out_from_the_second_time_on() -> None:
    """Each kind of arguments counts for itself; lists of tensors, undefined gradients, updates in place."""
    one, two = torch.ones(3, device="sim"), torch.ones(2, 3, device="sim")
    with ordering.ordering_only():
        assert (one + one).tolist() == [2, 2, 2]
        assert (one + one).tolist() == [0, 0, 0]
        assert (two + one).sum().item() == 12
        assert (one.double() + one).dtype == torch.float64
        assert [tensor.tolist() for tensor in torch._foreach_mul([one], 3.0)] == [[3, 3, 3]]
        assert [tensor.tolist() for tensor in torch._foreach_mul([one], 4.0)] == [[0, 0, 0]]
        assert one.mul_(5.0).tolist() == [5, 5, 5]
        assert one.mul_(6.0).tolist() == [5, 5, 5]
    assert (one + one).tolist() == [10, 10, 10]


@in_process_of_its_own
def test_results_that_share_memory_are_computed() -> None:
    """A result in memory that the caller gives is written each time, and may be resized each time."""
    with ordering.ordering_only():
        for size in (2, 3, 3):
            ones = torch.ones(size, device="sim")
            out = torch.empty(0, device="sim")
            torch.add(ones, ones, out=out)

            assert out.tolist() == [2.0] * size


@pytest.mark.parametrize("waits", [False, True])
@in_process_of_its_own
def test_a_race_is_found_without_numbers(waits: bool) -> None:
    """A race between streams is found, but only where a wait is missing."""
    with ordering.ordering_only():
        data = torch.ones(4, 4, device="sim")
        sim: Any = getattr(torch, SIMULATED)
        side = sim.Stream()
        for _ in range(3):
            result = data @ data
            with sim.stream(side):
                if waits:
                    side.wait_stream(sim.default_stream())
                result.mul_(2.0)
            sim.current_stream().wait_stream(side)

    hazards = checker.hazards()
    checker.clear()
    assert bool(hazards) is not waits
