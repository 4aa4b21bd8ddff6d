"""Writes to parameters between two steps."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Shard

from fsdp_conformance.recorder.changes import Contents


@pytest.fixture
def mesh(group: None) -> DeviceMesh:
    return init_device_mesh("cpu", (1,))


def written(change: Callable[[Tensor], object], tensor: Tensor | None = None) -> bool:
    """True if a change of a tensor is seen."""
    held = {"weight": torch.arange(300.0).view(100, 3) if tensor is None else tensor}
    contents = Contents(held)
    with torch.no_grad():
        change(held["weight"])
    return contents.changed_in(held) == ("weight",)


@pytest.mark.parametrize(
    "change",
    [
        lambda tensor: tensor.mul_(1.0),
        lambda tensor: tensor[7].zero_(),
        lambda tensor: tensor.data.mul_(2.0),
        lambda tensor: tensor.data.fill_(float("nan")),
    ],
    ids=["same values", "one row", "data", "nan"],
)
def test_a_write_is_seen(change: Callable[[Tensor], object]) -> None:
    assert written(change)


@pytest.mark.parametrize(
    "change",
    [
        lambda tensor: tensor.mul_(2.0),
        lambda tensor: tensor.to_local().mul_(2.0),
        lambda tensor: tensor.detach().to_local().mul_(2.0),
        lambda tensor: tensor.data.mul_(2.0),
    ],
    ids=["DTensor", "shard", "detached shard", "data"],
)
def test_a_write_to_a_dtensor_is_seen(change: Callable[[Tensor], object], mesh: DeviceMesh) -> None:
    assert written(change, DTensor.from_local(torch.ones(100, 3), mesh, [Shard(0)]))


def test_what_is_only_read_has_not_changed() -> None:
    """A NaN is no change, nor a tensor without elements, one that is not contiguous, or an integer."""
    tensors = {
        "nan": torch.full((5,), float("nan")),
        "empty": torch.empty(0),
        "transposed": torch.randn(7, 90).t(),
        "scalar": torch.tensor(1.0),
        "integers": torch.arange(1000),
        "half": torch.randn(33).bfloat16(),
    }

    contents = Contents(tensors)

    assert contents.changed_in(tensors) == ()


def test_a_parameter_that_was_gathered_or_cast_is_not_written_to() -> None:
    contents = Contents({"gathered": torch.zeros(4), "cast": torch.zeros(4), "gone": torch.zeros(4)})

    assert contents.changed_in({"gathered": torch.ones(8), "cast": torch.ones(4).bfloat16()}) == ()
