"""Several optimizers that an engine takes for one."""

from __future__ import annotations

import torch
from torch import nn

from fsdp_conformance.adapters.optimizers import Several


def test_it_is_all_of_them() -> None:
    """Groups, state, steps and gradients are those of the optimizers themselves."""
    first, second = nn.Parameter(torch.ones(2)), nn.Parameter(torch.ones(3))
    several = Several([torch.optim.SGD([first], lr=0.5), torch.optim.SGD([second], lr=0.25, momentum=0.5)])
    assert [group["lr"] for group in several.param_groups] == [0.5, 0.25]
    for parameter in (first, second):
        parameter.grad = torch.ones_like(parameter)
    several.step()
    assert (first.tolist(), second.tolist()) == ([0.5] * 2, [0.75] * 3)
    assert torch.equal(several.state[second]["momentum_buffer"], torch.ones(3))
    several.zero_grad(set_to_none=False)
    assert [parameter.grad.tolist() for parameter in (first, second) if parameter.grad is not None] == [
        [0.0] * 2,
        [0.0] * 3,
    ]
    several.zero_grad()
    assert first.grad is None
    assert second.grad is None


def test_a_new_learning_rate_reaches_each() -> None:
    """The groups are the optimizers' own."""
    parameter = nn.Parameter(torch.ones(1))
    several = Several([torch.optim.SGD([parameter], lr=0.5)])
    several.param_groups[0]["lr"] = 0.25
    parameter.grad = torch.ones(1)
    several.step()
    assert parameter.item() == 0.75
