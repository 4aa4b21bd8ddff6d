"""Mesh collectives on the simulated accelerator: issued on one stream, awaited on another, and freed."""

from __future__ import annotations

from collections.abc import Callable, Collection
from contextlib import nullcontext
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from fsdp_conformance.engine.errors import TensorMetaMismatch
from fsdp_conformance.engine.mesh.collectives import (
    MeshWork,
    mesh_all_gather,
    mesh_broadcast,
    mesh_reduce_scatter,
    mesh_scatter,
    shard_dim_all_to_all,
)
from fsdp_conformance.engine.mesh.tensor_meta import check_tensor_meta
from fsdp_conformance.plan import SIMULATED
from fsdp_conformance.simulator import checker
from fsdp_conformance.simulator.checker.hazard import Hazard
from fsdp_conformance.simulator.device import build
from fsdp_conformance.tests.engine.engine_sites import watching_engine
from fsdp_conformance.tests.engine.mesh.mesh_ranks import coded
from fsdp_conformance.tests.simulator.simulator_ranks import SimulatedRanks

pytestmark = pytest.mark.skipif(build.unavailable() is not None, reason=str(build.unavailable()))

#: From a mesh and a function that makes coded tensors on its device, to a collective in progress.
Program = Callable[[DeviceMesh, int, Callable[..., Tensor]], MeshWork]


def _scatter(mesh: DeviceMesh, rank: int, made: Callable[..., Tensor]) -> MeshWork:
    sizes = [3, 2]
    output = made(5, sizes[rank])[1:3]
    return mesh_scatter(output, made(2, 5).split(sizes, 1), (mesh, "shard"), source=1, dim=1, sizes=sizes)


#: Even and uneven, in place, strided, along either dim, and in a group of one, where nothing is sent.
PROGRAMS: dict[str, Program] = {
    "broadcast": lambda mesh, rank, made: mesh_broadcast(made(40), (mesh, "shard"), source=1),
    "broadcast of a column": lambda mesh, rank, made: mesh_broadcast(made(40, 2)[:, 1], (mesh, "shard")),
    "scatter": _scatter,
    "all-gather": lambda mesh, rank, made: mesh_all_gather(made(40), (mesh, "shard")),
    "all-gather, uneven": lambda mesh, rank, made: mesh_all_gather(
        made(4, [20, 7][rank]), (mesh, "shard"), 1, sizes=[20, 7]
    ),
    "all-gather of one": lambda mesh, rank, made: mesh_all_gather(made(40), (mesh, "replicate")),
    "reduce-scatter": lambda mesh, rank, made: mesh_reduce_scatter(made(40), (mesh, "shard")),
    "reduce-scatter, uneven": lambda mesh, rank, made: mesh_reduce_scatter(made(3, 5), (mesh, "shard"), 1),
    "all-to-all": lambda mesh, rank, made: shard_dim_all_to_all(
        made([4, 3][rank], 9), (mesh, "shard"), gather_dim=0, shard_dim=1, sizes=[4, 3]
    ),
}


class SimulatedMeshTest(SimulatedRanks):
    """Two ranks with a simulated device each."""

    def init_rank(self) -> None:
        super().init_rank()
        shape, names = (1, 2), ("replicate", "shard")
        self.meshes = {kind: init_device_mesh(kind, shape, mesh_dim_names=names) for kind in ("cpu", SIMULATED)}

    def on_cpu(self, name: str) -> Tensor:
        """The result there."""
        return PROGRAMS[name](self.meshes["cpu"], self.rank, lambda *shape: coded(self.rank, *shape)).wait()

    def on_device(self, name: str, *, dropped: Collection[str] = ()) -> tuple[Tensor, tuple[Hazard, ...], set[str]]:
        """
        The result, what the checker found, and the engine's waits.

        Inputs are made and sent on one stream; another waits, uses the result and drops it. The memory that the device
        allocates next on either is written at once.
        """
        module: Any = torch.get_device_module(SIMULATED)
        streams = [module.Stream(), module.Stream()]
        host: dict[tuple[int, ...], Tensor] = {}

        def made(*shape: int) -> Tensor:
            return host.setdefault(shape, coded(self.rank, *shape).pin_memory()).to(self.device, non_blocking=True)

        module.synchronize()
        checker.clear()
        sites: set[str] = set()
        with watching_engine(sites, dropped):
            for _ in range(2):
                with module.stream(streams[0]):
                    work = PROGRAMS[name](self.meshes[SIMULATED], self.rank, made)
                with module.stream(streams[1]):
                    result = work.wait() * 2
                del work
                for numel in (20, 40, 80):
                    for stream in streams:
                        with module.stream(stream):
                            torch.empty(numel, device=self.device).fill_(-1)
        hazards = checker.hazards()
        with checker.suspended():
            return result.to("cpu") / 2, hazards, sites

    @pytest.mark.nightly
    @pytest.mark.slow
    def test_clean_and_equal_to_the_cpu(self) -> None:
        """Every collective: the CPU's result, no hazard, and hazards without any waits."""
        for name in PROGRAMS:
            expected = self.on_cpu(name)
            got, hazards, sites = self.on_device(name)
            self.assertEqual(0, len(hazards), msg="\n".join([name, *(hazard.explain() for hazard in hazards)]))
            self.assertTrue(sites, msg=name)
            self.assertTrue(torch.equal(expected, got), msg=f"{name}: expected {expected}, got {got}")
            with checker.without_waits():
                self.assertNotEqual((), self.on_device(name)[1], msg=name)

    @pytest.mark.nightly
    @pytest.mark.slow
    def test_each_wait_is_needed(self) -> None:
        """Every wait of a mesh collective, dropped alone, is a hazard in at least one of them."""
        executed, flagged = set(), set()
        for name in PROGRAMS:
            sites = self.on_device(name)[2]
            executed |= sites
            for site in sorted(sites):
                dist.barrier()
                if self.on_device(name, dropped={site})[1]:
                    flagged.add(site)

        self.assertEqual("", ", ".join(sorted(executed - flagged)))

    @pytest.mark.slow
    def test_metadata(self) -> None:
        """Tensors on the device are compared, and every rank raises."""
        with nullcontext() if self.rank else checker.suspended():
            tensor = torch.zeros(3 + self.rank, device=self.device)
        check_tensor_meta(tensor, (self.meshes[SIMULATED], 1))
        with self.assertRaisesRegex(TensorMetaMismatch, r"rank 1: shape: expected \(3,\), as on rank 0, got \(4,\)"):
            check_tensor_meta(tensor, (self.meshes[SIMULATED], 1), shape=True)
        self.assertEqual((), checker.hazards())
