"""Muon's updates: right engines pass however they multiply, and an optimizer that saw part of a matrix does not."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from fsdp_conformance.checks.whole_matrix import newton_schulz, orthogonal_updates
from fsdp_conformance.fixtures.optimizers import MUON, Shampoo
from fsdp_conformance.history.training import StepRecord, TrainingHistory
from fsdp_conformance.references.tolerance import CEILING

Parts = Callable[[Tensor], Sequence[Tensor]]

needs_muon = pytest.mark.skipif(MUON is None, reason="this torch has no Muon, which came with 2.9")


def _build(**changed: Any) -> Callable[[Any], Optimizer]:
    assert MUON is not None
    return partial(MUON, **changed)


def _whole(tensor: Tensor) -> Sequence[Tensor]:
    return [tensor]


def _halves(tensor: Tensor) -> Sequence[Tensor]:
    return tensor.tensor_split(2)


def _columns(tensor: Tensor) -> Sequence[Tensor]:
    return tensor.tensor_split(2, dim=1)


def _trained(
    seed: int, build: Callable[[Any], Optimizer], parts: Parts = _whole, *, steps: int = 3, forgets: bool = False
) -> TrainingHistory:
    """A run whose optimizer sees these parts of each matrix."""
    torch.manual_seed(seed)
    shapes = {"tall": (12, 8), "wide": (6, 12), "odd": (5, 7), "square": (16, 16)}
    values = {name: nn.Parameter(torch.randn(shape)) for name, shape in shapes.items()}
    history = TrainingHistory(source="test", rank=0, world_size=2)
    history.initial_params = {name: value.detach().clone() for name, value in values.items()}
    pieces = {name: [nn.Parameter(part) for part in parts(value.detach())] for name, value in values.items()}
    optimizer = build([piece for each in pieces.values() for piece in each])
    for step in range(steps):
        grads = {name: torch.randn(shape) for name, shape in shapes.items()}
        for name, grad in grads.items():
            for piece, part in zip(pieces[name], parts(grad), strict=True):
                piece.grad = part
        if forgets:
            optimizer.state.clear()
        optimizer.step()
        history.steps.append(
            StepRecord(
                step=step,
                losses=[],
                grads=dict(grads),
                params={name: value.detach().clone() for name, value in values.items()},
            )
        )
    return history


def _findings(history: TrainingHistory, build: Callable[[Any], Optimizer]) -> list[str]:
    result = orthogonal_updates(history, build, requirement="R140")
    assert result.count.comparisons
    return sorted({str(finding.fqn) for finding in result.findings})


@needs_muon
@pytest.mark.parametrize("changed", [{}, {"weight_decay": 0.5}, {"nesterov": False}, {"momentum": 0.5, "lr": 0.5}])
def test_unsharded_updates_pass(changed: dict[str, Any]) -> None:
    """The settings make no difference."""
    for seed in range(10):
        assert _findings(_trained(seed, _build(**changed)), _build(**changed)) == []


@needs_muon
def test_another_arithmetic_passes() -> None:
    """Exact updates, and those whose products are sums of two rounded halves, as they are of shards."""
    assert MUON is not None
    for seed in range(10):
        for ways in (_exactly, _in_halves):
            history = _trained(seed, _build(momentum=0.0, nesterov=False), steps=1)
            for name, before in history.initial_params.items():
                gradient = (history.steps[0].grads or {})[name]
                assert gradient is not None
                rate = 0.0625 * max(1, before.shape[0] / before.shape[1]) ** 0.5
                history.steps[0].params[name] = before - rate * ways(gradient)
            assert _findings(history, _build(momentum=0.0, nesterov=False)) == []


def _exactly(gradient: Tensor) -> Tensor:
    return newton_schulz(gradient.double(), (3.4445, -4.7750, 2.0315), 5, 1e-7).float()


def _in_halves(gradient: Tensor) -> Tensor:
    """In bfloat16, with the inner dimension of the first product in two parts."""
    a, b, c = 3.4445, -4.7750, 2.0315
    result = (gradient.bfloat16() if gradient.shape[0] <= gradient.shape[1] else gradient.T.bfloat16()).contiguous()
    result = result / result.norm()
    for _ in range(5):
        left, right = result.tensor_split(2, dim=1)
        gram = left @ left.T + right @ right.T
        result = torch.addmm(result, torch.addmm(gram, gram, gram, beta=b, alpha=c), result, beta=a)
    return (result if gradient.shape[0] <= gradient.shape[1] else result.T).float()


@needs_muon
@pytest.mark.parametrize("parts", [_halves, _columns])
def test_parts_of_matrices_are_found(parts: Parts) -> None:
    """Rows or columns that an optimizer takes for the matrix, in every matrix."""
    for seed in range(10):
        assert _findings(_trained(seed, _build(), parts), _build()) == ["odd", "square", "tall", "wide"]


@needs_muon
def test_other_defects_are_found() -> None:
    """Lost momentum, another rate and a missing step are findings."""
    assert len(_findings(_trained(0, _build(), forgets=True), _build())) == 4
    assert len(_findings(_trained(0, _build(lr=0.125)), _build())) == 4
    history = _trained(0, _build())
    history.steps[1].params = dict(history.steps[0].params)
    assert len(_findings(history, _build())) == 4


@needs_muon
def test_a_gradient_that_is_missing_is_found() -> None:
    """It does not shorten what is compared in silence."""
    history = _trained(0, _build())
    assert history.steps[1].grads is not None
    history.steps[1].grads["wide"] = None
    result = orthogonal_updates(history, _build(), requirement="R140")
    assert [finding.message for finding in result.findings] == ["gradient: expected a tensor, got None"]


def test_shampoo_needs_matrices() -> None:
    """Flat parameters are rejected when the optimizer is made."""
    with pytest.raises(ValueError, match=r"Shampoo needs matrices \(2D\), got a parameter of shape \(4,\)"):
        Shampoo([nn.Parameter(torch.zeros(4))], lr=0.5)


def test_shampoo_needs_them_whole() -> None:
    """A rank's rows lead elsewhere, by much more than any bound of a comparison with references."""
    whole, halves = (_trained(0, partial(Shampoo, lr=0.5), parts) for parts in (_whole, _halves))
    for name, value in whole.steps[-1].params.items():
        changed = value - whole.initial_params[name]
        assert float((value - halves.steps[-1].params[name]).norm() / changed.norm()) > 10 * CEILING
