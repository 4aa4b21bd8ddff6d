"""Broadcast and scatter along the axes of a mesh, in place, from the source of each row."""

from __future__ import annotations

from typing import cast

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from fsdp_conformance.engine.errors import EngineError
from fsdp_conformance.engine.fully_sharded.wrapper import FullyShardedDataParallel
from fsdp_conformance.engine.mesh.axis import Axis, axis_group
from fsdp_conformance.engine.mesh.collectives import mesh_broadcast, mesh_scatter
from fsdp_conformance.engine.mesh.uneven_shards import chunk_sizes, split_shards
from fsdp_conformance.engine.sharding_strategy import ShardingStrategy
from fsdp_conformance.history.collective import Op
from fsdp_conformance.tests.engine.fully_sharded.sharded_ranks import full_params
from fsdp_conformance.tests.engine.mesh.mesh_ranks import MeshTestCase, by_columns, coded

DTYPES = (torch.float32, torch.bfloat16, torch.int64, torch.bool, torch.complex64, torch.float8_e4m3fn)


class Broadcast(MeshTestCase):
    """Tests of sending from one rank of a row to the others."""

    @pytest.mark.nightly
    def test_each_row_has_a_source_of_its_own(self) -> None:
        """Group rank 0 or another: a different rank of the world in each row."""
        for axis, row in self.axes():
            for source, sender in enumerate(row):
                tensor = coded(self.rank, 2, 3)
                result = mesh_broadcast(tensor, axis, source=source).wait()
                self.assertIs(tensor, result)
                self.assert_equal(coded(sender, 2, 3), tensor)

    @pytest.mark.nightly
    @pytest.mark.slow
    def test_axis_by_axis_the_first_rank_reaches_all(self) -> None:
        """Two broadcasts of two ranks each make one of four."""
        tensor = coded(self.rank, 3)
        for axis in (0, 1):
            mesh_broadcast(tensor, (self.square, axis)).wait()
        self.assert_equal(coded(0, 3), tensor)

    def test_strides_dtypes_and_scalars(self) -> None:
        """Values, not memory, are copied, so tensors need not be contiguous; every dtype can be sent."""
        strided = by_columns(coded(self.rank, 2, 3))
        mesh_broadcast(strided, (self.line, 0), source=3).wait()
        self.assert_equal(coded(3, 2, 3), strided)
        self.assertEqual((1, 2), strided.stride())
        part = torch.zeros(3, 4)
        part[:, 1] = coded(self.rank, 3)
        mesh_broadcast(part[:, 1], (self.line, 0), source=2).wait()
        self.assert_equal(coded(2, 3), part[:, 1])
        self.assertEqual(0.0, part[:, 2:].abs().sum().item())
        for dtype in DTYPES:
            tensor = coded(self.rank, 5).remainder(3).to(dtype)
            mesh_broadcast(tensor, (self.square, 0), source=1).wait()
            expected = coded(self.row(0)[1], 5).remainder(3).to(dtype)
            self.assertTrue(torch.equal(expected.view(torch.uint8), tensor.view(torch.uint8)), msg=str(dtype))
        scalar = torch.tensor(float(self.rank))
        mesh_broadcast(scalar, (self.line, 0), source=1).wait()
        self.assertEqual(1.0, scalar.item())

    def test_parameters_keep_their_graph_out_of_it(self) -> None:
        """A leaf that requires a gradient is written in place too."""
        parameter = nn.Parameter(coded(self.rank, 3))
        mesh_broadcast(parameter, (self.line, 0)).wait()
        self.assert_equal(coded(0, 3), parameter.detach())
        self.assertTrue(parameter.is_leaf and parameter.requires_grad)

    def test_one_collective_of_its_bytes(self) -> None:
        """It broadcasts once, over the row only; it sends nothing for meta, without elements, and in a group of one."""
        mesh_broadcast(coded(self.rank, 3), (self.square, 1)).wait()
        self.assertEqual([(Op.BROADCAST, 12, tuple(self.row(1)))], self.sent())
        alone = init_device_mesh(self.device_type, (4, 1))
        self.sent()
        for tensor, axis in (
            (coded(self.rank, 3).to("meta"), (self.square, 1)),
            (coded(self.rank, 0, 3), (self.square, 1)),
            (coded(self.rank, 3), (alone, 1)),
        ):
            self.assertIs(tensor, mesh_broadcast(tensor, axis).wait())
        self.assertEqual([], self.sent())


class Scatter(MeshTestCase):
    """Tests of distributing the list of one rank over its row."""

    def lists(self, row: list[int], source: int, *shape: int) -> list[Tensor]:
        """The source's list; on every other rank a list that must not be read."""
        if row[source] != self.rank:
            return [torch.full((7,), torch.nan, dtype=torch.float64)]
        return [coded(self.rank, *shape) * 10**place for place in range(len(row))]

    def test_the_sources_list_alone_counts(self) -> None:
        """Other ranks may pass anything: lists of another length, shape and dtype, or None."""
        for axis, row in self.axes():
            for source, sender in enumerate(row):
                output = torch.full((2, 3), torch.nan)
                shards = self.lists(row, source, 2, 3)
                result = mesh_scatter(output, shards, axis, source=source).wait()
                self.assertIs(output, result)
                self.assert_equal(coded(sender, 2, 3) * 10 ** row.index(self.rank), output)
        output = torch.zeros(2)
        mesh_scatter(output, list(coded(0, 4, 2)) if self.rank == 0 else None, (self.line, 0)).wait()
        self.assert_equal(coded(0, 4, 2)[self.rank], output)

    def test_entries_and_output_need_not_be_contiguous(self) -> None:
        """Columns of a tensor are scattered by value, even into a column of another."""
        whole = coded(0, 3, 8)
        held = torch.zeros(3, 4)
        for output in (torch.zeros(3, 2), held[:, 1:3]):
            mesh_scatter(output, whole.chunk(4, dim=1), (self.line, 0)).wait()
            self.assert_equal(whole.chunk(4, dim=1)[self.rank], output)
        self.assertEqual([0.0] * 6, [*held[:, 0].tolist(), *held[:, 3].tolist()])

    def test_uneven_shards(self) -> None:
        """5 rows, or columns, over 4 ranks: 2, 2, 1, and an empty one of the right shape."""
        for dim, shape in ((0, (5, 3)), (1, (3, 5)), (-1, (2, 3, 2))):
            whole = coded(1, *shape)
            shards = split_shards(whole, 4, dim)
            output = torch.full_like(shards[self.rank], torch.nan)
            sizes = chunk_sizes(shape[dim], 4)
            mesh_scatter(output, shards, (self.line, 0), source=1, dim=dim, sizes=sizes).wait()
            self.assert_equal(whole.narrow(dim, sum(sizes[: self.rank]), sizes[self.rank]), output)

    def test_one_collective_of_padded_bytes(self) -> None:
        """4 shards of 2 x 3 elements; nothing is sent for meta, without elements, and in a group of one."""
        sizes = chunk_sizes(5, 4)
        shards = split_shards(coded(0, 5, 3), 4)
        mesh_scatter(torch.empty(sizes[self.rank], 3), shards, (self.line, 0), sizes=sizes).wait()
        self.assertEqual([(Op.SCATTER, 4 * 2 * 3 * 4, (0, 1, 2, 3))], self.sent())
        alone = init_device_mesh(self.device_type, (4, 1))
        self.sent()
        meta = torch.empty(3, device="meta")
        self.assertIs(meta, mesh_scatter(meta, [meta, meta], (self.square, 1)).wait())
        mesh_scatter(torch.empty(0, 3), [torch.empty(0, 3)] * 2, (self.square, 1)).wait()
        own = torch.zeros(3)
        mesh_scatter(own, [coded(self.rank, 3)], (alone, 1)).wait()
        self.assert_equal(coded(self.rank, 3), own)
        self.assertEqual([], self.sent())


class HybridSharding(MeshTestCase):
    """The first values of a module, on a mesh of replicas and shards."""

    def test_everybody_starts_with_the_first_rank(self) -> None:
        """One broadcast along each axis: 20 elements over the replicas' row, then over the shards'."""
        module = nn.Linear(3, 5)
        with torch.no_grad():
            module.weight.copy_(coded(self.rank, 5, 3))
            module.bias.fill_(self.rank + 0.5)
        self.sent()
        model = FullyShardedDataParallel(
            module,
            device_mesh=self.square,
            sharding_strategy=ShardingStrategy.HYBRID_SHARD,
            sync_module_states=True,
        )
        broadcasts = [each for each in self.sent() if each[0] is Op.BROADCAST]
        self.assertEqual([(Op.BROADCAST, 80, tuple(self.row(axis))) for axis in (0, 1)], broadcasts)
        params = full_params(model)
        self.assert_equal(coded(0, 5, 3), params["weight"])
        self.assert_equal(torch.full((5,), 0.5), params["bias"])


class Refused(MeshTestCase):
    """Every problem is named before anything is sent."""

    def test_axes(self) -> None:
        """An unknown axis, a missing one, and a mesh or a group without this rank."""
        with self.refused(f"axis must be one axis of a mesh, such as (mesh, 0), got {self.line}"):
            axis_group(cast(Axis, self.line))
        with self.refused("axis must be from -2 to 1, got 2"):
            axis_group((self.square, 2))
        with self.refused("axis must be one of 'replicate', 'shard', got 'pipe'"):
            axis_group((self.square, "pipe"))
        with self.refused("axis must be an index, because the mesh has no names, got 'shard'"):
            axis_group((self.line, "shard"))
        pair = DeviceMesh(self.device_type, [0, 1])
        strangers = dist.new_group([0, 1])
        if self.rank < 2:
            self.assertEqual([0, 1], dist.get_process_group_ranks(axis_group((pair, 0))))
            self.assertIs(strangers, axis_group(strangers))
            return
        with self.refused("axis must be from -1 to 0, got 1", f"the mesh must contain this rank, got {pair}"):
            axis_group((pair, 1))
        with self.assertRaisesRegex(EngineError, "process_group must contain this rank"):
            axis_group(strangers)

    def test_sources_and_sizes(self) -> None:
        """A source outside the row, an unknown dim, and an output of another size."""
        axis: Axis = (self.square, 1)
        source = "source must be a rank of the group, from 0 to 1, got 2"
        with self.refused(source):
            mesh_broadcast(torch.zeros(2), axis, source=2)
        with self.refused(source, "dim must be a dim of a 1-dim tensor, got 1"):
            mesh_scatter(torch.zeros(2), None, axis, source=2, dim=1, sizes=[1, 1])
        with self.refused(f"length of shard {self.rank % 2}: expected 1, by sizes [1, 1], got 2"):
            mesh_scatter(torch.zeros(2), None, axis, sizes=[1, 1])
        self.assertEqual([], self.sent())

    def test_lists(self) -> None:
        """No list, a list of the wrong length, and entries whose shape, dtype or device differ from the output's."""
        axis: Axis = (self.square, 1)
        source = self.rank % 2  # every rank is the source of a call that is never sent
        for shards, value in ((None, "None"), ([torch.zeros(2)] * 3, "3")):
            with self.refused(f"shards must be 2 tensors, one for each rank of the group, got {value}"):
                mesh_scatter(torch.zeros(2), shards, axis, source=source)
        wrong = [torch.zeros(3), torch.zeros(2, dtype=torch.int64, device="meta")]
        with self.refused(
            "shape of shard 0: expected (2,), as for the output, got (3,)",
            "dtype of shard 1: expected torch.float32, as for the output, got torch.int64",
            "device of shard 1: expected cpu, as for the output, got meta",
        ):
            mesh_scatter(torch.zeros(2), wrong, axis, source=source)
        self.assertEqual([], self.sent())
