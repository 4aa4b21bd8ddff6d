"""
Muon's updates: whether the optimizer saw whole matrices.

Muon replaces a matrix by one with nearly equal singular values, by five Newton-Schulz iterations in bfloat16. Around a
singular value of 1 an iteration adds terms that are ten times its result, so two right ways to multiply the same
matrices differ by several percent: neither a comparison with DDP nor the usual bounds can judge it. What can be judged
is how far an update is from the same iterations in float64, on the gradients that the engine has shown.

    distance = |update - update in float64| / |update in float64|                 in the Frobenius norm
    bound    = max(NOISE_FACTOR * distance of torch's own Muon on the whole matrix, FLOOR)

Both act on the same gradients and start each step from the same parameters, so rounding does not add up over steps.

NOISE_FACTOR = 4 and FLOOR = 0.04. Measured over 120 normal matrices of 5 to 32 rows and columns, half of them badly
conditioned, sharded over two and three ranks as DTensors: unsharded distances of 0.009 to 0.053, sharded ones of 0.009
to 0.050 and at most 0.65 of the bound; an optimizer that takes a rank's rows for the matrix is 0.26 to 1.26 away, and
at least 2.5 times the bound. The floor is the sum of the coefficients' magnitudes (10.25) times bfloat16's epsilon
(2**-8), the error of one iteration.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from fsdp_conformance.checks.result import CheckResult, Tally
from fsdp_conformance.history.training import TrainingHistory

NOISE_FACTOR = 4.0
FLOOR = 0.04


def orthogonal_updates(history: TrainingHistory, build: Callable[[Any], Optimizer], *, requirement: str) -> CheckResult:
    """Each update of each matrix is Muon's on the whole matrix, but for rounding. `build` makes torch's optimizer."""
    tally = Tally("updates of whole matrices", requirement, rank=history.rank)
    largest = {"distance": 0.0, "noise": 0.0}
    for name, value in history.initial_params.items():
        matrix = _Matrix(value, build)
        for record in history.steps:
            where: dict[str, Any] = {"step": record.step, "phase": "step", "fqn": name}
            gradient = (record.grads or {}).get(name)
            if gradient is None:
                tally.compare(False, "gradient", expected="a tensor", got="None", **where)
                break
            distance, noise = matrix.step(gradient, record.params[name])
            bound = max(NOISE_FACTOR * noise, FLOOR)
            largest = {"distance": max(distance, largest["distance"]), "noise": max(noise, largest["noise"])}
            tally.compare(
                distance <= bound,
                "distance of the update from that of the whole matrix in float64",
                expected=f"at most {bound:.2g} of its norm (unsharded in bfloat16: {noise:.2g})",
                got=f"{distance:.2g}",
                elements=value.numel(),
                **where,
            )
    return tally.result(measurements=largest)


class _Matrix:
    """One parameter: Muon in float64, and torch's own in bfloat16, on what the engine has shown of it."""

    def __init__(self, value: Tensor, build: Callable[[Any], Optimizer]) -> None:
        self._before = value
        self._plain = nn.Parameter(value.clone())
        self._optimizer = build([self._plain])
        self._momentum = torch.zeros_like(value, dtype=torch.float64)

    @torch.no_grad()
    def step(self, gradient: Tensor, after: Tensor) -> tuple[float, float]:
        """The relative distances from the update in float64 of the engine's update and of torch's own."""
        exact = self._exact(gradient.double())
        self._plain.copy_(self._before)
        self._plain.grad = gradient.clone()
        self._optimizer.step()
        distances = [
            float((result.double() - self._before.double() - exact).norm() / exact.norm())
            for result in (after, self._plain)
        ]
        self._before = after
        return distances[0], distances[1]

    def _exact(self, gradient: Tensor) -> Tensor:
        """The change of the parameter in float64. Source: Jordan et al., Muon (2024), as in torch.optim.Muon."""
        group: dict[str, Any] = self._optimizer.param_groups[0]
        self._momentum.lerp_(gradient, 1 - group["momentum"])
        update = gradient.lerp(self._momentum, group["momentum"]) if group["nesterov"] else self._momentum
        rows, columns = update.shape
        rate: float = group["lr"] * math.sqrt(max(1, rows / columns))
        decay: float = group["lr"] * group["weight_decay"]
        orthogonal = newton_schulz(update, group["ns_coefficients"], group["ns_steps"], group["eps"])
        return orthogonal.mul(-rate).sub(self._before.double(), alpha=decay)


def newton_schulz(matrix: Tensor, coefficients: tuple[float, float, float], steps: int, eps: float) -> Tensor:
    """The matrix with its singular values x replaced, `steps` times, by ax + bx^3 + cx^5, in its own dtype."""
    a, b, c = coefficients
    result: Tensor = matrix / matrix.norm().clamp(min=eps)
    for _ in range(steps):
        gram = result @ result.T
        result = a * result + (b * gram + c * gram @ gram) @ result
    return result
