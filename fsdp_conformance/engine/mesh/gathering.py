"""
All ranks of a row of a mesh to all: all-gather and reduce-scatter of shards along any dim, equal or not.

Shards are padded to the largest, gathered or reduced, and cut to their sizes again. Tensors on meta give a result on
meta of the right shape and send nothing; nor do groups of one rank and tensors without elements.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from fsdp_conformance.engine.errors import MeshError
from fsdp_conformance.engine.flat_collectives import all_gather, reduce_scatter
from fsdp_conformance.engine.mesh.axis import Axis, axis_group
from fsdp_conformance.engine.mesh.uneven_shards import (
    chunk_sizes,
    dim_problems,
    pad_tensor,
    size_problems,
    unpad_tensor,
    with_length,
)
from fsdp_conformance.engine.mesh.work import MeshWork, as_bytes, nothing_sent


@torch.no_grad()
def mesh_all_gather(shard: Tensor, axis: Axis, dim: int = 0, *, sizes: Sequence[int] | None = None) -> MeshWork:
    """
    The shards of this rank's row, joined along `dim` in the order of group ranks.

    sizes: how long each rank's shard is along it; None: as long as this one. Every dtype can be sent. The result is
    contiguous, and never an alias of the shard. Raises MeshError, with everything that is wrong.
    """
    group = axis_group(axis)
    problems = dim_problems(shard, dim)
    if not problems:
        problems = size_problems(sizes, group.size(), length=shard.shape[dim], shard=group.rank())
    if problems:
        raise MeshError(problems, where="mesh_all_gather")
    dim %= shard.dim()
    lengths = [shard.shape[dim]] * group.size() if sizes is None else list(sizes)
    shape = with_length(shard.shape, dim, sum(lengths))
    if shard.is_meta or not math.prod(shape):
        return nothing_sent(shard.new_empty(shape))
    if group.size() == 1:
        return nothing_sent(shard.detach().clone(memory_format=torch.contiguous_format))
    padding = [max(lengths) - length for length in lengths]
    sent = pad_tensor(shard.detach(), dim, padding[group.rank()]).contiguous()
    gathered = sent.new_empty((group.size(), *sent.shape))
    work = all_gather(as_bytes(gathered), as_bytes(sent), group)

    def finish() -> Tensor:
        if dim == 0 and not any(padding):
            return gathered.flatten(0, 1)
        parts = [unpad_tensor(part, dim, amount) for part, amount in zip(gathered, padding, strict=True)]
        return torch.cat(parts, dim)

    return MeshWork(work, finish, [sent, gathered])


@torch.no_grad()
def mesh_reduce_scatter(tensor: Tensor, axis: Axis, dim: int = 0, *, sizes: Sequence[int] | None = None) -> MeshWork:
    """
    This rank's shard, along `dim`, of the sum of the tensors of its row. Averaging is the caller's affair.

    tensor: of one shape on every rank. sizes: how long each rank's shard is; None: `chunk_sizes`. The result is
    contiguous. Raises MeshError, with everything that is wrong.
    """
    group = axis_group(axis)
    problems = dim_problems(tensor, dim)
    if not problems:
        problems = size_problems(sizes, group.size(), length=tensor.shape[dim])
    if problems:
        raise MeshError(problems, where="mesh_reduce_scatter")
    dim %= tensor.dim()
    lengths = chunk_sizes(tensor.shape[dim], group.size()) if sizes is None else list(sizes)
    shape = with_length(tensor.shape, dim, lengths[group.rank()])
    if tensor.is_meta or not tensor.numel():
        return nothing_sent(tensor.new_empty(shape))
    if group.size() == 1:
        return nothing_sent(tensor.detach().clone(memory_format=torch.contiguous_format))
    padding = [max(lengths) - length for length in lengths]
    sent = _rows(tensor.detach(), dim, lengths, padding)
    received = sent.new_empty(with_length(shape, dim, max(lengths)))
    work = reduce_scatter(received.view(-1), sent.view(-1), group)

    def finish() -> Tensor:
        return unpad_tensor(received, dim, padding[group.rank()]).contiguous()

    return MeshWork(work, finish, [sent, received])


def _rows(tensor: Tensor, dim: int, lengths: Sequence[int], padding: Sequence[int]) -> Tensor:
    """The shards one behind the other, each contiguous and padded with zeros; of an even tensor perhaps itself."""
    if dim == 0 and not any(padding):
        return tensor.contiguous()
    parts = torch.split(tensor, list(lengths), dim)
    return torch.stack([pad_tensor(part, dim, amount) for part, amount in zip(parts, padding, strict=True)])
