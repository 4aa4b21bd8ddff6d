"""Values come back as they were; whatever the bytes are, nothing is executed and no other value comes back."""

from __future__ import annotations

import json
from collections import OrderedDict
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor, nn

from fsdp_conformance.errors import SuiteError
from fsdp_conformance.history.collective import CollectiveRecord, Op
from fsdp_conformance.history.training import StepRecord, TrainingHistory
from fsdp_conformance.history.transfer import NotData, Opaque, Unreadable, from_bytes, to_bytes
from fsdp_conformance.outcome.records import Finding

COLLECTIVE = CollectiveRecord(seq=3, op=Op.ALL_GATHER, name="gather", group=(0, 1), nbytes=8, dtype="float32")

VALUES = [
    None,
    True,
    -3,
    "\ud800 and \x1b[2J",
    [1.5, float("inf"), -0.0],
    (1, (2,)),
    {1, 2},
    frozenset({"a"}),
    {1: {"a": None}},
    OrderedDict(b=1, a=2),
    torch.Size([2, 3]),
    torch.bfloat16,
    torch.device("cpu"),
    Path("a/b"),
    Op.ALL_GATHER,
    COLLECTIVE,
    Finding(requirement="R001", check="loss parity", message="loss: expected 1, got 2", element=(0, 1)),
]


@pytest.mark.parametrize("value", VALUES, ids=lambda value: type(value).__name__)
def test_a_value_comes_back(value: object) -> None:
    """Equal, and of the same class; equal values give equal bytes."""
    loaded = from_bytes(to_bytes(value))

    assert loaded == value
    assert type(loaded) is type(value)
    assert to_bytes(loaded) == to_bytes(value)


@pytest.mark.parametrize(
    "tensor",
    [
        torch.tensor([float("nan"), -0.0, 1e-45]),
        torch.randn(3, 2).t(),
        torch.empty(0, 4),
        torch.tensor(3, dtype=torch.uint8),
        torch.ones(2, dtype=torch.complex64),
        torch.ones(3).bfloat16().requires_grad_(),
        torch.ones(2, 2).expand(4, 2, 2),
    ],
    ids=lambda tensor: f"{tensor.dtype}-{tuple(tensor.shape)}",
)
def test_a_tensor_comes_back(tensor: Tensor) -> None:
    """Every bit, with a storage of its own."""
    loaded = from_bytes(to_bytes({"tensor": tensor}))["tensor"]

    assert (loaded.dtype, loaded.shape, loaded.requires_grad) == (tensor.dtype, tensor.shape, tensor.requires_grad)
    assert to_bytes(loaded) == to_bytes(tensor)
    assert loaded.untyped_storage().data_ptr() != tensor.untyped_storage().data_ptr() or not tensor.numel()


def test_a_tensor_stays_as_it_is() -> None:
    """Whoever owns it can still free its storage, as engines do with gathered parameters."""
    tensor = torch.ones(3)
    to_bytes(tensor)
    tensor.untyped_storage().resize_(0)

    assert tensor.untyped_storage().nbytes() == 0


def test_a_history_comes_back() -> None:
    """With everything that a rank records."""
    step = StepRecord(step=0, losses=[torch.tensor(0.5)], grads={"a": None}, outputs=[(torch.ones(2), "text")])
    history = TrainingHistory(source="x", rank=1, world_size=2, steps=[step], collectives=[COLLECTIVE], seconds=0.25)

    loaded = from_bytes(to_bytes(history))

    assert (loaded.rank, loaded.seconds, loaded.collectives) == (1, 0.25, [COLLECTIVE])
    assert torch.equal(loaded.steps[0].outputs[0][0], torch.ones(2))


class _Stranger(NamedTuple):
    """A class that was not named to `carry`."""

    x: int


@pytest.mark.parametrize("live", [nn.Linear(1, 1), object(), _Stranger(1), torch.eye(2).to_sparse(), print])
def test_a_live_object_does_not_travel(live: object) -> None:
    """Only the name of its class does, if that is enough."""
    with pytest.raises(NotData, match="is a live object"):
        to_bytes([live])

    (loaded,) = from_bytes(to_bytes([live], opaque=True))

    assert loaded == Opaque(f"{type(live).__module__}.{type(live).__qualname__}")
    with pytest.raises(SuiteError, match="must read it through `observe`"):
        _ = loaded.weight
    assert not hasattr(loaded, "weight")


@pytest.mark.parametrize(
    "structure",
    [
        ["code", "print()"],
        ["record", "Path", ["dict"]],
        ["record", "TrainingHistory", ["dict", ["stranger", 1]]],
        ["enum", "Op", "no such"],
        ["tensor", "save", [1], False, "cpu"],
        ["tensor", "float32", [2], False, "cpu"],
        ["tensor", "float32", [-1], False, "cpu"],
        ["tensor", "float32", [10**12], False, "cpu"],
        ["tensor", "float32", [1], False, "no such device"],
        ["dict", [["list"], 1]],
        ["dtype", "nn"],
        ["float", "x"],
        [["list"]],
        [],
    ],
    ids=str,
)
def test_a_structure_that_was_not_written(structure: Any) -> None:
    """It is refused, whatever it names."""
    with pytest.raises(Unreadable):
        from_bytes(json.dumps(structure).encode() + b"\n0000")


@pytest.mark.parametrize("data", [b"", b"\x80\x04", b"[" * 100_000, b"null\nrest", b"\xff\xfe"])
def test_bytes_that_are_no_structure(data: bytes) -> None:
    """They are refused, also if they are nested without end."""
    with pytest.raises(Unreadable):
        from_bytes(data)
