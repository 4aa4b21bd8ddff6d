"""Tensors are found and replaced in anything that a forward may return."""

from __future__ import annotations

import dataclasses
from collections import OrderedDict, deque
from types import SimpleNamespace
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn.utils.rnn import pack_sequence

from fsdp_conformance.engine.structures import tensors_in, with_tensors


class _Pair(NamedTuple):
    one: Tensor
    other: Any


@dataclasses.dataclass
class _Record:
    value: Tensor
    nested: Any
    text: str = "text"


def test_tensors_in_nested_structures() -> None:
    """Tensors are found in order, in every container that a forward may return, even one that holds itself."""
    tensors = [torch.tensor(float(index)) for index in range(9)]
    loop: list[Any] = [tensors[8]]
    loop.append(loop)
    packed = pack_sequence([torch.ones(2), torch.ones(1)])
    structure = {
        "list": [tensors[0], (tensors[1],)],
        "pair": _Pair(tensors[2], OrderedDict(a=tensors[3])),
        "record": _Record(tensors[4], [None, "text", 3]),
        "namespace": SimpleNamespace(a=tensors[5]),
        "deque": deque([tensors[6]]),
        "set": {tensors[7]},
        "loop": loop,
        "packed": packed,
        "class": _Record,
        "range": range(10**12),
    }

    leaves = list(tensors_in(structure))
    assert [float(tensor) for tensor in leaves[:9]] == [float(index) for index in range(9)]
    assert leaves[9] is packed.data


def test_structures_with_other_tensors() -> None:
    """Types and other objects stay the same, originals are not modified, and batch sizes are left alone."""
    packed = pack_sequence([torch.ones(1), torch.ones(2)], enforce_sorted=False)
    record = _Record(torch.ones(1), (None, "text", {3: torch.ones(1)}))
    structure = {
        "ordered": OrderedDict(a=[torch.ones(1)]),
        "pair": _Pair(torch.ones(1), {torch.ones(1)}),
        "record": record,
        "packed": packed,
    }
    changed = with_tensors(structure, lambda tensor: tensor + 1)

    assert [float(tensor.max()) for tensor in tensors_in({**changed, "packed": changed["packed"].data})] == [2.0] * 6
    assert torch.equal(packed.batch_sizes, changed["packed"].batch_sizes)
    assert [type(changed[key]) for key in ("ordered", "pair", "record")] == [OrderedDict, _Pair, _Record]
    assert changed["record"].nested[:2] == (None, "text")
    assert float(record.value) == 1.0
    assert float(record.nested[2][3]) == 1.0
