"""Random operations on DTensors."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard, empty, rand, randn
from torch.testing._internal.distributed.fake_pg import FakeStore

from fsdp_conformance.simulated_cuda import simulated_cuda
from fsdp_conformance.tests.simulator.simulator_process import compiled, in_process_of_its_own
from fsdp_conformance.tests.torch_versions import as_since_2_10

pytestmark = compiled

RANKS = 4


@contextmanager
def rank_of_many(rank: int, *shape: int) -> Iterator[DeviceMesh]:
    """One rank of a mesh on GPUs; what it would receive from the others does not arrive."""
    dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=RANKS)
    try:
        torch.cuda.set_device(rank)
        yield init_device_mesh("cuda", shape or (RANKS,))
    finally:
        dist.destroy_process_group()


def local(tensor: Any) -> Tensor:
    """The rank's shard, on the CPU."""
    assert isinstance(tensor, DTensor)
    return tensor.to_local().detach().cpu()


def by_rank(draw: Any, *shape: int) -> list[Tensor]:
    """The numbers that each rank draws after the same seed."""
    samples = []
    for rank in range(RANKS):
        with simulated_cuda(RANKS), rank_of_many(rank, *shape) as mesh:
            torch.manual_seed(7)
            samples.append(draw(mesh))
    return samples


def different(tensors: list[Tensor]) -> int:
    """How many different tensors there are."""
    return len({tuple(tensor.flatten().tolist()) for tensor in tensors})


@pytest.mark.nightly
@in_process_of_its_own
def test_shards_differ_and_replicas_are_equal() -> None:
    """Whatever the placement, and however often it draws."""

    def draw(*placements: Placement) -> Any:
        def drawn(mesh: DeviceMesh) -> Tensor:
            first = local(rand(8, 8, device_mesh=mesh, placements=placements))
            second = local(randn(8, 8, device_mesh=mesh, placements=placements))
            assert different([first, second]) == 2
            return torch.cat([first, second])

        return drawn

    assert 4 == different(by_rank(draw(Shard(0))))
    assert 1 == different(by_rank(draw(Replicate())))
    rows, columns = by_rank(draw(Shard(0), Replicate()), 2, 2), by_rank(draw(Replicate(), Shard(1)), 2, 2)
    assert [1, 1, 2] == [different(rows[:2]), different(rows[2:]), different(rows)]
    assert [1, 1, 2] == [different(columns[::2]), different(columns[1::2]), different(columns)]


@pytest.mark.slow
@as_since_2_10
@in_process_of_its_own
def test_replicas_are_the_numbers_after_the_seed() -> None:
    """The first ones, as a plain tensor would get them; parameters made on the meta device too."""
    with simulated_cuda(RANKS), rank_of_many(2) as mesh:
        torch.manual_seed(3)
        expected = torch.rand(4, 4)
        torch.manual_seed(3)
        assert torch.equal(expected, local(rand(4, 4, device_mesh=mesh, placements=[Replicate()])))
        assert 3 == torch.cuda.initial_seed()
        made = empty(4, 4, device_mesh=mesh, placements=[Replicate()])
        torch.manual_seed(3)
        nn.init.uniform_(made)
        assert torch.equal(expected, local(made))


@as_since_2_10
@in_process_of_its_own
def test_a_state_that_is_put_back_repeats_the_numbers() -> None:
    """Recomputation in activation checkpoints therefore drops the same values."""
    with simulated_cuda(RANKS), rank_of_many(1) as mesh:
        rand(4, 4, device_mesh=mesh, placements=[Shard(0)])
        state = torch.cuda.get_rng_state()
        samples = [local(rand(4, 4, device_mesh=mesh, placements=[Shard(0)])), torch.rand(3, device="cuda").cpu()]
        assert torch.cuda.get_rng_state().tolist() != state.tolist()
        torch.cuda.set_rng_state(state)
        again = [local(rand(4, 4, device_mesh=mesh, placements=[Shard(0)])), torch.rand(3, device="cuda").cpu()]
        assert all(map(torch.equal, samples, again))


@pytest.mark.slow
@in_process_of_its_own
def test_the_cpu_draws_for_itself() -> None:
    """A rank that seeds itself by its number, for its data, keeps its own numbers on the CPU."""

    def draw(mesh: DeviceMesh) -> Tensor:
        torch.manual_seed(dist.get_rank())
        rand(4, 4, device_mesh=mesh, placements=[Replicate()])
        return torch.rand(4)

    samples = by_rank(draw)
    assert RANKS == different(samples)
    assert torch.equal(torch.rand(4, generator=torch.Generator().manual_seed(2)), samples[2])


@pytest.mark.slow
@as_since_2_10
@in_process_of_its_own
def test_a_programs_own_generator() -> None:
    """It decides about the numbers, and moves on."""

    def draw(mesh: DeviceMesh) -> Tensor:
        own = torch.Generator("cuda").manual_seed(5)
        tensor = empty(8, 4, device_mesh=mesh, placements=[Shard(0)])
        torch.manual_seed(dist.get_rank())
        samples = []
        for _ in range(2):
            tensor.uniform_(generator=own)
            samples.append(local(tensor).clone())
        assert different(samples) == 2
        return torch.cat([*samples, torch.rand(1, 4, device="cuda", generator=own).cpu()])

    drawn = by_rank(draw)
    assert RANKS == different(drawn)
    assert 1 == different([each[-1] for each in drawn])


@pytest.mark.slow
@in_process_of_its_own
def test_it_ends_with_the_simulation() -> None:
    """On the CPU, before and after the simulation, DTensor and generators are torch's own."""
    random: Any = torch.distributed.tensor._random
    get_state = torch.Generator.get_state
    with simulated_cuda(RANKS), rank_of_many(0) as mesh:
        rand(4, device_mesh=mesh, placements=[Shard(0)])
        assert random._rng_tracker is not None
    assert random._rng_tracker is None
    assert get_state is torch.Generator.get_state
    with simulated_cuda(1):
        torch.manual_seed(1)
        expected = torch.rand(2, device="cuda").cpu()
        torch.manual_seed(1)
        assert torch.equal(expected, torch.rand(2))  # the CPU's generator serves the device again
