"""The parameters that an optimizer has, while modules hold others."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Shard

from fsdp_conformance.recorder.shards import Shards


@pytest.fixture
def mesh(group: None) -> DeviceMesh:
    return init_device_mesh("cpu", (1,))


def on(mesh: DeviceMesh) -> nn.Parameter:
    return nn.Parameter(DTensor.from_local(torch.ones(4, 4), mesh, [Shard(0)] * mesh.ndim))


def held(shards: Shards, module: nn.Module) -> list[Tensor]:
    return [parameter for _, parameter in shards.parameters_of(module)]


def test_a_parameter_that_an_engine_puts_in_is_not_the_optimizers(mesh: DeviceMesh) -> None:
    """A gathered one, or one that is sharded over a smaller group between forward and backward."""
    module, shards = nn.Linear(4, 4, bias=False), Shards()
    module.weight = shard = on(mesh)
    shards.remember(module)

    for other in (nn.Parameter(torch.ones(4, 4)), on(init_device_mesh("cpu", (1, 1)))):
        module.weight = other
        assert held(shards, module) == [shard]


def test_a_parameter_that_takes_a_shards_place_is_the_optimizers(mesh: DeviceMesh) -> None:
    """As where a state is loaded with `assign=True` before the optimizer is made."""
    module, shards = nn.Linear(4, 4, bias=False), Shards()
    module.weight = on(mesh)
    shards.remember(module)

    module.weight = assigned = on(mesh)

    assert held(shards, module)[0] is assigned


def test_an_optimizers_parameters_are_found_by_those_of_the_modules() -> None:
    """Also where modules share one, as Megatron-FSDP has it."""
    first, second, shards = nn.Linear(4, 4, bias=False), nn.Linear(4, 4, bias=False), Shards()
    second.weight = first.weight
    shard = torch.ones(2, 4)

    shards.remember_of_optimizer(nn.Sequential(first, second), {id(first.weight): shard})

    assert [held(shards, module)[0] is shard for module in (first, second)] == [True, True]
