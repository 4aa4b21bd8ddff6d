"""
The cost of redistributions compared with torch's model, on a mesh of eight ranks that only this process knows.

With torch's constants ours gives torch's costs, except for three things that torch's comments name or that it does not
do: it adds a microsecond to every all-to-all instead of pricing it, orders axes so that more is sent,
and charges an axis of one rank for starting a collective.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import Partial, Replicate, Shard
from torch.distributed.tensor._collective_utils import MeshTopoInfo, redistribute_cost
from torch.distributed.tensor._dtensor_spec import DTensorSpec, TensorMeta
from torch.distributed.tensor.placement_types import Placement
from torch.testing._internal.distributed.fake_pg import FakeStore

from fsdp_conformance.errors import ConfigError
from fsdp_conformance.planner.link_spec import LinkSpec
from fsdp_conformance.planner.redistribution_cost import Layout, redistribution_cost_us
from fsdp_conformance.tests.torch_versions import as_since_2_10, as_since_2_11

Placements = tuple[Placement, ...]

R, S0, S1, P = Replicate(), Shard(0), Shard(1), Partial()
TENSOR = torch.empty(64, 64)

#: torch's base latency (tensor/_collective_utils.py), and its gigabyte of 2**30 bytes in ours.
TORCH_LAUNCH_US = 6.6
TORCH_GB = 2**30 / 10**9


@pytest.fixture(name="mesh", scope="module")
def _mesh() -> Iterator[DeviceMesh]:
    """Two by four ranks."""
    dist.init_process_group("fake", rank=0, world_size=8, store=FakeStore())
    yield init_device_mesh("cpu", (2, 4))
    dist.destroy_process_group()


def torch_links(mesh: DeviceMesh) -> list[LinkSpec]:
    """Links with torch's constants for the axes of a mesh."""
    topology = MeshTopoInfo.build_from_mesh(mesh)
    return [
        LinkSpec(launch_us=TORCH_LAUNCH_US, latency_us=latency, bandwidth_gb_per_s=bandwidth * TORCH_GB)
        for latency, bandwidth in zip(topology.mesh_dim_latency, topology.mesh_dim_bandwidth, strict=True)
    ]


def ours(mesh: DeviceMesh, source: Placements, target: Placements) -> float:
    return redistribution_cost_us(
        TENSOR.shape, TENSOR.dtype, Layout(mesh, source), Layout(mesh, target), torch_links(mesh)
    )


def torchs(mesh: DeviceMesh, source: Placements, target: Placements) -> float:
    meta = TensorMeta(TENSOR.shape, TENSOR.stride(), TENSOR.dtype)
    return float(redistribute_cost(DTensorSpec(mesh, source, meta), DTensorSpec(mesh, target, meta)))


def pairs() -> Iterator[tuple[Placements, Placements]]:
    """Every pair of layouts on two axes."""
    layouts = list(itertools.product((R, S0, S1, P), repeat=2))
    return itertools.product(layouts, layouts)


@as_since_2_10
def test_one_axis_costs_what_torch_says(mesh: DeviceMesh) -> None:
    """If one axis changes, the other is replicated, and no shard moves to another dim, the costs equal torch's."""
    checked = 0
    for before, after, axis in itertools.product((R, S0, S1, P), (R, S0, S1, P), (0, 1)):
        if {before, after} != {S0, S1}:
            source, target = ((each, R) if axis == 0 else (R, each) for each in (before, after))

            assert ours(mesh, source, target) == pytest.approx(torchs(mesh, source, target)), (source, target)
            checked += 1

    assert checked == 28


@as_since_2_11
def test_never_dearer_than_torch_and_never_far_below(mesh: DeviceMesh) -> None:
    """
    Of 256 pairs of layouts 192 cost the same. The others are cheaper here: an all-to-all by the microsecond that torch
    adds, or because axes that shrink the tensor go first. Both agree on what is impossible.
    """
    same = 0
    for source, target in pairs():
        here, there = ours(mesh, source, target), torchs(mesh, source, target)
        assert math.isinf(here) == math.isinf(there), (source, target)
        if here == there or here == pytest.approx(there):
            same += 1
        else:
            assert here < there, (source, target)

    assert same == 192


def test_an_all_to_all_is_torchs_without_the_penalty(mesh: DeviceMesh) -> None:
    """torch prices it as an all-gather of the local bytes, which is what pairwise exchange sends, and adds 1.0."""
    assert ours(mesh, (S0, R), (S1, R)) == pytest.approx(torchs(mesh, (S0, R), (S1, R)) - 1.0)
    assert ours(mesh, (R, S0), (R, S1)) == pytest.approx(torchs(mesh, (R, S0), (R, S1)) - 1.0)


def test_inner_shards_are_gathered_first(mesh: DeviceMesh) -> None:
    """
    To gather the outer axis of a dim that both divide, the inner one is gathered and sliced again: a gather of half of
    the tensor along the inner axis, and one of the whole along the outer.
    """
    inner_first = ours(mesh, (S0, S0), (S0, R)) + ours(mesh, (S0, R), (R, R))

    assert ours(mesh, (S0, S0), (R, S0)) == pytest.approx(inner_first)


def test_two_axes_that_swap_dims(mesh: DeviceMesh) -> None:
    """Each axis waits for the other: one is gathered, the other exchanged, the first sliced again."""
    expected = ours(mesh, (S0, S1), (S0, R)) + ours(mesh, (S0, R), (S1, R))

    assert ours(mesh, (S0, S1), (S1, S0)) == pytest.approx(expected)


def test_kinds_of_partial(mesh: DeviceMesh) -> None:
    """A partial sum cannot become a partial maximum, but a replicated tensor becomes any partial at no cost."""
    assert ours(mesh, (P, R), (Partial("max"), R)) == math.inf
    assert ours(mesh, (R, S0), (P, S0)) == 0.0


@pytest.mark.slow
def test_every_cost_ends(mesh: DeviceMesh) -> None:
    """On three axes every pair of layouts has a cost, infinite only if a shard or a partial would become partial."""
    cube = init_device_mesh("cpu", (2, 2, 2))
    links = [LinkSpec(launch_us=1.0, latency_us=1.0, bandwidth_gb_per_s=1.0)] * 3
    layouts = list(itertools.product((R, S0, S1, P), repeat=3))
    for source, target in itertools.product(layouts, layouts):
        cost = redistribution_cost_us((8, 8), torch.float32, Layout(cube, source), Layout(cube, target), links)
        impossible = any(isinstance(a, Shard) and b == P for a, b in zip(source, target, strict=True))
        assert math.isinf(cost) == impossible, (source, target)
        assert cost >= 0


def test_what_does_not_fit_is_refused(mesh: DeviceMesh) -> None:
    """One placement per axis, of a dim that the tensor has, and one link per axis; all problems at once."""
    with pytest.raises(ConfigError) as caught:
        redistribution_cost_us(
            (4,), torch.float32, Layout(mesh, (R,)), Layout(mesh, (R, Shard(1))), torch_links(mesh)[:1]
        )

    assert len(caught.value.problems) == 3
    assert "links must be 2" in caught.value.problems[2]
