"""Two runs of one engine: equal ones pass, and every kind of difference is found."""

from __future__ import annotations

import copy

import pytest
import torch

from fsdp_conformance.checks.invariance import Losses, same_training
from fsdp_conformance.errors import SuiteError
from fsdp_conformance.history.training import StepRecord, TrainingHistory


def run(micro_batches: int = 1) -> TrainingHistory:
    """Two steps of one parameter that moves; the losses of a step add up to 1."""
    history = TrainingHistory(source="engine", rank=0, world_size=2, initial_params={"w": torch.zeros(2)})
    for step in range(2):
        record = StepRecord(step=step, losses=[torch.tensor(1.0 / micro_batches)] * micro_batches)
        record.grads = {"w": torch.ones(2), "frozen": None}
        record.params = {"w": torch.full((2,), -1.0 - step)}
        history.steps.append(record)
    return history


def messages(got: TrainingHistory, losses: Losses = Losses.EQUAL, other: TrainingHistory | None = None) -> list[str]:
    """The messages of a comparison with an undisturbed run."""
    result = same_training(got, other or run(), what="one unit", requirement="R126", losses=losses)
    assert result.count.comparisons > 0
    return [f"{finding.step} {finding.fqn} {finding.message}" for finding in result.findings]


def test_equal_runs() -> None:
    """Nothing is found, and something was compared."""
    assert messages(run()) == []


def test_one_bit_of_a_parameter() -> None:
    """The smallest difference counts, and later steps are not reported again."""
    changed = run()
    for record in changed.steps:
        record.params["w"][1] = torch.nextafter(record.params["w"][1], torch.tensor(0.0))
    (message,) = messages(changed)
    assert message.startswith("0 w parameter: expected the same bits with one unit, got differences of up to")


@pytest.mark.parametrize("kind", ["gradient", "None", "missing", "shape", "loss"])
def test_other_differences(kind: str) -> None:
    """Gradients, None, names, shapes and losses count as well."""
    changed = copy.deepcopy(run())
    record = changed.steps[1]
    assert record.grads is not None
    if kind == "gradient":
        record.grads["w"] = torch.tensor([1.0, 2.0])
    elif kind == "None":
        record.grads["frozen"] = torch.zeros(2)
    elif kind == "missing":
        record.params.clear()
        record.params["v"] = torch.zeros(2)
    elif kind == "shape":
        record.params["w"] = torch.zeros(3)
    else:
        record.losses[0] = torch.tensor(2.0)
    texts = messages(changed)
    assert texts
    # A parameter that is gone altogether also cannot have moved.
    assert all(message.startswith(("1 ", "None None parameters")) for message in texts)


def test_losses_of_other_splits() -> None:
    """Only the sums are related if a step has other micro-batches, and nothing if a rank has other samples."""
    assert messages(run(micro_batches=2), Losses.SUMS) == []
    assert messages(run(micro_batches=2)) != []
    doubled = run()
    for record in doubled.steps:
        record.losses = [loss * 2 for loss in record.losses]
    assert messages(doubled, Losses.SUMS) != []
    assert messages(doubled, Losses.OTHERS) == []


def test_runs_that_do_not_train() -> None:
    """Two runs in which nothing moves are equal, and prove nothing."""
    idle = run()
    for record in idle.steps:
        record.params["w"] = torch.zeros(2)
    texts = messages(idle, other=copy.deepcopy(idle))
    assert texts == ["None None parameters: expected some that training moved, got none"] * 2


def test_different_lengths() -> None:
    """Runs of different lengths are a mistake of the case."""
    shorter = run()
    shorter.steps.pop()
    with pytest.raises(SuiteError, match="steps: expected 2, got 1"):
        messages(shorter)
