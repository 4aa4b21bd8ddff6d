"""
From sharded along one dim to sharded along another: each rank sends every other the part that it will own.

Natively an all-to-all of exactly the elements that change places. A backend that has none gathers and chunks, which
moves as many times the bytes as there are ranks; a warning says so once.
"""

from __future__ import annotations

import functools
import math
import warnings
from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup, Work

from fsdp_conformance.engine.errors import MeshError
from fsdp_conformance.engine.flat_collectives import all_to_all
from fsdp_conformance.engine.mesh.axis import Axis, axis_group
from fsdp_conformance.engine.mesh.gathering import mesh_all_gather
from fsdp_conformance.engine.mesh.uneven_shards import (
    chunk_sizes,
    dim_problems,
    size_problems,
    split_shards,
    with_length,
)
from fsdp_conformance.engine.mesh.work import MeshWork, as_bytes, nothing_sent


@torch.no_grad()
def shard_dim_all_to_all(
    shard: Tensor, axis: Axis, *, gather_dim: int, shard_dim: int, sizes: Sequence[int] | None = None
) -> MeshWork:
    """
    This rank's shard along `shard_dim` of the tensor that is sharded along `gather_dim` over its row.

    shard: this rank's, as long as the tensor along `shard_dim`. sizes: how long each rank's is along `gather_dim`;
    None: as long as this one. The result has the rank's `chunk_sizes` along `shard_dim`, is contiguous, and equals
    gathering and chunking bit for bit. Tensors on meta give one on meta and send nothing. Raises MeshError, with
    everything that is wrong.

    Source: torch's `shard_dim_alltoall` (distributed/tensor/_collective_utils.py), for sizes that need not divide.
    """
    group = axis_group(axis)
    gather_dim, shard_dim = _checked_dims(shard, gather_dim, shard_dim, sizes, group)
    lengths = [shard.shape[gather_dim]] * group.size() if sizes is None else list(sizes)
    own = chunk_sizes(shard.shape[shard_dim], group.size())[group.rank()]
    whole = with_length(shard.shape, gather_dim, sum(lengths))
    if shard.is_meta or not math.prod(whole):
        return nothing_sent(shard.new_empty(with_length(whole, shard_dim, own)))
    if group.size() == 1:
        return nothing_sent(shard.detach().clone(memory_format=torch.contiguous_format))
    shapes = [with_length(with_length(whole, shard_dim, own), gather_dim, length) for length in lengths]
    receives = [math.prod(shape) for shape in shapes]
    parts = split_shards(shard.detach(), group.size(), shard_dim)
    sent = torch.cat([part.reshape(-1) for part in parts])
    received = sent.new_empty(sum(receives))
    work = _native(received, receives, sent, [part.numel() for part in parts], group)
    if work is None:
        gathering = mesh_all_gather(shard, group, gather_dim, sizes=lengths)
        return gathering.then(lambda every: split_shards(every, group.size(), shard_dim)[group.rank()].contiguous())

    def finish() -> Tensor:
        pieces = torch.split(received, receives)
        return torch.cat([piece.view(shape) for piece, shape in zip(pieces, shapes, strict=True)], gather_dim)

    return MeshWork(work, finish, [sent, received])


def _checked_dims(
    shard: Tensor, gather_dim: int, shard_dim: int, sizes: Sequence[int] | None, group: ProcessGroup
) -> tuple[int, int]:
    """Both dims counted from the front. Raises MeshError."""
    problems = dim_problems(shard, gather_dim, "gather_dim") + dim_problems(shard, shard_dim, "shard_dim")
    if not problems:
        gather_dim, shard_dim = gather_dim % shard.dim(), shard_dim % shard.dim()
        problems = size_problems(sizes, group.size(), length=shard.shape[gather_dim], shard=group.rank())
        if gather_dim == shard_dim:
            problems.append(f"shard_dim={shard_dim}, but should be another dim than gather_dim={gather_dim}")
    if problems:
        raise MeshError(problems, where="shard_dim_all_to_all")
    return gather_dim, shard_dim


def _native(
    received: Tensor, receives: Sequence[int], sent: Tensor, sends: Sequence[int], group: ProcessGroup
) -> Work | None:
    """Start the all-to-all of 1D tensors in parts of these lengths; None if the backend has none."""
    size = sent.element_size()
    try:
        return all_to_all(
            as_bytes(received), [size * numel for numel in receives], as_bytes(sent), [size * numel for numel in sends],
            group,
        )  # fmt: skip
    except RuntimeError as error:
        # c10d's answer for a backend without the method: nothing was sent, and every rank of the group gets it.
        if "does not support alltoall" not in str(error):
            raise
    _warn_once(dist.get_backend(group))
    return None


@functools.cache
def _warn_once(backend: str) -> None:
    warnings.warn(
        f"backend={backend!r} has no all-to-all, so shards are gathered and chunked instead: every rank receives the "
        "whole tensor [shard_dim_all_to_all]. Said once.",
        stacklevel=5,  # whoever called shard_dim_all_to_all, past the decorator
    )
