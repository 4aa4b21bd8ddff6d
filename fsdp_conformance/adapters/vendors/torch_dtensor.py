"""
torch's DTensor as a component: collectives along one axis of a mesh, through its public functions alone.

Gather, reduce-scatter and all-to-all are redistributions on the whole mesh, replicated along the other axes, so the
choice of the axis is DTensor's. `distribute_tensor` would also send along the other axes, so broadcast and scatter run
on a mesh of the row alone.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.placement_types import Placement

from fsdp_conformance.adapters.components import MeshCollectives
from fsdp_conformance.adapters.vendors.torch_fsdp2 import TorchFSDP2
from fsdp_conformance.errors import Unsupported


class TorchDTensor(TorchFSDP2):
    """DTensor's collectives. Training is FSDP2's, whose parameters are DTensors."""

    name: ClassVar[str] = "torch-dtensor"

    def mesh_collectives(self) -> MeshCollectives:
        return DTensorMesh()


class DTensorMesh:
    """DTensor's public functions behind the protocol. Where that asks for a result in place, it is copied there."""

    def shards(self, tensor: Tensor, num_shards: int, dim: int) -> Sequence[Tensor]:
        length = tensor.shape[dim]
        places = [Shard.local_shard_size_and_offset(length, num_shards, rank) for rank in range(num_shards)]
        return [tensor.narrow(dim, offset, size) for size, offset in places]

    def pad(self, tensor: Tensor, dim: int, amount: int) -> Tensor:
        raise Unsupported("mesh_padding", "DTensor has no public function that pads a shard")

    def unpad(self, tensor: Tensor, dim: int, amount: int) -> Tensor:
        raise Unsupported("mesh_padding", "DTensor has no public function that removes a shard's padding")

    def broadcast(self, tensor: Tensor, mesh: DeviceMesh, axis: int, source: int = 0) -> object:
        replica = distribute_tensor(tensor, _row(mesh, axis), [Replicate()], src_data_rank=source)
        return tensor.copy_(replica.to_local())

    def scatter(
        self,
        output: Tensor,
        shards: Sequence[Tensor] | None,
        mesh: DeviceMesh,
        axis: int,
        source: int = 0,
        *,
        dim: int = 0,
        length: int | None = None,
    ) -> object:
        if length is None:
            # Entries of equal shapes are the rows of one tensor, also if they have no dims.
            entries = shards and [shard.unsqueeze(0) for shard in shards]
            return self.scatter(output.unsqueeze(0), entries, mesh, axis, source, length=mesh.size(axis))
        # DTensor derives all sizes from the whole tensor, which every rank passes; only the source's values count.
        whole = output.new_zeros(_with_length(output, dim, length))
        if mesh.get_local_rank(axis) == source and shards is not None:
            whole = torch.cat(list(shards), dim)
        scattered = distribute_tensor(whole, _row(mesh, axis), [Shard(dim)], src_data_rank=source)
        return output.copy_(scattered.to_local())

    def all_gather(self, shard: Tensor, mesh: DeviceMesh, axis: int, dim: int, length: int) -> Tensor:
        return _sharded(shard, mesh, axis, dim, length).full_tensor()

    def reduce_scatter(self, tensor: Tensor, mesh: DeviceMesh, axis: int, dim: int) -> Tensor:
        terms = DTensor.from_local(tensor, mesh, _along(mesh, axis, Partial()))
        return terms.redistribute(placements=_along(mesh, axis, Shard(dim))).to_local()

    def shard_dim_all_to_all(
        self, shard: Tensor, mesh: DeviceMesh, axis: int, gather_dim: int, shard_dim: int, length: int
    ) -> Tensor:
        whole = _sharded(shard, mesh, axis, gather_dim, length)
        return whole.redistribute(placements=_along(mesh, axis, Shard(shard_dim))).to_local()

    def check_meta(
        self, tensor: Tensor, mesh: DeviceMesh, axis: int, *, shape: bool = False, stride: bool = False
    ) -> None:
        # `from_local` compares shape and stride, both, unless it gets those of the whole.
        whole = None if shape or stride else tensor
        DTensor.from_local(
            tensor,
            _row(mesh, axis),
            [Shard(0)],
            run_check=True,
            shape=None if whole is None else whole.shape,
            stride=None if whole is None else whole.stride(),
        )


def _row(mesh: DeviceMesh, axis: int) -> DeviceMesh:
    """The ranks that differ from this one only along the axis, as a mesh of one axis."""
    return DeviceMesh.from_group(mesh.get_group(axis), mesh.device_type)


def _along(mesh: DeviceMesh, axis: int, placement: Placement) -> list[Placement]:
    """That placement along the axis, replicated along the others."""
    return [placement if each == axis else Replicate() for each in range(mesh.ndim)]


def _sharded(shard: Tensor, mesh: DeviceMesh, axis: int, dim: int, length: int) -> DTensor:
    """The tensor of `length` elements along `dim` that the row's shards make up."""
    whole = torch.empty(_with_length(shard, dim, length), device="meta")
    return DTensor.from_local(shard, mesh, _along(mesh, axis, Shard(dim)), shape=whole.shape, stride=whole.stride())


def _with_length(tensor: Tensor, dim: int, length: int) -> list[int]:
    """The tensor's shape with that length along `dim`."""
    shape = list(tensor.shape)
    shape[dim] = length
    return shape
