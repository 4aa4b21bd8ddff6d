"""Checks that the tensors of a group agree in everything but their values, for collectives that rely on it."""

from __future__ import annotations

import json

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup

from fsdp_conformance.engine.errors import TensorMetaMismatch
from fsdp_conformance.engine.mesh.axis import Axis, axis_group, communicates_from
from fsdp_conformance.engine.verification import texts_unless_equal


def check_tensor_meta(tensor: Tensor, axis: Axis, *, shape: bool = False, stride: bool = False) -> None:
    """
    Compare dtype and requires_grad, and on request shape and stride, over this rank's row. Collective.

    Ranks outside the row take no part. A meta tensor is compared like any other, so ranks do communicate for it. Raises
    TensorMetaMismatch on every rank of the row if one differs from the first, naming each rank (of the world) and every
    requested property in which it differs.

    Source: torch's `check_tensor_meta` (distributed/tensor/_collective_utils.py), which compares the whole world.
    """
    group = axis_group(axis)
    facts: dict[str, object] = {
        "dtype": str(tensor.dtype).removeprefix("torch."),
        "requires_grad": tensor.requires_grad,
    }
    if shape:
        facts["shape"] = list(tensor.shape)
    if stride:
        facts["stride"] = list(tensor.stride())
    texts = texts_unless_equal(json.dumps(facts), group, device=_sending_device(tensor.device, group))
    if texts is None:
        return
    first, *others = (json.loads(text) for text in texts)
    ranks = dist.get_process_group_ranks(group)
    raise TensorMetaMismatch(
        [
            f"rank {rank}: {name}: expected {_shown(first[name])}, as on rank {ranks[0]}, got {_shown(mine[name])}"
            for rank, mine in zip(ranks[1:], others, strict=True)
            for name in facts
            if mine.get(name) != first.get(name)
        ],
        where=f"check_tensor_meta, rank {dist.get_rank()}",
    )


def _sending_device(device: torch.device, group: ProcessGroup) -> torch.device:
    """The tensor's device if the group has a backend for it, otherwise one that it has a backend for."""
    if communicates_from(group, device):
        return device
    host = torch.device("cpu")
    return host if communicates_from(group, host) else group._device_types[0]


def _shown(value: object) -> str:
    return str(tuple(value)) if isinstance(value, list) else str(value)
