"""Tensors that are not those that train: parameters of before sharding, and `.data` of DTensors."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed import fsdp
from torch.distributed.tensor import DTensor

from fsdp_conformance.parity.alone import suspicions
from fsdp_conformance.parity.finding import Whose
from fsdp_conformance.parity.runs import Run
from fsdp_conformance.recorder.process import recording
from fsdp_conformance.recordings import files

pytestmark = pytest.mark.usefixtures("group")


def sharded(model: nn.Sequential, kind: str) -> nn.Module:
    if kind == "fsdp2":
        for layer in model:
            fsdp.fully_shard(layer)
        fsdp.fully_shard(model)
        return model
    return fsdp.FullyShardedDataParallel(model, use_orig_params=kind != "fsdp1", device_id=torch.device("cpu"))


def record(directory: Path, kind: str, *, after: bool) -> Run:
    """One step whose loss has a penalty on a weight that was taken from the model after, or before, it was sharded."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 2))
    with recording(directory):
        weight: Any = model[1].weight
        wrapped = sharded(model, kind)
        if after:
            weight = list(wrapped.parameters())[-2]
        optimizer = torch.optim.SGD(wrapped.parameters(), lr=0.1)
        penalty = weight.full_tensor() if isinstance(weight, DTensor) else weight
        (wrapped(torch.ones(3, 4)).sum() + penalty.square().sum()).backward()
        optimizer.step()
    return Run(files.read(directory))


@pytest.mark.parametrize("kind", ["fsdp1", "fsdp2"])
def test_a_weight_of_before_sharding_in_the_loss_is_a_mistake(kind: str, tmp_path: Path) -> None:
    (finding,) = suspicions(record(tmp_path, kind, after=False))

    assert finding.title == "The loss uses parameters from before the model was sharded"
    assert (finding.whose, finding.step) == (Whose.SCRIPT, 0)
    assert finding.likely.startswith("the loss is computed with '1.weight' as they were before the model was sharded")


@pytest.mark.parametrize(("kind", "after"), [("fsdp2", True), ("fsdp1 with its parameters", False)])
def test_a_weight_that_is_the_models_is_none(kind: str, after: bool, tmp_path: Path) -> None:
    """FSDP1 with `use_orig_params` keeps the parameters that the user has."""
    assert not list(suspicions(record(tmp_path, kind, after=after)))


def test_an_assignment_to_the_data_of_a_shard_has_no_effect(tmp_path: Path) -> None:
    torch.manual_seed(0)
    model = nn.Linear(4, 4)
    fsdp.fully_shard(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with recording(tmp_path):
        for _ in range(2):
            model(torch.ones(3, 4)).sum().backward()
            optimizer.step()
            for parameter in model.parameters():
                assert isinstance(parameter, DTensor)
                before = parameter.to_local().clone()
                parameter.data = parameter.data * 0
                assert torch.equal(parameter.to_local(), before)
                parameter.data = parameter.data.contiguous()
    run = Run(files.read(tmp_path))
    (finding,) = suspicions(run)

    assert finding.title == "An assignment to a parameter's `.data` has no effect"
    assert finding.line.startswith("fsdp_conformance/tests/recorder/test_originals.py:")
    # One for both parameters, after each step.
    assert [mark.step for mark in run.marks if mark.kind == "data"] == [1, 2]
