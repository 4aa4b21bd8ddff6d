"""The optimizer's state against the reference's, and the steps of an optimizer in backward."""

from __future__ import annotations

import torch
from torch import Tensor

from fsdp_conformance.checks.optimizer_state import same_state, stepped_once
from fsdp_conformance.fixtures import probes
from fsdp_conformance.history.training import StepRecord, TrainingHistory
from fsdp_conformance.references.reference_set import References
from fsdp_conformance.workload.definition import Regime

State = dict[str, dict[str, Tensor]]


def state() -> State:
    """One parameter's, as Adam has it."""
    return {"w": {"step": torch.tensor(3.0), "exp_avg": torch.tensor([1.0, 2.0])}}


def messages(got: State, *, exact: bool = True) -> list[str]:
    """The messages of a comparison with that state."""
    expected = TrainingHistory(source="float64", rank=0, world_size=2, optimizer_state=state())
    references = References(
        workload=probes.exact_mlp(), regime=Regime(), rank=0, world_size=2, histories={"float64": expected}, exact=exact
    )
    result = same_state(got, references, requirement="R140")
    assert result.count.comparisons >= 1
    return [finding.message for finding in result.findings]


def test_equal_state() -> None:
    """Nothing is found."""
    assert messages(state()) == []


def test_step_counts_are_equal_or_wrong() -> None:
    """One step more is found, with a bound for other tensors or without."""
    got = state()
    got["w"]["step"] = torch.tensor(4.0)
    assert messages(got) == messages(got, exact=False) == ["step: expected 3.0, got 4.0"]


def test_moments() -> None:
    """Bitwise if the workload is exact, and otherwise within a small part of the largest element."""
    got = state()
    got["w"]["exp_avg"] = torch.tensor([1.0, 2.0001])
    assert len(messages(got)) == 1
    assert messages(got, exact=False) == []
    got["w"]["exp_avg"] = torch.tensor([1.0, 2.1])
    assert len(messages(got, exact=False)) == 1


def test_missing_and_added_state() -> None:
    """A tensor that is missing, has another shape, or belongs to a parameter without state."""
    got = state()
    del got["w"]["exp_avg"]
    assert messages(got) == ["exp_avg: expected a tensor, got None"]
    got["w"]["exp_avg"] = torch.zeros(1)
    assert messages(got) == ["shape of exp_avg: expected (2,), got (1,)"]
    assert messages({}) == ["step: expected a tensor, got None", "exp_avg: expected a tensor, got None"]
    assert messages({**state(), "frozen": {"step": torch.tensor(1.0)}}) == [
        "state: expected none, as the reference has none, got some"
    ]


def test_steps_in_backward() -> None:
    """The hooks of each trainable parameter are called once in each step; those of frozen ones not at all."""
    history = TrainingHistory(source="engine", rank=0, world_size=2, requires_grad={"w": True, "v": False})
    history.steps = [
        StepRecord(step=step, losses=[], updates={"w": step + 1}, hook_calls={"w": 1}) for step in range(2)
    ]
    result = stepped_once(history, requirement="R142")
    assert [(finding.step, finding.message) for finding in result.findings] == [(1, "steps: expected 1, got 2")]
    history.steps[1].updates.clear()
    assert [finding.got for finding in stepped_once(history, requirement="R142").findings] == ["0"]
    history.steps[1].updates = {"w": 1}
    history.steps[0].hook_calls = {}
    assert [finding.message for finding in stepped_once(history, requirement="R142").findings] == [
        "calls of another hook: expected 1, got 0"
    ]
