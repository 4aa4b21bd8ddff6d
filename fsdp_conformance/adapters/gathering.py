"""
Full values of many sharded tensors with one all-gather, in place of one `full_tensor()` each.

A history reads every parameter and every gradient at every step. `DTensor.full_tensor()` redistributes one tensor at a
time, and these reads took more of a case's time than the training between them.

    gathered    the full values of those tensors that are plain shards of equal parts; collective

Only what is certain is gathered: a DTensor with one `Shard`, elsewhere replicated, whose local part has the shape that
`torch.chunk` gives this rank. Whatever else there is, is left to `full_tensor()`: so are all tensors of a mesh
dimension on which ranks disagree about them, which the ranks find out first, because a gather of unequal lists would
hang.
"""

from __future__ import annotations

import zlib
from collections.abc import Hashable, Mapping
from dataclasses import dataclass
from typing import TypeVar

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard

Key = TypeVar("Key", bound=Hashable)


@dataclass(frozen=True, slots=True)
class _Part:
    """One rank's part of a sharded tensor."""

    local: Tensor
    shape: tuple[int, ...]
    """Of the full tensor."""
    dim: int
    """The dimension that is sharded."""

    def shape_on(self, rank: int, ranks: int) -> tuple[int, ...]:
        """The shape of a rank's part, as `torch.chunk` divides: full parts first, the last ones smaller or empty."""
        size = self.shape[self.dim]
        part = -(-size // ranks)
        own = max(0, min(size, (rank + 1) * part) - rank * part)
        return (*self.shape[: self.dim], own, *self.shape[self.dim + 1 :])


def gathered(tensors: Mapping[Key, Tensor]) -> dict[Key, Tensor]:
    """Full values on the CPU, without the tensors that only `full_tensor()` can read. Collective if any is sharded."""
    along: dict[tuple[DeviceMesh, int], dict[Key, _Part]] = {}
    full: dict[Key, Tensor] = {}
    with torch.no_grad():
        for key, tensor in tensors.items():
            if isinstance(tensor, DTensor):
                for mesh_dim, part in _parts(tensor):
                    along.setdefault((tensor.device_mesh, mesh_dim), {})[key] = part
        for (mesh, mesh_dim), parts in along.items():
            full |= _gathered_along(mesh, mesh_dim, parts)
    return full


def _parts(tensor: DTensor) -> list[tuple[int, _Part]]:
    """
    This rank's part, and the dimension of the mesh that it lies along.

    None for other placements: with several shards, the order of elements is not that of ranks.
    """
    mesh = tensor.device_mesh
    kinds = [type(placement) for placement in tensor.placements]
    # By type: a strided shard is a Shard, too.
    if mesh.get_coordinate() is None or kinds.count(Shard) != 1 or kinds.count(Replicate) != len(kinds) - 1:
        return []
    return [
        (mesh_dim, _Part(tensor.to_local().detach(), tuple(tensor.shape), placement.dim % tensor.ndim))
        for mesh_dim, placement in enumerate(tensor.placements)
        if isinstance(placement, Shard)
    ]


def _gathered_along(mesh: DeviceMesh, mesh_dim: int, parts: Mapping[Key, _Part]) -> dict[Key, Tensor]:
    """Full values of tensors that are sharded along one dimension of a mesh; empty if ranks disagree about them."""
    group = mesh.get_group(mesh_dim)
    rank, ranks = mesh.get_local_rank(mesh_dim), mesh.size(mesh_dim)
    regular = all(tuple(part.local.shape) == part.shape_on(rank, ranks) for part in parts.values())
    # Without the keys: as with `full_tensor()`, the order counts.
    layout = repr([(part.shape, part.dim, part.local.dtype) for part in parts.values()])
    if not _agree(regular, layout, mesh.device_type, group):
        return {}
    by_dtype: dict[torch.dtype, dict[Key, _Part]] = {}
    for key, part in parts.items():
        by_dtype.setdefault(part.local.dtype, {})[key] = part
    full: dict[Key, Tensor] = {}
    for same in by_dtype.values():
        full |= _gathered_parts(same, ranks, mesh.device_type, group)
    return full


def _agree(regular: bool, layout: str, device_type: str, group: dist.ProcessGroup) -> bool:
    """True if every rank of the group can gather, and would gather the same. Collective."""
    digest = zlib.crc32(layout.encode()) >> 1  # fits an int32
    flags = torch.tensor([not regular, digest, -digest], dtype=torch.int32, device=device_type)
    dist.all_reduce(flags, op=dist.ReduceOp.MAX, group=group)
    irregular, largest, smallest = flags.tolist()
    return not irregular and largest == -smallest


def _gathered_parts(
    parts: Mapping[Key, _Part], ranks: int, device_type: str, group: dist.ProcessGroup
) -> dict[Key, Tensor]:
    """Full values of parts with one dtype. Collective."""
    shapes = {key: [part.shape_on(rank, ranks) for rank in range(ranks)] for key, part in parts.items()}
    numels = [sum(_numel(of_ranks[rank]) for of_ranks in shapes.values()) for rank in range(ranks)]
    # Every rank sends as much as the largest part needs.
    sent = torch.cat([part.local.to(device_type).reshape(-1) for part in parts.values()])
    sent = torch.nn.functional.pad(sent, (0, max(numels) - sent.numel()))
    received = sent.new_empty(ranks, sent.numel())
    if received.numel():
        dist.all_gather(list(received), sent, group=group)
    rows = received.to("cpu")
    offsets = [0] * ranks
    full: dict[Key, Tensor] = {}
    for key, part in parts.items():
        pieces = []
        for rank, shape in enumerate(shapes[key]):
            end = offsets[rank] + _numel(shape)
            pieces.append(rows[rank, offsets[rank] : end].view(shape))
            offsets[rank] = end
        full[key] = torch.cat(pieces, part.dim)
    return full


def _numel(shape: tuple[int, ...]) -> int:
    return torch.Size(shape).numel()
