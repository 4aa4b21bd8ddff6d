"""DTensor's collectives behind the protocol of a component, next to the engine's."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh

from fsdp_conformance.adapters.components import MeshCollectives
from fsdp_conformance.adapters.vendors.reference_components import EngineMesh
from fsdp_conformance.adapters.vendors.torch_dtensor import DTensorMesh, TorchDTensor
from fsdp_conformance.errors import Unsupported
from fsdp_conformance.harness.simulated_ranks import run_ranks

#: Along the second axis of 2 x 2: 5 rows or columns make shards of 3 and 2.
AXIS = 1


def results(collectives: MeshCollectives, call: Callable[[MeshCollectives, int], Tensor]) -> list[Tensor]:
    """Each rank's result."""
    return run_ranks(4, lambda rank: call(collectives, rank), timeout_s=60)


def whole(rank: int, *shape: int) -> Tensor:
    """Values that tell the rank's row apart: 1000 r + position for the first rank r of the row."""
    first = rank - rank % 2
    return torch.arange(float(torch.Size(shape).numel())).view(shape) + 1000 * first


def broadcast(collectives: MeshCollectives, rank: int) -> Tensor:
    tensor = torch.full((2, 3), float(rank))
    collectives.broadcast(tensor, init_device_mesh("cpu", (2, 2)), AXIS, 1)
    return tensor


def scatter(collectives: MeshCollectives, rank: int) -> Tensor:
    mesh, output = init_device_mesh("cpu", (2, 2)), torch.full((2,), torch.nan)
    collectives.scatter(output, list(whole(rank, 2, 2)) if rank % 2 else None, mesh, AXIS, 1)
    return output


def uneven_scatter(collectives: MeshCollectives, rank: int) -> Tensor:
    mesh, output = init_device_mesh("cpu", (2, 2)), torch.full((3, 2 if rank % 2 else 3), torch.nan)
    shards = None if rank % 2 else list(whole(rank, 3, 5).split([3, 2], 1))
    collectives.scatter(output, shards, mesh, AXIS, 0, dim=1, length=5)
    return output


def all_gather(collectives: MeshCollectives, rank: int) -> Tensor:
    shard = whole(rank, 3, 5).split([3, 2], 1)[rank % 2]
    return collectives.all_gather(shard, init_device_mesh("cpu", (2, 2)), AXIS, -1, 5)


def reduce_scatter(collectives: MeshCollectives, rank: int) -> Tensor:
    return collectives.reduce_scatter(whole(rank, 3, 5) * 2**rank, init_device_mesh("cpu", (2, 2)), AXIS, 1)


def all_to_all(collectives: MeshCollectives, rank: int) -> Tensor:
    shard = whole(rank, 3, 5).split([3, 2], 1)[rank % 2]
    return collectives.shard_dim_all_to_all(shard, init_device_mesh("cpu", (2, 2)), AXIS, 1, 0, 5)


@pytest.mark.parametrize("call", [broadcast, scatter, uneven_scatter, all_gather, reduce_scatter, all_to_all])
def test_both_give_the_same_values(call: Callable[[MeshCollectives, int], Tensor]) -> None:
    """Each rank's result equals the one that the reference engine's collectives give it."""
    expected, got = results(EngineMesh(), call), results(DTensorMesh(), call)

    assert [torch.equal(mine, other) for mine, other in zip(got, expected, strict=True)] == [True] * 4
    assert not torch.equal(expected[0], expected[2])


def test_shards_are_those_of_the_engine() -> None:
    """Uneven and empty ones included."""
    for length in (5, 4, 2, 0):
        tensor = torch.arange(3.0 * length).view(length, 3)
        shards = zip(DTensorMesh().shards(tensor, 4, 0), EngineMesh().shards(tensor, 4, 0), strict=True)

        assert all(torch.equal(mine, other) and mine.shape == other.shape for mine, other in shards)


def test_what_dtensor_does_not_offer_is_refused_by_name() -> None:
    """Padding and costs are capabilities that the adapter does not declare."""
    declared = TorchDTensor.declared()

    assert "mesh" in declared
    assert not declared & {"mesh_padding", "mesh_costs"}
    for method in (DTensorMesh().pad, DTensorMesh().unpad):
        with pytest.raises(Unsupported) as refused:
            method(torch.zeros(2), 0, 1)
        assert refused.value.capability == "mesh_padding"
