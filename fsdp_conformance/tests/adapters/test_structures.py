"""Tensors are found in whatever models take and give, and the containers stay what they are."""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch.nn.utils.rnn import PackedSequence, pack_sequence

from fsdp_conformance.adapters.structures import map_tensors


class Pair(NamedTuple):
    left: Any
    right: Any


@dataclass(frozen=True)
class Frozen:
    values: Any
    scale: float


def doubled(value: Any) -> Any:
    return map_tensors(value, lambda tensor: tensor * 2)


def test_containers_keep_their_types() -> None:
    """Lists, tuples, named tuples, dictionaries, dataclasses: types and non-tensors are unchanged."""
    one = torch.ones(2)
    value = {"a": [one, (one, 3)], "b": Pair(one, Frozen(values=OrderedDict(x=one), scale=0.5)), "c": None}

    got = doubled(value)

    assert list(got) == ["a", "b", "c"]
    assert type(got["a"][1]) is tuple
    assert got["a"][1][1] == 3
    assert type(got["b"]) is Pair
    assert type(got["b"].right) is Frozen
    assert type(got["b"].right.values) is OrderedDict
    assert got["b"].right.scale == 0.5
    assert got["b"].right.values["x"].tolist() == [2.0, 2.0]
    assert one.tolist() == [1.0, 1.0]
    assert value["b"].right.values["x"] is one  # type: ignore[union-attr]


def test_packed_sequences() -> None:
    """The data is changed, the batch sizes are not: torch wants them on the CPU."""
    packed = pack_sequence([torch.tensor([1.0, 2.0]), torch.tensor([3.0])])

    got = doubled(packed)

    assert type(got) is PackedSequence
    assert got.data.tolist() == (packed.data * 2).tolist()
    assert got.batch_sizes is packed.batch_sizes
