"""
A tensor cut along one dim into a shard for each rank of a group. Shards may be uneven or empty.

The sizes are those of `torch.chunk`: 5 rows over 4 ranks are 2, 2, 1 and 0. Collectives whose shards must be of equal
size pad them to the largest, and cut the padding off afterwards.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from fsdp_conformance.engine.errors import MeshError


def chunk_sizes(length: int, num_shards: int) -> list[int]:
    """
    The length of each shard of `length` elements: the quotient rounded up, until nothing is left for the last ones.

    Source: `torch.chunk`, which leaves out empty shards.
    """
    size = -(-length // num_shards)
    return [min(max(length - index * size, 0), size) for index in range(num_shards)]


def split_shards(tensor: Tensor, num_shards: int, dim: int = 0) -> list[Tensor]:
    """Views of a tensor's shards along `dim`, of `chunk_sizes`. Empty shards keep their other dims."""
    dim = _checked_dim(tensor, dim, "split_shards")
    return list(torch.split(tensor, chunk_sizes(tensor.shape[dim], num_shards), dim))


def pad_tensor(tensor: Tensor, dim: int, amount: int) -> Tensor:
    """
    A tensor with `amount` zeros appended along `dim`; the tensor itself if that is 0.

    Raises MeshError if the tensor has no such dim, or `amount` is negative.
    """
    dim = _checked_dim(tensor, dim, "pad_tensor")
    if amount < 0:
        raise MeshError(f"amount must be at least 0, got {amount}", where="pad_tensor")
    return F.pad(tensor, [0, 0] * (tensor.dim() - 1 - dim) + [0, amount]) if amount else tensor


def unpad_tensor(tensor: Tensor, dim: int, amount: int) -> Tensor:
    """
    A view of a tensor without the last `amount` elements along `dim`; the tensor itself if that is 0.

    Raises MeshError if there is no such dim, or fewer elements.
    """
    dim = _checked_dim(tensor, dim, "unpad_tensor")
    if not 0 <= amount <= tensor.shape[dim]:
        raise MeshError(f"amount must be from 0 to {tensor.shape[dim]}, got {amount}", where="unpad_tensor")
    return tensor.narrow(dim, 0, tensor.shape[dim] - amount) if amount else tensor


def with_length(shape: Sequence[int], dim: int, length: int) -> list[int]:
    """A shape with another length along `dim`."""
    changed = list(shape)
    changed[dim] = length
    return changed


def _checked_dim(tensor: Tensor, dim: int, where: str) -> int:
    """`dim` counted from the front. Raises MeshError if the tensor does not have it."""
    problems = dim_problems(tensor, dim)
    if problems:
        raise MeshError(problems, where=where)
    return dim % tensor.dim()


def dim_problems(tensor: Tensor, dim: int, name: str = "dim") -> list[str]:
    """Every problem of a dim of a tensor."""
    if -tensor.dim() <= dim < tensor.dim():
        return []
    return [f"{name} must be a dim of a {tensor.dim()}-dim tensor, got {dim}"]


def size_problems(sizes: Sequence[int] | None, num_shards: int, *, length: int, shard: int | None = None) -> list[str]:
    """
    Every problem of the sizes of shards along a dim, if they are given.

    `length` is the tensor's length along it: that of shard number `shard`, or of all shards together (None).
    """
    if sizes is None:
        return []
    if len(sizes) != num_shards or min(sizes, default=0) < 0:
        return [f"sizes must be {num_shards} non-negative numbers, got {list(sizes)}"]
    expected = sum(sizes) if shard is None else sizes[shard]
    if length != expected:
        whose = "the whole tensor" if shard is None else f"shard {shard}"
        return [f"length of {whose}: expected {expected}, by sizes {list(sizes)}, got {length}"]
    return []
