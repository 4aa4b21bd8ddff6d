"""Several optimizers that an engine takes for one."""

from __future__ import annotations

import copy
from typing import Any

import pytest
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


def test_a_group_that_an_engine_has_removed_stays_removed() -> None:
    """DeepSpeed removes empty groups and then finds the others by their index. Loading does not bring them back."""
    parameters = [nn.Parameter(torch.ones(1)) for _ in range(2)]
    groups: list[dict[str, Any]] = [{"params": parameters[:1]}, {"params": [], "lr": 8.0}, {"params": parameters[1:]}]
    several = Several([torch.optim.SGD(groups, lr=0.5)])
    several.param_groups[:] = [group for group in several.param_groups if group["params"]]
    for parameter in parameters:
        parameter.grad = torch.ones(1)
    several.step()
    assert [group["lr"] for group in several.param_groups] == [0.5, 0.5]
    several.load_state_dict(copy.deepcopy(several.state_dict()))
    assert [group["lr"] for group in several.param_groups] == [0.5, 0.5]


def test_a_state_dict_is_loaded_into_each() -> None:
    """Settings and state that were saved are those of the optimizers that step, also of a group without parameters."""
    parameters = [nn.Parameter(torch.ones(1)) for _ in range(3)]
    groups: list[dict[str, Any]] = [{"params": parameters[:1]}, {"params": []}]
    first = torch.optim.SGD(groups, lr=0.5, momentum=0.5)
    several = Several([first, torch.optim.SGD(parameters[1:], lr=0.25, momentum=0.5)])
    for parameter in parameters[:2]:
        parameter.grad = torch.ones(1)
    several.step()
    saved = copy.deepcopy(several.state_dict())
    for group in several.param_groups:
        group["lr"] = 8.0
    for parameter in parameters:
        parameter.grad = torch.ones(1)
    several.step()
    several.load_state_dict(saved)
    assert [group["lr"] for each in several.optimizers for group in each.param_groups] == [0.5, 0.5, 0.25]
    assert [group["lr"] for group in several.param_groups] == [0.5, 0.5, 0.25]
    assert all(torch.equal(several.state[parameter]["momentum_buffer"], torch.ones(1)) for parameter in parameters[:2])
    # It had no state when it was saved.
    assert parameters[2] not in several.state
    with torch.no_grad():
        for parameter in parameters:
            parameter.zero_()
    several.step()
    assert [parameter.item() for parameter in parameters] == [-0.75, -0.375, -0.25]


def test_a_state_dict_of_other_groups_is_refused() -> None:
    """Before anything is loaded."""
    parameters = [nn.Parameter(torch.ones(1)) for _ in range(2)]
    several = Several([torch.optim.SGD([parameter], lr=0.5) for parameter in parameters])
    other = torch.optim.SGD(parameters, lr=0.25)
    with pytest.raises(ValueError, match=r"must have \[1, 1\] parameters, got \[2\]"):
        several.load_state_dict(other.state_dict())
    assert [group["lr"] for group in several.param_groups] == [0.5, 0.5]
