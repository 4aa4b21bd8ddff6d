"""Optimizers that have other states than in the reference, or step other parameters."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import nn

from fsdp_conformance.parity.comparison import compare
from fsdp_conformance.parity.finding import Whose
from fsdp_conformance.recordings.events import Step
from fsdp_conformance.recordings.files import RankRecording
from fsdp_conformance.tests.parity.trainings import Script, compared, record


@pytest.mark.parametrize("by_torch", [False, True])
def test_a_state_that_differs_after_it_was_loaded(by_torch: bool, tmp_path: Path) -> None:
    def resumed(value: float) -> Script:
        def make(model: nn.Module, lr: float, weight_decay: float) -> torch.optim.Optimizer:
            optimizer = torch.optim.AdamW(model.parameters(), lr=lr, weight_decay=weight_decay)
            state = {
                place: {"step": torch.tensor(2.0)}
                | {key: torch.full_like(each, value) for key in ("exp_avg", "exp_avg_sq")}
                for place, each in enumerate(model.parameters())
            }
            optimizer.load_state_dict({**optimizer.state_dict(), "state": state})
            return optimizer

        return Script(optimizer=make)

    run, reference = record(resumed(0.5), tmp_path / "run"), record(resumed(0.25), tmp_path / "reference")
    if by_torch:
        run = replace(run, ranks=tuple(map(_by_torch, run.ranks)))

    finding = compare(run, reference).findings[0]

    assert (finding.title, finding.step) == ("The optimizer's state differs after it was loaded", 0)
    assert finding.first.startswith("'first.weight/exp_avg'")
    assert finding.whose is (Whose.ENGINE if by_torch else Whose.SCRIPT)


def _by_torch(rank: RankRecording) -> RankRecording:
    events = (replace(event, is_loaded_by_torch=True) if isinstance(event, Step) else event for event in rank.events)
    return replace(rank, events=tuple(events))


@pytest.mark.parametrize("is_loaded", [False, True])
def test_an_optimizer_that_is_made_after_the_load_is_the_scripts(is_loaded: bool, tmp_path: Path) -> None:
    """If a state was loaded, and is not there, the function that loads it may be the reason."""

    def resumed(*, counts: bool, loads: bool) -> Script:
        def make(model: nn.Module, lr: float, weight_decay: float) -> torch.optim.Optimizer:
            optimizer = torch.optim.AdamW(model.parameters(), lr=lr, weight_decay=weight_decay)
            if loads:
                state = {
                    place: {"step": torch.tensor(2.0), "exp_avg": torch.zeros_like(each)}
                    | {"exp_avg_sq": torch.zeros_like(each)}
                    for place, each in enumerate(model.parameters())
                }
                optimizer.load_state_dict({**optimizer.state_dict(), "state": state})
            if not counts:
                optimizer.state.clear()
            return optimizer

        return Script(optimizer=make)

    run = compared(resumed(counts=False, loads=is_loaded), tmp_path, resumed(counts=True, loads=True))

    finding = run.findings[0]
    assert (finding.title, finding.step) == ("The optimizer counts its steps differently", 0)
    assert finding.whose is (Whose.EITHER if is_loaded else Whose.SCRIPT)


@pytest.mark.parametrize("is_here", [True, False])
def test_an_optimizer_moves_what_has_a_gradient_of_zeros(is_here: bool, tmp_path: Path) -> None:
    def zeros(model: nn.Module, step: int) -> None:
        if step == 1:
            model.get_parameter("first.weight").grad = torch.zeros_like(model.get_parameter("first.weight"))

    def nothing(model: nn.Module, step: int) -> None:
        if step == 1:
            model.get_parameter("first.weight").grad = None

    run, reference = (Script(clipped=zeros), Script(clipped=nothing))[:: 1 if is_here else -1]

    finding = compared(run, tmp_path, reference).findings[0]

    assert (finding.title, finding.step) == ("The optimizer counts its steps differently", 1)
    where, other = ("here", "in the reference")[:: 1 if is_here else -1]
    assert finding.likely.startswith(f"'first.weight' has a gradient of zeros {where}, and none {other}.")
