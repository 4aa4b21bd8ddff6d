"""Inputs of several arguments: which of them differ."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from fsdp_conformance.parity.comparison import compare
from fsdp_conformance.parity.finding import Whose
from fsdp_conformance.recorder.process import recording
from fsdp_conformance.recordings import files
from fsdp_conformance.recordings.files import Recording


class WithLabels(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(8, 4)

    def forward(self, x: Tensor, labels: Tensor) -> Tensor:
        return nn.functional.cross_entropy(self.layer(x), labels, ignore_index=-1)


def record(
    directory: Path,
    labels: Callable[[Tensor], Tensor] = lambda labels: labels,
    order: Callable[[Tensor], Tensor] = lambda batch: batch,
    *,
    by_name: bool = False,
) -> Recording:
    """One rank that trains a step of a batch of four samples and their labels."""
    torch.manual_seed(0)
    model = WithLabels()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    x, target = torch.randn(4, 8), torch.tensor([0, 1, 2, 3])
    batch, target = order(x), order(labels(target))
    os.environ.update(RANK="0", WORLD_SIZE="1")
    try:
        with recording(directory):
            loss = model(x=batch, labels=target) if by_name else model(batch, target)
            loss.backward()
            optimizer.step()
    finally:
        del os.environ["RANK"], os.environ["WORLD_SIZE"]
    return files.read(directory)


@pytest.mark.parametrize(
    ("labels", "likely"),
    [
        (
            lambda labels: labels.masked_fill(labels == 0, -1),
            "the samples are the same in positional argument 0, and others in positional argument 1: what is made",
        ),
        (lambda labels: labels.flip(0), "positional argument 0 and positional argument 1 are paired in another way"),
    ],
    ids=["masked", "exchanged"],
)
def test_labels_are_inputs_too(labels: Callable[[Tensor], Tensor], likely: str, tmp_path: Path) -> None:
    finding = compare(record(tmp_path / "run", labels), record(tmp_path / "reference")).findings[0]

    assert (finding.title, finding.whose, finding.step) == ("The inputs differ", Whose.DATA, 0)
    assert finding.first == "rank 0 · micro-batch 0 · positional argument 1"
    assert finding.likely.startswith(likely)


@pytest.mark.parametrize("by_name", [False, True], ids=["positional", "by name"])
def test_another_order_or_other_names_of_the_same_samples_are_no_difference(by_name: bool, tmp_path: Path) -> None:
    run = record(tmp_path / "run", order=lambda batch: batch.flip(0), by_name=by_name)

    assert not compare(run, record(tmp_path / "reference")).findings
