"""A history that was packed and unpacked is the same, bit for bit, and shares nothing with the packed bytes."""

from __future__ import annotations

from dataclasses import replace
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor
from torch.nn.utils.rnn import pack_sequence

from fsdp_conformance.errors import SuiteError
from fsdp_conformance.history.training import StepRecord, TrainingHistory
from fsdp_conformance.references.packed_history import Packed, packed, unpacked
from fsdp_conformance.references.structures import walk


class _Pair(NamedTuple):
    first: Tensor
    second: object


def _history() -> TrainingHistory:
    """Tensors of many dtypes and shapes, in all the containers that a history has."""
    outputs: list[Any] = [
        _Pair(torch.tensor([float("nan"), -0.0, float("inf")]), {"n": 3, "t": torch.arange(5)}),
        pack_sequence([torch.ones(2), torch.zeros(1)], enforce_sorted=False),
        (torch.ones(3, dtype=torch.bool), None, "text"),
        torch.eye(3).to_sparse(),
    ]
    step = StepRecord(
        step=0,
        losses=[torch.tensor(0.1, dtype=torch.float64)],
        grads={"a": torch.randn(3, 2).t(), "b": None},
        params={"a": torch.randn(2, 3).bfloat16(), "empty": torch.empty(0, 4)},
        outputs=outputs,
        updates={"a": 1},
    )
    return TrainingHistory(
        source="float64",
        rank=1,
        world_size=2,
        initial_params={"a": torch.randn(7, dtype=torch.float16), "c": torch.tensor([1 + 2j], dtype=torch.complex128)},
        requires_grad={"a": True},
        steps=[step],
        optimizer_state={"a": {"step": torch.tensor(3.0)}},
        seconds=0.5,
    )


def _leaves(history: TrainingHistory) -> list[tuple[str, Any]]:
    return list(walk(history))


def _bits(tensor: Tensor) -> Tensor:
    return tensor.to_dense().contiguous().reshape(-1).view(torch.uint8)


def test_everything_comes_back() -> None:
    given = _history()
    got = unpacked(packed(given))
    for (path, value), (same_path, other) in zip(_leaves(given), _leaves(got), strict=True):
        assert path == same_path
        if not isinstance(value, Tensor):
            assert value == other, path
            continue
        assert (value.dtype, value.shape, value.layout) == (other.dtype, other.shape, other.layout), path
        assert torch.equal(_bits(value), _bits(other)), path


def test_tensors_have_storage_of_their_own() -> None:
    given = {"a": torch.zeros(2), "b": torch.zeros(2)}
    bundle = packed(given)
    got = unpacked(bundle)
    got["a"] += 1
    assert got["a"].untyped_storage().nbytes() == 8
    assert torch.equal(given["a"], torch.zeros(2))
    assert torch.equal(got["b"], torch.zeros(2))
    assert not bundle.content.any()


def test_structure_has_no_elements() -> None:
    bundle = packed({"a": torch.ones(1000)})
    assert bundle.structure["a"].device.type == "meta"
    assert bundle.content.numel() == 4000


def test_nothing_to_pack() -> None:
    assert unpacked(packed({"a": None, "b": [1]})) == {"a": None, "b": [1]}


@pytest.mark.parametrize("change", [-16, 16])
def test_bytes_that_do_not_fit_are_an_error(change: int) -> None:
    bundle = packed([torch.ones(8)])
    size = bundle.content.numel() + change
    wrong: Packed = replace(bundle, content=torch.zeros(size, dtype=torch.uint8))
    with pytest.raises(SuiteError, match=rf"^packed value: expected .*32 bytes, got {size}$"):
        unpacked(wrong)
