"""Two ranks, a small model with exact arithmetic, and training of it sharded and by DistributedDataParallel."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from fsdp_conformance.engine.fully_sharded.wrapper import FullyShardedDataParallel
from fsdp_conformance.harness.recording import process_group
from fsdp_conformance.tests.harness.started_ranks import RecordedRanks

#: Odd, so that shards do not end where parameters do.
WIDTH = 5
LEARNING_RATE = 2.0**-6

Step = Callable[[nn.Module, Tensor], Tensor]
"""Model and input to a loss."""


class Stage(nn.Module):
    """Linear, then hard tanh: exact for small dyadic numbers."""

    def __init__(self, inputs: int = WIDTH, outputs: int = WIDTH) -> None:
        super().__init__()
        self.linear = nn.Linear(inputs, outputs)
        with torch.no_grad():
            for number, parameter in enumerate(self.parameters()):
                values = torch.arange(parameter.numel()) * (number + 2) + outputs
                parameter.copy_((values % 3 - 1.0).view(parameter.shape) / 2)

    def forward(self, x: Tensor) -> Tensor:
        return nn.functional.hardtanh(self.linear(x))


def chain(depth: int = 3) -> nn.Sequential:
    """Stages one after the other, and a layer that the root owns."""
    head = Stage(WIDTH, 3).linear
    return nn.Sequential(*(Stage() for _ in range(depth)), head)


def batch(rank: int, step: int = 0) -> Tensor:
    """Three rows of multiples of a quarter, another on every rank and step."""
    return ((torch.arange(3 * WIDTH) * (rank + 2) + 3 * step) % 5 - 2.0).view(3, WIDTH) / 4


def sharded(model: nn.Module, *, units: Sequence[str] | None = None, **options: Any) -> FullyShardedDataParallel:
    """The model with every stage a unit, or those named."""
    names = [name for name, child in model.named_modules() if isinstance(child, Stage)] if units is None else units
    for name in names:
        path, _, key = name.rpartition(".")
        parent = model.get_submodule(path)
        setattr(parent, key, FullyShardedDataParallel(model.get_submodule(name), **options))
    return FullyShardedDataParallel(model, **options)


def forward_sum(model: nn.Module, x: Tensor) -> Tensor:
    """The plain step."""
    output: Tensor = model(x)
    return output.sum()


def full_params(model: nn.Module) -> dict[str, Tensor]:
    """Every parameter in full, cloned, under its name."""
    with FullyShardedDataParallel.summon_full_params(model, writeback=False):
        return {
            name.replace("_fsdp_wrapped_module.", ""): parameter.detach().clone()
            for name, parameter in model.named_parameters()
        }


class ShardedTestCase(RecordedRanks):
    """Every test method runs in two ranks."""

    reuse_ranks = True

    def optimizer(self, model: nn.Module) -> torch.optim.Optimizer:
        return torch.optim.SGD(model.parameters(), lr=LEARNING_RATE, momentum=0.5)

    def train(
        self, model: nn.Module, *, steps: int = 3, step: Step = forward_sum, first: int = 0, **regime: Any
    ) -> list[Tensor]:
        """Losses of some steps."""
        optimizer = regime.get("optimizer") or self.optimizer(model)
        losses = []
        for number in range(first, first + steps):
            loss = step(model, batch(self.rank, number))
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.detach())
        return losses

    def assert_trains_as_ddp(
        self, model: nn.Module, step: Step = forward_sum, **options: Any
    ) -> FullyShardedDataParallel:
        """Losses and parameters of three steps are those of DistributedDataParallel, bit for bit."""
        reference = DistributedDataParallel(copy.deepcopy(model))
        subject = sharded(model, **options)
        expected, got = self.train(reference, step=step), self.train(subject, step=step)
        self.assertEqual([loss.item() for loss in expected], [loss.item() for loss in got])
        self.assert_same_params(reference.module, subject)
        return subject

    def assert_same_params(self, expected: nn.Module, subject: nn.Module) -> None:
        expected_values = {name: parameter.detach() for name, parameter in expected.named_parameters()}
        actual_values = full_params(subject)
        self.assertEqual(list(expected_values), list(actual_values))
        for name, value in expected_values.items():
            self.assertTrue(
                torch.equal(value, actual_values[name]), msg=f"{name}: expected {value}, got {actual_values[name]}"
            )

    def schedule(self) -> list[str]:
        """The collectives since the last call."""
        lines = process_group.log().schedule()
        process_group.log().clear()
        return lines
