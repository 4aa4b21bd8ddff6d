"""A forward that a rank begins when the others have left."""

from __future__ import annotations

import os
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import nn

from fsdp_conformance.parity.comparison import compare
from fsdp_conformance.parity.forwards import unequal_forwards
from fsdp_conformance.parity.runs import Run
from fsdp_conformance.recorder.process import recording
from fsdp_conformance.recordings import files
from fsdp_conformance.recordings.events import Mark
from fsdp_conformance.recordings.files import Recording
from fsdp_conformance.tests.parity.trainings import STEPS, Script, as_rank, train

LOST = "Connection closed by peer"


class Leave(Exception):
    """Ends the training of a rank, which then returns."""


def _recorded(script: Script, directory: Path) -> Recording:
    for rank in range(2):
        with suppress(RuntimeError), as_rank(rank, 2), recording(directory), suppress(Leave):
            train(script, rank)
    return files.read(directory)


def _fail(model: nn.Module, error: str) -> None:
    def fail(module: nn.Module, args: object) -> None:
        raise RuntimeError(error)

    model.register_forward_pre_hook(fail)


def _evaluate(error: str, *, in_forward: bool = True) -> Callable[[nn.Module, int], None]:
    """Rank 0 evaluates behind its last step, and fails in the forward or after it."""

    def evaluate(model: nn.Module, step: int) -> None:
        if step == STEPS - 1 and os.environ["RANK"] == "0":
            if in_forward:
                _fail(model, error)
            with torch.no_grad():
                model(torch.ones(1, 17))
            raise RuntimeError(error)

    return evaluate


def test_the_others_have_returned(tmp_path: Path) -> None:
    finding = unequal_forwards(Run(_recorded(Script(updated=_evaluate(LOST)), tmp_path)))

    assert finding is not None
    assert finding.step == STEPS
    assert finding.first.startswith("rank 0 ran a forward that rank 1 did not · evaluation at ")
    assert "evaluate on all ranks" in finding.likely
    assert finding.evidence == ("rank 1 had ended",)
    assert "test_forwards.py:" in finding.line


def test_the_others_have_destroyed_their_process_group(tmp_path: Path) -> None:
    recorded = _recorded(Script(updated=_evaluate(LOST)), tmp_path)
    killed = replace(recorded.ranks[1], end=None)
    left = Mark(step=STEPS, kind="left", line="train.py:7")

    finding = unequal_forwards(
        Run(replace(recorded, ranks=(recorded.ranks[0], replace(killed, events=(*killed.events, left)))))
    )

    assert finding is not None
    assert finding.evidence == ("rank 1 had destroyed its process group · train.py:7",)
    # Without the mark it may have been killed before it came to this forward.
    assert unequal_forwards(Run(replace(recorded, ranks=(recorded.ranks[0], killed)))) is None


def test_a_rank_that_has_fewer_batches_returns_first(tmp_path: Path) -> None:
    def leave(model: nn.Module, step: int) -> None:
        if step == 2 and os.environ["RANK"] == "1":
            raise Leave
        if step == 2:
            _fail(model, LOST)

    finding = unequal_forwards(Run(_recorded(Script(before_forward=leave), tmp_path)))

    assert finding is not None
    assert finding.step == 2
    assert finding.first.startswith("rank 0 ran a forward that rank 1 did not · training at ")
    assert "give all ranks the same number of batches" in finding.likely


@pytest.mark.parametrize(
    "evaluate",
    [_evaluate("mat1 and mat2 shapes cannot be multiplied"), _evaluate(LOST, in_forward=False)],
    ids=["another error", "after the forward"],
)
def test_a_rank_that_fails_for_another_reason(evaluate: Callable[[nn.Module, int], None], tmp_path: Path) -> None:
    assert unequal_forwards(Run(_recorded(Script(updated=evaluate), tmp_path))) is None


@pytest.mark.parametrize(
    ("skips", "step", "likely"),
    [(2, 2, "a step is skipped on some ranks alone"), (4, 4, "their data has different lengths")],
    ids=["in the middle", "at the end"],
)
def test_a_step_that_one_rank_leaves_out(skips: int, step: int, likely: str, tmp_path: Path) -> None:
    def recorded(skipping: int | None) -> Recording:
        directory = tmp_path / str(skipping)
        for rank in range(2):
            with as_rank(rank, 2), recording(directory):
                torch.manual_seed(0)
                model = nn.Linear(2, 1)
                optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
                for number in range(5):
                    model(torch.ones(1, 2)).square().sum().backward()
                    if rank != skipping or number != skips:
                        optimizer.step()
                        optimizer.zero_grad()
        return files.read(directory)

    run = recorded(1)

    for reference in (run, recorded(None)):
        finding = compare(run, reference).findings[0]
        assert (finding.title, finding.first) == ("The ranks have different numbers of steps", "rank 0: 5, rank 1: 4")
        assert (finding.step, finding.is_exact) == (step, True)
        assert finding.likely.startswith(likely)
