"""
Hybrid sharding on 2 x 2 x 2: two axes are the engine's, and the third keeps two trainings side by side.

Eight simulated ranks. The trainings have different data, so that any traffic over the third axis would show in the
numbers.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from fsdp_conformance.adapters.vendors.reference import Reference
from fsdp_conformance.adapters.vendors.torch_fsdp2 import TorchFSDP2
from fsdp_conformance.driver import session
from fsdp_conformance.driver.task import World
from fsdp_conformance.fixtures import probes
from fsdp_conformance.history.collective import Op
from fsdp_conformance.history.training import TrainingHistory
from fsdp_conformance.plan import Plan, Sharding
from fsdp_conformance.references.single_process import single_process_reference
from fsdp_conformance.tests.adapters.adapter_ranks import RankTestCase
from fsdp_conformance.workload.definition import BatchKey, Regime, Workload

#: Of the mesh's axes, in order: the other axis is the slowest, the one between, the fastest.
LAYOUTS = (
    ("other", "replicate", "shard"),
    ("replicate", "other", "shard"),
    ("replicate", "shard", "other"),
)

#: Units that own parameters, the root included.
NUM_UNITS = 5


class ReferenceOnMesh(Reference):
    """The reference engine on two axes of a larger mesh."""

    mesh: DeviceMesh

    def _options(self, model: nn.Module, plan: Plan) -> dict[str, Any]:
        return {**super()._options(model, plan), "device_mesh": self.mesh}


class FSDP2OnMesh(TorchFSDP2):
    """FSDP2 on two axes of a larger mesh."""

    mesh: DeviceMesh

    def _mesh(self, plan: Plan) -> DeviceMesh:
        return self.mesh


class CubeTestCase(RankTestCase):
    """Every test method runs in eight simulated ranks."""

    simulated_ranks = True
    case_timeout_s = 120.0

    @property
    def world_size(self) -> int:
        return 8

    def train_side_by_side(
        self, adapter: ReferenceOnMesh | FSDP2OnMesh, cube: DeviceMesh
    ) -> tuple[TrainingHistory, TrainingHistory]:
        """The result of this rank's training, and that of the unwrapped model on the data of its four ranks."""
        training = cube.get_local_rank("other")
        rank = 2 * cube.get_local_rank("replicate") + cube.get_local_rank("shard")
        workload, regime = _apart(probes.exact_nested(), training), Regime(steps=2)
        plan = session.plan_for(workload, regime, Plan(sharding=Sharding.HYBRID, replicas=2))
        adapter.mesh = cube["replicate", "shard"]
        got = session.train(adapter, workload, plan, regime, World(rank=rank, size=4))
        expected = single_process_reference(
            workload, regime, rank=rank, world_size=4, device="cpu", dtype=torch.float32
        )
        return got, expected


def _apart(workload: Workload, training: int) -> Workload:
    """The workload with the data of four ranks that no other training has."""

    def batch(key: BatchKey) -> Any:
        return workload.batch(replace(key, rank=key.rank + 4 * training))

    return replace(workload, batch=batch)


@pytest.mark.slow
class SideBySide(CubeTestCase):
    """The order of the axes makes no difference."""

    def assert_parity(self, got: TrainingHistory, expected: TrainingHistory) -> None:
        """Losses, gradients and parameters of every step, bit for bit."""
        self.assertEqual(len(expected.steps), len(got.steps))
        for mine, theirs in zip(got.steps, expected.steps, strict=True):
            self.assertEqual(theirs.losses, mine.losses)
            self.assert_same(theirs.grads or {}, mine.grads or {}, f"gradient {theirs.step}")
            self.assert_same(theirs.params, mine.params, f"parameter {theirs.step}")

    def assert_same(self, expected: Mapping[str, Tensor | None], got: Mapping[str, Tensor | None], what: str) -> None:
        """The same names, at least one, and the same bits."""
        self.assertNotEqual([], list(expected), what)
        self.assertEqual(sorted(expected), sorted(got), what)
        for name, value in expected.items():
            torch.testing.assert_close(got[name], value, rtol=0, atol=0, msg=f"{what} {name}")

    def assert_collectives(self, got: TrainingHistory, cube: DeviceMesh) -> None:
        """In each step but the first: each unit once in each group of this rank's own row, nothing anywhere else."""
        shard, replica = (_row(cube, axis, self.rank) for axis in ("shard", "replicate"))
        for step in got.steps[1:]:
            seen = Counter(
                (record.phase, record.op, record.group)
                for record in got.collectives
                if record.step == step.step and record.phase in ("forward", "backward", "step")
            )
            # The root may stay gathered from forward to backward.
            regathered = seen.pop(("backward", Op.ALL_GATHER, shard), 0)
            self.assertIn(regathered, (NUM_UNITS - 1, NUM_UNITS))
            self.assertEqual(
                {
                    ("forward", Op.ALL_GATHER, shard): NUM_UNITS,
                    ("backward", Op.REDUCE_SCATTER, shard): NUM_UNITS,
                    ("backward", Op.ALL_REDUCE, replica): NUM_UNITS,
                },
                seen,
            )

    @pytest.mark.nightly
    def test_the_reference_engine(self) -> None:
        """`FullyShardedDataParallel` on a slice of the mesh trains as its four ranks alone would."""
        for layout in LAYOUTS:
            cube = init_device_mesh("cpu", (2, 2, 2), mesh_dim_names=layout)
            got, expected = self.train_side_by_side(ReferenceOnMesh(), cube)
            self.assert_parity(got, expected)
            self.assert_collectives(got, cube)

    @pytest.mark.nightly
    def test_fsdp2(self) -> None:
        """torch's `fully_shard` behaves in the same way."""
        for layout in LAYOUTS:
            cube = init_device_mesh("cpu", (2, 2, 2), mesh_dim_names=layout)
            got, expected = self.train_side_by_side(FSDP2OnMesh(), cube)
            self.assert_parity(got, expected)
            self.assert_collectives(got, cube)

    @pytest.mark.nightly
    def test_the_trainings_differ(self) -> None:
        """Otherwise ranks of the other training could stand in for one's own."""
        cube = init_device_mesh("cpu", (2, 2, 2), mesh_dim_names=LAYOUTS[0])
        adapter = ReferenceOnMesh()
        _, expected = self.train_side_by_side(adapter, cube)
        losses: list[Any] = [None] * self.world_size
        torch.distributed.all_gather_object(losses, [loss.item() for step in expected.steps for loss in step.losses])

        self.assertEqual(self.world_size, len({tuple(each) for each in losses}))


def _row(cube: DeviceMesh, axis: str, rank: int) -> tuple[int, ...]:
    """The ranks that differ from `rank` along one axis only, worked out from its binary digits."""
    names = cube.mesh_dim_names
    if names is None:
        raise ValueError("mesh_dim_names must be given, got None")
    bit = 4 >> names.index(axis)
    return tuple(sorted((rank & ~bit, rank | bit)))
