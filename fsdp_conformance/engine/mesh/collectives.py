"""
From one rank to its row of a mesh: broadcast and scatter, in place.

    mesh = init_device_mesh("cuda", (2, 4), mesh_dim_names=("replicate", "shard"))
    mesh_broadcast(tensor, (mesh, "replicate")).wait()
    mesh_scatter(shard, whole.chunk(4) if source else None, (mesh, "shard")).wait()

The source is a rank of the row, so each row has one of its own. Tensors travel as bytes, so that every dtype can be
sent, and need not be contiguous. Tensors on meta, groups of one rank and tensors without elements send nothing; what is
to be written is returned then, too. Every rank of a row has to call the same, with the same sizes: what only the source
can see to be wrong, it alone raises, and its peers wait until the group's timeout.

Source: torch's `mesh_broadcast` and `mesh_scatter` (distributed/tensor/_collective_utils.py).
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from fsdp_conformance.engine.errors import MeshError
from fsdp_conformance.engine.flat_collectives import broadcast, scatter
from fsdp_conformance.engine.mesh.axis import Axis, axis_group, source_problems
from fsdp_conformance.engine.mesh.uneven_shards import (
    dim_problems,
    pad_tensor,
    size_problems,
    unpad_tensor,
    with_length,
)
from fsdp_conformance.engine.mesh.work import MeshWork, as_bytes, nothing_sent


@torch.no_grad()
def mesh_broadcast(tensor: Tensor, axis: Axis, *, source: int = 0) -> MeshWork:
    """
    Overwrite a tensor, in place, with that of group rank `source` of this rank's row. Its result is the tensor.

    tensor: of one shape and dtype on every rank. Raises MeshError for an axis or a source that does not exist.
    """
    group = axis_group(axis)
    problems = source_problems(source, group)
    if problems:
        raise MeshError(problems, where="mesh_broadcast")
    if tensor.is_meta or group.size() == 1 or not tensor.numel():
        return nothing_sent(tensor)
    target = tensor.detach()
    staged = target.contiguous()
    work = broadcast(as_bytes(staged), source, group)

    def finish() -> Tensor:
        if staged is not target and group.rank() != source:
            target.copy_(staged)
        return tensor

    return MeshWork(work, finish, [staged, target])


@torch.no_grad()
def mesh_scatter(
    output: Tensor,
    shards: Sequence[Tensor] | None,
    axis: Axis,
    *,
    source: int = 0,
    dim: int = 0,
    sizes: Sequence[int] | None = None,
) -> MeshWork:
    """
    Fill `output`, in place, with this rank's entry of the list that group rank `source` of its row has.

    shards: one tensor for each rank of the row, of the outputs' shapes; only the source's list is looked at. sizes: how
    long each shard is along `dim`, where they are not equal (`chunk_sizes`); they are sent padded to the longest. Its
    result is `output`. Raises MeshError, with everything that is wrong.
    """
    group = axis_group(axis)
    is_source = group.rank() == source
    problems = source_problems(source, group) + (dim_problems(output, dim) if sizes is not None else [])
    if not problems:
        length = output.shape[dim] if sizes is not None else 0
        problems += size_problems(sizes, group.size(), length=length, shard=group.rank())
    if not problems and is_source:
        problems += _list_problems(output, shards, group, dim, sizes)
    if problems:
        raise MeshError(problems, where="mesh_scatter")
    target = output.detach()
    if target.is_meta:
        return nothing_sent(output)
    mine = list(shards or ()) if is_source else []
    if group.size() == 1:
        target.copy_(mine[0])
        return nothing_sent(output)
    padding = [max(sizes) - size for size in sizes] if sizes is not None else [0] * group.size()
    own = padding[group.rank()]
    landing = target if target.is_contiguous() and not own else _padded(target, dim, own)
    if not landing.numel():
        return nothing_sent(output)
    sent = [_padded(shard.detach(), dim, amount) for shard, amount in zip(mine, padding, strict=False)]
    work = scatter(as_bytes(landing), [as_bytes(shard) for shard in sent], source, group)

    def finish() -> Tensor:
        if landing is not target:
            target.copy_(unpad_tensor(landing, dim, own) if own else landing)
        return output

    return MeshWork(work, finish, [landing, target, *sent])


def _padded(shard: Tensor, dim: int, amount: int) -> Tensor:
    return (pad_tensor(shard, dim, amount) if amount else shard).contiguous()


def _list_problems(
    output: Tensor, shards: Sequence[Tensor] | None, group: ProcessGroup, dim: int, sizes: Sequence[int] | None
) -> list[str]:
    """What is wrong with the source's list."""
    if shards is None or len(shards) != group.size():
        found = "None" if shards is None else f"{len(shards)} tensors"
        return [f"shards={found}, but should be {group.size()} tensors, one for each rank of the group"]
    problems = []
    for index, shard in enumerate(shards):
        shape = output.shape if sizes is None else with_length(output.shape, dim, sizes[index])
        expected = (tuple(shape), output.dtype, output.device)
        got = (tuple(shard.shape), shard.dtype, shard.device)
        problems += [
            f"{what} of shard {index}={mine}, but should be {wanted} as the output's"
            for what, mine, wanted in zip(("shape", "dtype", "device"), got, expected, strict=True)
            if mine != wanted
        ]
    return problems
