"""
Small workloads for tests of adapters and mutants, and a reference that is nothing but a loop.

`plain` has what every model has: linear layers of odd sizes, a LayerNorm, a bias of every length. `rich` has the traps:
a tied weight, a frozen layer, a unit called twice, an unused parameter, and buffers that forward writes. Data
depends on rank, step and micro-batch.
"""

from __future__ import annotations

from collections import namedtuple
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.optim import SGD, Adam, AdamW

from fsdp_conformance.workload.definition import Batch, BatchKey, Regime, Workload

Output = namedtuple("Output", ["logits", "hidden"])


class Plain(nn.Module):
    """5-7-7-3 with a LayerNorm of 7: nothing divides by two."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Linear(5, 7), nn.LayerNorm(7), nn.Linear(7, 7))
        self.head = nn.Linear(7, 3)

    def forward(self, x: Tensor) -> Tensor:
        output: Tensor = self.head(torch.tanh(self.body(x)))
        return output


class Rich(nn.Module):
    """Embedding tied to the projection, a frozen layer, a layer called twice, an unused one, buffers."""

    count: Tensor
    mean: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(11, 6)
        self.frozen = nn.Linear(6, 6)
        self.frozen.requires_grad_(False)
        self.twice = nn.Linear(6, 6)
        self.unused = nn.Linear(3, 5)
        self.project = nn.Linear(6, 11, bias=False)
        self.project.weight = self.embed.weight
        self.register_buffer("count", torch.zeros((), dtype=torch.long))
        self.register_buffer("mean", torch.zeros(6), persistent=False)

    def forward(self, tokens: Tensor) -> Any:
        hidden = torch.tanh(self.frozen(self.embed(tokens)))
        hidden = torch.tanh(self.twice(torch.tanh(self.twice(hidden))))
        if self.training:
            with torch.no_grad():
                self.count.add_(1)
                self.mean.lerp_(hidden.mean(dim=(0, 1)), 0.1)
        return Output(self.project(hidden), hidden)


def build(kind: Callable[[], nn.Module], rank: int) -> nn.Module:
    """The model with the same values on every rank; torch's own random state is left alone."""
    with torch.random.fork_rng():
        torch.manual_seed(20)
        return kind()


def build_plain(rank: int) -> nn.Module:
    return build(Plain, rank)


def build_rich(rank: int) -> nn.Module:
    return build(Rich, rank)


def _generator(key: BatchKey) -> torch.Generator:
    return torch.Generator().manual_seed(1000 * key.step + 100 * key.micro + key.rank + 1)


def plain_batch(key: BatchKey) -> Batch:
    generator = _generator(key)
    return Batch(args=(torch.randn(4, 5, generator=generator),), target=torch.randn(4, 3, generator=generator))


def rich_batch(key: BatchKey) -> Batch:
    generator = _generator(key)
    return Batch(
        args=(torch.randint(0, 11, (3, 4), generator=generator),),
        target=torch.randint(0, 11, (3, 4), generator=generator),
    )


def plain_loss(output: Any, batch: Batch) -> Tensor:
    return F.mse_loss(output, batch.target)


def rich_loss(output: Any, batch: Batch) -> Tensor:
    return F.cross_entropy(output.logits.flatten(0, 1), batch.target.flatten())


def sgd(params: Any) -> SGD:
    return SGD(params, lr=0.1, momentum=0.9)


def adam(params: Any) -> Adam:
    return Adam(params, lr=1e-2)


def adamw(params: Any) -> AdamW:
    return AdamW(params, lr=1e-2, weight_decay=0.1)


PLAIN = Workload(
    name="plain",
    build=build_plain,
    batch=plain_batch,
    loss=plain_loss,
    optimizers={"sgd": sgd, "adam": adam, "adamw": adamw},
    units=("body.0", "body.2", "body"),
    micro_batch_size=4,
)
RICH = Workload(
    name="rich",
    build=build_rich,
    batch=rich_batch,
    loss=rich_loss,
    optimizers={"sgd": sgd, "adam": adam, "adamw": adamw},
    units=("frozen", "twice"),
    micro_batch_size=3,
)


class Reference:
    """The expected result of a step: gradients are means over ranks, computed in one process on every rank's batch."""

    def __init__(self, workload: Workload, regime: Regime, *, world_size: int) -> None:
        self.grads: list[dict[str, Tensor | None]] = []
        self.params: list[dict[str, Tensor]] = []
        self.norms: list[Tensor] = []
        self.losses: list[list[list[Tensor]]] = []
        """By step, micro-batch and rank."""
        model = workload.build(0)
        optimizer = workload.optimizers[regime.optimizer](model.parameters())
        for step in range(regime.steps):
            self.losses.append([])
            for micro in range(regime.micro_batches):
                losses = []
                for rank in range(world_size):
                    batch = workload.batch(BatchKey(step=step, micro=micro, rank=rank, world_size=world_size))
                    losses.append(workload.loss(model(*batch.args, **batch.kwargs), batch))
                torch.stack(losses).mean().backward()
                self.losses[-1].append([loss.detach() for loss in losses])
            self.grads.append({name: _copy(parameter.grad) for name, parameter in model.named_parameters()})
            if regime.max_norm is not None:
                norm = nn.utils.clip_grad_norm_(model.parameters(), regime.max_norm, regime.norm_type)
                self.norms.append(norm.detach().clone())
            optimizer.step()
            optimizer.zero_grad()
            self.params.append({name: parameter.detach().clone() for name, parameter in model.named_parameters()})


def _copy(tensor: Tensor | None) -> Tensor | None:
    return None if tensor is None else tensor.detach().clone()


def differences(history: Any, reference: Reference, *, rank: int) -> list[str]:
    """Where a history is not the reference's, one line each. The bound is float32 noise of sums of a few terms."""
    texts = []

    def compare(what: str, got: Tensor | None, expected: Tensor | None) -> None:
        if (got is None) != (expected is None):
            texts.append(f"{what}: expected {_word(expected)}, got {_word(got)}")
        elif got is not None and expected is not None:
            if got.shape != expected.shape or got.dtype != expected.dtype:
                texts.append(
                    f"{what}: expected {expected.dtype} {tuple(expected.shape)}, got {got.dtype} {tuple(got.shape)}"
                )
            elif not torch.allclose(got, expected, rtol=1e-4, atol=2e-6):
                texts.append(f"{what}: off by {(got - expected).abs().max().item():.2e}")

    for index, record in enumerate(history.steps):
        expected_names = list(reference.params[index])
        if sorted(record.params) != sorted(expected_names):
            texts.append(f"step {index} parameters: expected {sorted(expected_names)}, got {sorted(record.params)}")
            continue
        for micro, loss in enumerate(record.losses):
            compare(f"step {index} loss {micro}", loss, reference.losses[index][micro][rank])
        for name in expected_names:
            if record.grads is not None:
                compare(f"step {index} gradient {name}", record.grads.get(name), reference.grads[index][name])
            compare(f"step {index} parameter {name}", record.params[name], reference.params[index][name])
        if record.grad_norm is not None:
            compare(f"step {index} norm", record.grad_norm, reference.norms[index])
    return texts


def _word(tensor: Tensor | None) -> str:
    return "None" if tensor is None else "a tensor"
