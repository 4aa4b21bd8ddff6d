"""The collectives of a step, as Python calls them."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from fsdp_conformance.recorder.process import recording
from fsdp_conformance.recordings import files
from fsdp_conformance.recordings.events import Collectives, Mark, Step


@pytest.mark.usefixtures("group")
def test_collectives_are_counted_by_step(tmp_path: Path) -> None:
    """By kind, with their bytes; and torch's methods are its own again afterwards."""
    before = dict(vars(dist.ProcessGroup))
    with recording(tmp_path / "run"):
        model = torch.nn.Linear(2, 2)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for step in range(2):
            model(torch.ones(1, 2)).sum().backward()
            for parameter in model.parameters():
                dist.all_reduce(parameter.grad)
            if step:
                dist.all_gather_into_tensor(torch.zeros(3, dtype=torch.float64), torch.ones(3, dtype=torch.float64))
            optimizer.step()

    (rank,) = files.read(tmp_path / "run").ranks
    first, second = (event.collectives for event in rank.events if isinstance(event, Step))
    reduced = Collectives(op="all_reduce", reduce_op="SUM", dtype="float32", group=(0,), calls=2, nbytes=24)
    gathered = Collectives(op="all_gather", reduce_op="", dtype="float64", group=(0,), calls=1, nbytes=24)
    assert first == (reduced,)
    assert second == (gathered, reduced)
    assert dict(vars(dist.ProcessGroup)) == before
    dist.all_reduce(torch.ones(1))


@pytest.mark.usefixtures("group")
@pytest.mark.parametrize(("is_detached", "kept"), [(False, ["all_gather"]), (True, [])])
def test_a_gather_of_a_tensor_that_needs_a_gradient_is_marked(
    is_detached: bool, kept: list[str], tmp_path: Path
) -> None:
    """Its results have none."""
    with recording(tmp_path / "run"):
        model = torch.nn.Linear(2, 2)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for _ in range(2):
            output = model(torch.ones(1, 2))
            for _ in range(2):
                dist.all_gather([torch.zeros(1, 2)], output.detach() if is_detached else output)
            output.sum().backward()
            optimizer.step()

    marks = [event for event in files.read(tmp_path / "run").ranks[0].events if isinstance(event, Mark)]
    assert [mark.detail for mark in marks if mark.kind == "gather" and mark.step == 1] == kept
