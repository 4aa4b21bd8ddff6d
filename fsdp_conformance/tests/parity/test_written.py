"""Writes of scripts: to parameters between two steps, and to gradients after they were clipped."""

from __future__ import annotations

import contextlib
import copy
import functools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed import fsdp

from fsdp_conformance.parity.comparison import compare
from fsdp_conformance.parity.finding import Whose
from fsdp_conformance.recorder.process import recording
from fsdp_conformance.recordings import files
from fsdp_conformance.recordings.files import Recording
from fsdp_conformance.tests.parity.test_comparison import first_weight, scaled
from fsdp_conformance.tests.parity.trainings import Script, compared, record


def test_a_state_that_was_not_copied_puts_nothing_back(tmp_path: Path) -> None:
    """Both change the weights and load a state of before, which is the weights themselves in the run."""

    def put_back(copies: Callable[[Any], Any]) -> Script:
        def change(model: nn.Module, step: int) -> None:
            saved = copies(model.state_dict())
            with torch.no_grad():
                for parameter in model.parameters():
                    parameter.mul_(0.5)
            model.load_state_dict(saved)

        return Script(updated=change)

    run = record(put_back(lambda state: state), tmp_path / "run")
    finding = compare(run, record(put_back(copy.deepcopy), tmp_path / "reference")).findings[0]

    assert (finding.title, finding.whose) == (
        "Parameters have changed differently since the step before",
        Whose.SCRIPT,
    )
    assert "has no effect: its tensors are the parameters themselves" in finding.likely


@pytest.mark.parametrize("reshards", [False, True])
def test_a_weight_that_is_written_back_may_have_been_gathered_before(reshards: bool, tmp_path: Path) -> None:
    """Averaged weights are put in for an evaluation and out again. The parameters agree, and the forward differs."""

    def swapped(factor: float) -> Script:
        def swap(model: nn.Module, step: int) -> None:
            with torch.no_grad():
                first_weight(model).mul_(2.0)
                model(torch.ones(1, 17))
                if reshards:
                    with contextlib.suppress(AttributeError):
                        fsdp.FSDPModule.reshard(model)  # type: ignore[arg-type]
                first_weight(model).div_(2.0)
            vars(model.drop)["forward"] = lambda x: x * factor

        return Script(updated=swap)

    finding = compared(swapped(0.5), tmp_path, swapped(1.0)).findings[0]

    assert (finding.title, finding.step) == ("The forward computes something else", 1)
    assert finding.whose is (Whose.ENGINE if reshards else Whose.SCRIPT)
    is_named = finding.likely.startswith("the script writes to 'first.weight' between the steps. The parameters agree")
    assert is_named is not reshards


def test_a_unit_that_is_still_gathered_takes_what_is_written(tmp_path: Path) -> None:
    """Weights are merged for an evaluation. Taking that back reaches only one of them."""

    def merged(*, reaches: int) -> Script:
        def merge(model: nn.Module, step: int) -> None:
            matrices = [parameter for parameter in model.parameters() if parameter.dim() > 1]
            with torch.no_grad():
                for parameter in matrices:
                    parameter.mul_(2.0)
                model(torch.ones(1, 17))
                for parameter in matrices[:reaches]:
                    parameter.div_(2.0)

        return Script(updated=merge)

    finding = compared(merged(reaches=1), tmp_path, merged(reaches=2)).findings[0]

    assert (finding.whose, finding.tensors, finding.step) == (Whose.SCRIPT, ("second.weight",), 1)
    assert finding.likely.endswith(
        "units that are still gathered, as FSDP2's root is, take what is written, and their shards do not. Call "
        "`reshard()` first"
    )


@pytest.mark.parametrize("is_written", [True, False])
def test_a_teacher_that_is_stale_makes_another_loss(is_written: bool, tmp_path: Path) -> None:
    """It computes without gradients, before the model, and its root stays gathered."""

    def taught(directory: Path, *, by: float) -> Recording:
        with recording(directory):
            torch.manual_seed(0)
            model, teacher = nn.Linear(3, 4), nn.Linear(3, 4).requires_grad_(False)

            def scaled_forward(factor: float, x: Tensor) -> Tensor:
                return nn.Linear.forward(teacher, x) * factor

            optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
            for step in range(2):
                x = torch.randn(2, 3)
                # An engine with old values, seen from outside.
                vars(teacher)["forward"] = functools.partial(scaled_forward, by if step else 1.0)
                with torch.no_grad():
                    target = teacher(x)
                (model(x) - target).square().sum().backward()
                optimizer.step()
                optimizer.zero_grad()
                if is_written:
                    with torch.no_grad():
                        teacher.weight.lerp_(model.weight, 0.5)
        return files.read(directory)

    finding = compare(taught(tmp_path / "run", by=1.01), taught(tmp_path / "reference", by=1.0)).findings[0]

    assert (finding.title, finding.step) == ("The loss differs although the outputs agree", 1)
    assert finding.whose is (Whose.SCRIPT if is_written else Whose.EITHER)
    assert finding.likely.startswith("the forward without gradients at ")
    assert ("units that were gathered when it wrote still have other values" in finding.likely) is is_written


@pytest.mark.parametrize("gathers", [True, False])
def test_a_unit_that_the_script_gathers_takes_all_that_is_written(gathers: bool, tmp_path: Path) -> None:
    """The shards, which the optimizer steps with, stay as they are."""

    def writes(*, is_lost: bool) -> Script:
        def write(model: nn.Module, step: int) -> None:
            if gathers:
                with contextlib.suppress(AttributeError):
                    fsdp.FSDPModule.unshard(model)  # type: ignore[arg-type]
            if not is_lost:
                with torch.no_grad():
                    first_weight(model).mul_(0.9)

        return Script(updated=write)

    finding = compared(writes(is_lost=True), tmp_path, writes(is_lost=False)).findings[0]

    assert (finding.title, finding.whose, finding.step) == (
        "Parameters have changed differently since the step before", Whose.SCRIPT, 1,
    )  # fmt: skip
    begin = "the script writes to 'first.weight' in a gathered unit, by `unshard()`: "
    assert finding.likely.startswith(begin) is gathers


def test_what_both_do_to_clipped_gradients_is_done_to_shards(tmp_path: Path) -> None:
    run, reference = (record(Script(clipped=scaled(by)), tmp_path / str(by)) for by in (0.9, 0.8))
    finding = compare(run, reference).findings[0]

    assert (finding.title, finding.whose) == ("The gradients differ after clipping", Whose.SCRIPT)
    assert finding.likely.startswith("the script changes them afterwards: what it does to the shard of a rank")


def test_gradients_that_are_unscaled_twice_are_named(tmp_path: Path) -> None:
    run = record(Script(clipped=scaled(1 / 1024)), tmp_path / "run")
    finding = compare(run, record(Script(), tmp_path / "reference")).findings[0]

    assert (finding.title, finding.whose) == ("The gradients differ after clipping", Whose.SCRIPT)
    assert finding.likely.startswith("they are divided by the scale of the loss, 1024, once more: `scaler.step`")
