"""
The optimizer's state and settings beside those of a model that is not sharded: in full, saved, and loaded elsewhere.

The model has what states differ in: parameters without state, without elements and without dims, and parameters of
which some ranks have no element. Its gradients are the same on every rank.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from fsdp_conformance.engine.errors import StructureMismatch
from fsdp_conformance.engine.fully_sharded.checkpoint import load_checkpoint, save_checkpoint
from fsdp_conformance.engine.fully_sharded.optimizer_state import full_optimizer_state, load_optimizer_state
from fsdp_conformance.engine.fully_sharded.wrapper import FullyShardedDataParallel
from fsdp_conformance.harness.simulated_ranks.ranks import run_ranks

pytestmark = pytest.mark.slow

WORLD_SIZES = (1, 2, 4)
TIMEOUT_S = 120.0

#: Each keeps something else: nothing, a momentum, counters and numbers beside tensors, state from the beginning.
OPTIMIZERS: dict[str, Callable[[Any], Optimizer]] = {
    "sgd": lambda groups: torch.optim.SGD(groups, lr=0.125),
    "momentum": lambda groups: torch.optim.SGD(groups, lr=0.125, momentum=0.5),
    "adam": lambda groups: torch.optim.Adam(groups, lr=0.125),
    "nadam": lambda groups: torch.optim.NAdam(groups, lr=0.125),
    "asgd": lambda groups: torch.optim.ASGD(groups, lr=0.125),
    "adagrad": lambda groups: torch.optim.Adagrad(groups, lr=0.125),
}


class Varied(nn.Module):
    """Parameters of several sizes. `seldom` is used on request, and `never` is not used at all."""

    def __init__(self) -> None:
        super().__init__()
        self.vector = nn.Parameter(torch.tensor([1.0, 2.0, -1.0]))
        self.empty = nn.Parameter(torch.zeros(2, 0))
        self.scalar = nn.Parameter(torch.tensor(2.0))
        self.seldom = nn.Parameter(torch.ones(2))
        self.never = nn.Parameter(torch.ones(2))
        self.element = nn.Parameter(torch.ones(1, 1))

    def forward(self, x: Tensor, *, seldom: bool) -> Tensor:
        output = (self.vector * x).sum() * self.scalar * self.element.sum() + self.empty.sum()
        return output + self.seldom.prod() if seldom else output


def groups_of(model: nn.Module) -> list[dict[str, Any]]:
    """Two groups with parameters, and two without, which a user may fill later."""
    named = dict(model.named_parameters())
    own = [named.pop(name) for name in ("vector", "empty")]
    return [
        {"params": []},
        {"params": own, "lr": 0.0625},
        {"params": [], "lr": 0.5},
        {"params": list(named.values())},
    ]


def step(model: nn.Module, optimizer: Optimizer, *, seldom: bool = False) -> None:
    """One step, in which a quarter of the learning rate is lost, as with a scheduler."""
    model(torch.arange(3.0), seldom=seldom).backward()
    optimizer.step()
    optimizer.zero_grad()
    for group in optimizer.param_groups:
        group["lr"] *= 0.75


def pair(name: str, *, shard: bool) -> tuple[nn.Module, Optimizer]:
    """A model and its optimizer."""
    model = FullyShardedDataParallel(Varied()) if shard else Varied()
    return model, OPTIMIZERS[name](groups_of(model))


def shown(model: nn.Module, optimizer: Optimizer) -> dict[str, Any]:
    """The state by name, and the settings of all groups."""
    if isinstance(model, FullyShardedDataParallel):
        state = full_optimizer_state(model, optimizer)["state"]
    else:
        state = {name: optimizer.state[each] for name, each in model.named_parameters() if each in optimizer.state}
    numbers = {
        name: {key: value.tolist() if isinstance(value, Tensor) else value for key, value in sorted(entries.items())}
        for name, entries in state.items()
    }
    settings = [{key: value for key, value in group.items() if key != "params"} for group in optimizer.param_groups]
    return {"state": numbers, "groups": settings}


def expected(name: str, *, further: bool) -> dict[str, Any]:
    """The same of a model that is not sharded after two steps, or a further one."""
    model, optimizer = pair(name, shard=False)
    step(model, optimizer, seldom=True)
    step(model, optimizer)
    if further:
        step(model, optimizer)
    return copy.deepcopy(shown(model, optimizer))


@pytest.mark.daily(1)
@pytest.mark.parametrize("world_size", WORLD_SIZES)
def test_in_full(world_size: int) -> None:
    """Every rank is given what the other model has, and its optimizer takes it over, settings included."""

    def body(rank: int) -> None:
        for name in OPTIMIZERS:
            model, optimizer = pair(name, shard=True)
            step(model, optimizer, seldom=True)
            step(model, optimizer)
            assert shown(model, optimizer) == expected(name, further=False), name
            state = copy.deepcopy(full_optimizer_state(model, optimizer))
            parameters = model.state_dict()
            for begun in (False, True):
                other, loaded = pair(name, shard=True)
                if begun:
                    step(other, loaded, seldom=True)
                other.load_state_dict(parameters)
                load_optimizer_state(other, loaded, state)
                assert shown(other, loaded) == expected(name, further=False), name
                step(other, loaded)
                assert shown(other, loaded) == expected(name, further=True), name

    run_ranks(world_size, body, timeout_s=TIMEOUT_S)


@pytest.mark.nightly
@pytest.mark.parametrize(
    ("saved_on", "loaded_on"),
    [
        (1, 2),
        pytest.param(2, 2, marks=pytest.mark.nightly),
        pytest.param(4, 4, marks=pytest.mark.nightly),
        (4, 1),
        pytest.param(2, 4, marks=pytest.mark.nightly),
    ],
)
def test_in_a_checkpoint(saved_on: int, loaded_on: int, tmp_path: Path) -> None:
    """It loads on any number of ranks, into an optimizer that is new or has begun."""

    def save(rank: int) -> None:
        for name in OPTIMIZERS:
            model, optimizer = pair(name, shard=True)
            step(model, optimizer, seldom=True)
            step(model, optimizer)
            save_checkpoint(model, optimizer, tmp_path / name)

    def load(rank: int) -> None:
        for name in OPTIMIZERS:
            for begun in (False, True):
                model, optimizer = pair(name, shard=True)
                if begun:
                    step(model, optimizer, seldom=True)
                load_checkpoint(model, optimizer, tmp_path / name)
                assert shown(model, optimizer) == expected(name, further=False), name
                step(model, optimizer)
                assert shown(model, optimizer) == expected(name, further=True), name

    run_ranks(saved_on, save, timeout_s=TIMEOUT_S)
    run_ranks(loaded_on, load, timeout_s=TIMEOUT_S)


def test_ranks_that_disagree() -> None:
    """Every rank raises if two ranks with elements of a parameter have different state for it, and names both."""

    def body(rank: int) -> None:
        model = FullyShardedDataParallel(nn.Linear(4, 4))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.125, momentum=0.5)
        model(torch.ones(1, 4)).sum().backward()
        optimizer.step()
        if rank:
            del optimizer.state[next(model.parameters())]["momentum_buffer"]
        text = r"optimizer state of weight of group ranks \[1\] differs from that of rank 0"
        with pytest.raises(StructureMismatch, match=text):
            full_optimizer_state(model, optimizer)

    run_ranks(2, body, timeout_s=TIMEOUT_S)
