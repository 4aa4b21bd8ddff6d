"""Fingerprints are taken again only of what has changed."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import pytest
import torch
from torch import Tensor

from fsdp_conformance.recorder.fingerprints import SMALL, Part, Pending, whole_part
from fsdp_conformance.recorder.named import Gradients, Named
from fsdp_conformance.recorder.unchanged import Unchanged


def _tensor(dtype: torch.dtype = torch.float32, size: int = SMALL + 1500) -> Tensor:
    return torch.randn(size, generator=torch.Generator().manual_seed(1)).to(dtype)


def _parts(tensor: Tensor) -> dict[str, list[Part]]:
    return {"weight": [whole_part(tensor)]}


def test_an_unchanged_tensor_is_not_computed_again(monkeypatch: pytest.MonkeyPatch) -> None:
    tensor, other = _tensor(), _tensor()
    gradients = Gradients({"first": [whole_part(other)], **_parts(tensor)})
    computed = []

    def pending(tensors: Sequence[Sequence[Part]]) -> Pending:
        computed.append(len(tensors))
        return Pending(tensors)

    monkeypatch.setattr("fsdp_conformance.recorder.named.Pending", pending)
    other.mul_(2)

    again = Named({**_parts(tensor), "first": [whole_part(other)]}, gradients)

    assert computed == [1]
    assert list(again.values()) == ["weight", "first"]
    assert again.values()["weight"] == gradients.values()["weight"]
    assert again.values()["first"] == Named({"first": [whole_part(other)]}).values()["first"]


def _zero_one_row(tensor: Tensor) -> None:
    tensor.data[5000:5010] = 0


def _swap(tensor: Tensor) -> None:
    tensor.data[[7, 8]] = tensor.data[[8, 7]]


def _negate(tensor: Tensor) -> None:
    tensor.data.neg_()


def _change_the_last(tensor: Tensor) -> None:
    tensor.data[-1] += 1e-4


def _write_in_place(tensor: Tensor) -> None:
    # The values stay the same, but the version number changes.
    tensor.mul_(1)


def _write_nan(tensor: Tensor) -> None:
    tensor.data[0] = torch.nan


@pytest.mark.parametrize(
    "change", [_zero_one_row, _swap, _negate, _change_the_last, _write_in_place, _write_nan], ids=lambda f: f.__name__
)
def test_every_write_is_seen(change: Callable[[Tensor], None]) -> None:
    tensor = _tensor()
    unchanged = Unchanged(_parts(tensor))
    assert unchanged.among(_parts(tensor)) == {"weight"}

    change(tensor)

    assert unchanged.among(_parts(tensor)) == set()


def test_other_memory_is_another_tensor() -> None:
    tensor = _tensor()
    unchanged = Unchanged(_parts(tensor))

    assert unchanged.among(_parts(tensor.clone())) == set()
    assert unchanged.among({"bias": [whole_part(tensor)]}) == set()
    assert unchanged.among({"weight": []}) == set()


@pytest.mark.parametrize(
    "tensor",
    [_tensor(torch.bfloat16), _tensor(size=100), _tensor().view(2, -1).T],
    ids=["bfloat16", "small", "not contiguous"],
)
def test_what_a_checksum_cannot_tell_is_left_out(tensor: Tensor) -> None:
    assert Unchanged(_parts(tensor)).among(_parts(tensor)) == set()


def test_a_tensor_with_nan_is_recorded_again() -> None:
    tensor = _tensor()
    tensor[3] = torch.nan

    assert Unchanged(_parts(tensor)).among(_parts(tensor)) == set()
