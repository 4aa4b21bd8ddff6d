"""Things that an engine must leave alone: each kind of change is seen, and an unchanged process is not accused."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator

import numpy as np
import pytest
import torch
from torch import nn

from fsdp_conformance.checks import bystanders
from fsdp_conformance.checks.bystanders import Attached


@pytest.fixture(autouse=True)
def _restored() -> Iterator[None]:
    """The global state of the process as it was."""
    torch_state, python_state, numpy_state = torch.get_rng_state(), random.getstate(), np.random.get_state()
    dtype, precision, anomaly = (
        torch.get_default_dtype(),
        torch.get_float32_matmul_precision(),
        torch.is_anomaly_enabled(),
    )
    yield
    torch.set_rng_state(torch_state)
    random.setstate(python_state)
    np.random.set_state(numpy_state)
    torch.set_default_dtype(dtype)
    torch.set_float32_matmul_precision(precision)
    torch.autograd.set_detect_anomaly(anomaly)
    torch.use_deterministic_algorithms(False)
    torch.set_grad_enabled(True)


def _seen(change: Callable[[], object]) -> list[str]:
    before = bystanders.surroundings()
    change()
    after = bystanders.surroundings()
    result = bystanders.left_alone(before, after, rank=0, step=1, requirement="R189")
    return [finding.message.partition(":")[0] for finding in result.findings]


@pytest.mark.parametrize(
    ("change", "name"),
    [
        (lambda: torch.rand(1), "torch's random numbers"),
        (random.random, "Python's random numbers"),
        (lambda: np.random.rand(1), "NumPy's random numbers"),
        (lambda: torch.set_default_dtype(torch.float64), "the default dtype"),
        (lambda: torch.set_grad_enabled(False), "whether gradients are enabled"),
        (lambda: torch.set_float32_matmul_precision("medium"), "the precision of matrix products"),
        (lambda: torch.autograd.set_detect_anomaly(True), "anomaly detection"),
        (lambda: torch.use_deterministic_algorithms(True, warn_only=True), "deterministic algorithms"),
    ],
    ids=["torch", "python", "numpy", "dtype", "gradients", "matmul", "anomaly", "determinism"],
)
def test_each_change_is_seen(change: Callable[[], object], name: str) -> None:
    """The finding names it, and nothing else."""
    assert _seen(change) == [name]


def test_training_changes_nothing() -> None:
    """A step of plain torch leaves everything as it is."""
    model = nn.Linear(2, 2)
    optimizer = torch.optim.Adam(model.parameters())

    def step() -> None:
        model(torch.ones(1, 2)).sum().backward()
        optimizer.step()
        optimizer.zero_grad()

    assert _seen(step) == []


def _attached_after(change: Callable[[nn.Linear], object]) -> list[str]:
    model = nn.Linear(2, 2, bias=False)
    attached = Attached(dict(model.named_parameters()))
    change(model)
    result = attached.judged(dict(model.named_parameters()), rank=0, step=0, requirement="R189")
    return [finding.message.partition(":")[0] for finding in result.findings]


def _forget(model: nn.Linear) -> None:
    for name in list(vars(model.weight)):
        delattr(model.weight, name)


def _cast(model: nn.Linear) -> None:
    model.weight.data = model.weight.data.double()


def _replace(model: nn.Linear) -> None:
    model.weight = nn.Parameter(model.weight.detach())


def test_parameters_that_stay_are_right() -> None:
    """New values are not a change of the parameter."""
    assert _attached_after(lambda model: model.weight.data.zero_()) == []


@pytest.mark.parametrize(
    ("change", "kinds"),
    [
        (_replace, ["parameter", "attribute of the parameter"]),
        (_cast, ["dtype of the parameter"]),
        (_forget, ["attribute of the parameter"]),
        (lambda model: model._parameters.pop("weight"), ["parameter"]),
    ],
    ids=["another object", "another dtype", "attribute lost", "parameter lost"],
)
def test_each_change_of_a_parameter_is_seen(change: Callable[[nn.Linear], object], kinds: list[str]) -> None:
    """Objects, dtypes, and what the user has attached."""
    assert _attached_after(change) == kinds


def test_replaced_functions_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    """An optimizer's class, one of its methods, and a function of torch."""
    before = bystanders.torch_functions()
    assert bystanders.replaced(before) == []

    monkeypatch.setattr(torch.optim, "Adam", torch.optim.AdamW)
    monkeypatch.setattr(nn.functional, "linear", lambda *_: None)
    monkeypatch.setattr(torch.Tensor, "all", lambda *_: True)

    assert {"torch.optim.Adam", "torch.nn.functional.linear", "torch.Tensor.all"} <= set(bystanders.replaced(before))
