"""All-gather, reduce-scatter and all-to-all along the axes of a mesh, with shards of any sizes along any dim."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from unittest import mock

import pytest
import torch
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh

from fsdp_conformance.engine.mesh import collectives
from fsdp_conformance.engine.mesh.axis import Axis
from fsdp_conformance.engine.mesh.collectives import mesh_all_gather, mesh_reduce_scatter, shard_dim_all_to_all
from fsdp_conformance.engine.mesh.uneven_shards import chunk_sizes
from fsdp_conformance.history.collective import Op
from fsdp_conformance.tests.engine.mesh.mesh_ranks import MeshTestCase, by_columns, coded, sizes_of

#: Even and uneven ones, with empty shards, along each dim.
SHAPES: tuple[tuple[tuple[int, ...], int], ...] = (
    ((8,), 0), ((5, 3), 0), ((3, 5), 1), ((3, 2), 0), ((2, 3, 4), 2), ((2, 1, 2), -2),
)  # fmt: skip


class Gathering(MeshTestCase):
    """Tests of joining the shards of a row."""

    @pytest.mark.slow
    def test_every_axis_and_dim(self) -> None:
        """The whole tensor of the row, in the order of its ranks, contiguous, whatever the shards' strides."""
        for axis, row in self.axes():
            for shape, dim in SHAPES:
                whole = coded(row[0], *shape)  # one for each row
                sizes = sizes_of(shape[dim], len(row))
                own = whole.split(list(sizes), dim)[row.index(self.rank)]
                for shard in (own, own.contiguous(), by_columns(own)):
                    got = mesh_all_gather(shard, axis, dim, sizes=sizes).wait()
                    self.assert_equal(whole, got)
                    self.assertTrue(got.is_contiguous())

    def test_sizes_of_ones_own(self) -> None:
        """Any sizes are allowed, not only those of chunks; without sizes, all shards are equal."""
        whole = coded(0, 6, 2)
        shard = whole.split([1, 0, 4, 1])[self.rank]
        self.assert_equal(whole, mesh_all_gather(shard, (self.line, 0), sizes=[1, 0, 4, 1]).wait())
        expected = torch.cat([coded(rank, 2, 2) for rank in range(4)], 1)
        self.assert_equal(expected, mesh_all_gather(coded(self.rank, 2, 2), (self.line, 0), 1).wait())

    def test_several_in_flight(self) -> None:
        """Each handle has its result, whatever the order of waiting, and returns it again."""
        works = [mesh_all_gather(coded(self.rank, size), (self.square, 1)) for size in (1, 2, 3)]
        for size, work in reversed(list(zip((1, 2, 3), works, strict=True))):
            expected = torch.cat([coded(rank, size) for rank in self.row(1)])
            self.assert_equal(expected, work.wait())
            self.assertIs(work.wait(), work.wait())

    def test_any_dtype(self) -> None:
        """Every dtype can be gathered, even those that gloo cannot compute with."""
        for dtype in (torch.bool, torch.float8_e4m3fn, torch.complex64):
            got = mesh_all_gather(torch.full((2,), self.rank % 2).to(dtype), (self.line, 0)).wait()
            self.assertEqual((dtype, [0, 0, 1, 1, 0, 0, 1, 1]), (got.dtype, got.to(torch.complex64).real.tolist()))

    def test_one_collective(self) -> None:
        """One collective of padded bytes; nothing for meta, without elements, and in a group of one, which copies."""
        sizes = chunk_sizes(5, 4)
        mesh_all_gather(torch.zeros(sizes[self.rank], 3), (self.line, 0), sizes=sizes).wait()
        self.assertEqual([(Op.ALL_GATHER, 4 * 2 * 3 * 4, (0, 1, 2, 3))], self.sent())
        meta = mesh_all_gather(torch.zeros(sizes[self.rank], 3, device="meta"), (self.line, 0), sizes=sizes).wait()
        self.assertEqual((True, (5, 3)), (meta.is_meta, tuple(meta.shape)))
        self.assertEqual((0, 6), tuple(mesh_all_gather(torch.zeros(0, 3), (self.square, 1), 1).wait().shape))
        self.assertEqual([], self.sent())
        alone = init_device_mesh(self.device_type, (4, 1))
        self.sent()
        own = coded(self.rank, 2)
        got = mesh_all_gather(own, (alone, 1)).wait()
        self.assert_equal(own, got)
        self.assertNotEqual(own.data_ptr(), got.data_ptr())
        self.assertEqual([], self.sent())


class Reduction(MeshTestCase):
    """Sums over a row, of which each rank keeps its shard."""

    @pytest.mark.nightly
    @pytest.mark.slow
    def test_every_axis_and_dim(self) -> None:
        """Rank r contributes 2**r times the code, so the sum shows each rank of the row once, and no other."""
        for axis, row in self.axes():
            for shape, dim in SHAPES:
                sizes = sizes_of(shape[dim], len(row))
                for given in (None, sizes):
                    for tensor in (coded(0, *shape) * 2**self.rank, by_columns(coded(0, *shape) * 2**self.rank)):
                        before = tensor.clone()
                        got = mesh_reduce_scatter(tensor, axis, dim, sizes=given).wait()
                        whole = coded(0, *shape) * sum(2**rank for rank in row)
                        self.assert_equal(whole.split(list(sizes), dim)[row.index(self.rank)], got)
                        self.assertTrue(got.is_contiguous())
                        self.assert_equal(before, tensor)

    def test_undoes_the_gathering(self) -> None:
        """The reduce-scatter of the gathered tensor is the shard times the row's size."""
        sizes = [3, 0, 1, 2]
        shard = coded(self.rank, 2, sizes[self.rank])
        whole = mesh_all_gather(shard, (self.line, 0), 1, sizes=sizes).wait()
        self.assert_equal(shard * 4, mesh_reduce_scatter(whole, (self.line, 0), 1, sizes=sizes).wait())

    def test_one_collective(self) -> None:
        """One collective of padded bytes; nothing for meta, without elements, and in a group of one."""
        mesh_reduce_scatter(torch.zeros(5, 3), (self.line, 0)).wait()
        self.assertEqual([(Op.REDUCE_SCATTER, 4 * 2 * 3 * 4, (0, 1, 2, 3))], self.sent())
        meta = mesh_reduce_scatter(torch.zeros(5, 3, device="meta"), (self.line, 0)).wait()
        self.assertEqual((True, ((2, 2, 1, 0)[self.rank], 3)), (meta.is_meta, tuple(meta.shape)))
        self.assertEqual((0, 3), tuple(mesh_reduce_scatter(torch.zeros(0, 3), (self.square, 1)).wait().shape))
        self.assertEqual([], self.sent())


class AllToAll(MeshTestCase):
    """Tests of moving shards from one dim to another."""

    def reshard(self, whole: Tensor, axis: Axis, row: Sequence[int], gather_dim: int, shard_dim: int) -> None:
        """The result is this rank's chunk, contiguous."""
        place = row.index(self.rank)
        sizes = sizes_of(whole.shape[gather_dim], len(row))
        shard = whole.split(list(sizes), gather_dim)[place]
        got = shard_dim_all_to_all(shard, axis, gather_dim=gather_dim, shard_dim=shard_dim, sizes=sizes).wait()
        self.assert_equal(whole.split(list(sizes_of(whole.shape[shard_dim], len(row))), shard_dim)[place], got)
        self.assertTrue(got.is_contiguous())

    @pytest.mark.nightly
    @pytest.mark.slow
    def test_equals_gathering_and_chunking(self) -> None:
        """The result equals gathering and chunking, between any two dims, also of uneven and empty shards."""
        for axis, row in self.axes():
            for shape in ((4, 8), (5, 3), (3, 6, 5), (1, 2, 1)):
                for gather_dim in range(len(shape)):
                    for shard_dim in range(-len(shape), len(shape)):
                        if shard_dim % len(shape) != gather_dim:
                            self.reshard(coded(row[0], *shape), axis, row, gather_dim, shard_dim)

    def test_only_what_moves_is_sent(self) -> None:
        """This rank's shard without padding; nothing for meta, without elements, and in a group of one."""
        sizes = chunk_sizes(5, 4)
        shard = coded(self.rank, sizes[self.rank], 3)
        shard_dim_all_to_all(shard, (self.line, 0), gather_dim=0, shard_dim=1, sizes=sizes).wait()
        self.assertEqual([(Op.ALL_TO_ALL, shard.numel() * 4, (0, 1, 2, 3))], self.sent())
        meta = shard_dim_all_to_all(shard.to("meta"), (self.line, 0), gather_dim=0, shard_dim=1, sizes=sizes).wait()
        self.assertEqual((True, (5, (1, 1, 1, 0)[self.rank])), (meta.is_meta, tuple(meta.shape)))
        none = shard_dim_all_to_all(torch.zeros(0, 4), (self.square, 1), gather_dim=0, shard_dim=1).wait()
        self.assertEqual((0, 2), tuple(none.shape))
        self.assertEqual([], self.sent())

    def test_a_backend_without_it_gathers(self) -> None:
        """The same results, and a single warning."""
        refuses = RuntimeError("Backend partial does not support alltoall_base")
        collectives._warn_once.cache_clear()
        with mock.patch.object(collectives, "all_to_all", side_effect=refuses) as native:
            with warnings.catch_warnings(record=True) as caught:
                warnings.simplefilter("always")
                for shape in ((5, 3), (4, 8)):
                    self.reshard(coded(0, *shape), (self.line, 0), range(4), 0, 1)
            self.assertEqual(2, native.call_count)
            native.side_effect = RuntimeError("connection closed")
            with self.assertRaisesRegex(RuntimeError, "connection closed"):
                shard_dim_all_to_all(torch.zeros(2, 2), (self.line, 0), gather_dim=0, shard_dim=1)
        collectives._warn_once.cache_clear()

        self.assertEqual([Op.ALL_GATHER] * 2, [op for op, _, _ in self.sent()])
        self.assertEqual(1, len(caught), msg=str([str(each.message) for each in caught]))
        self.assertIn("backend 'gloo' has no all-to-all", str(caught[0].message))


class Refused(MeshTestCase):
    """Every problem is named before anything is sent."""

    def test_what_does_not_fit(self) -> None:
        """Unknown dims, sizes of the wrong number or sum, and the same dim twice."""
        axis: Axis = (self.square, 1)
        with self.refused("dim must be a dim of a 0-dim tensor, got 0"):
            mesh_all_gather(torch.tensor(1.0), axis)
        with self.refused("sizes must be 2 non-negative numbers, got [2]"):
            mesh_all_gather(torch.zeros(2), axis, sizes=[2])
        with self.refused("length of the whole tensor: expected 4, by sizes [2, 2], got 3"):
            mesh_reduce_scatter(torch.zeros(3), axis, sizes=[2, 2])
        with self.refused(
            "gather_dim must be a dim of a 2-dim tensor, got 2",
            "shard_dim must be a dim of a 2-dim tensor, got -3",
        ):
            shard_dim_all_to_all(torch.zeros(2, 2), axis, gather_dim=2, shard_dim=-3)
        with self.refused(
            f"length of shard {self.rank % 2}: expected 1, by sizes [1, 1], got 2",
            "shard_dim and gather_dim must be different, got 1 for both",
        ):
            shard_dim_all_to_all(torch.zeros(2, 2), axis, gather_dim=-1, shard_dim=1, sizes=[1, 1])
        self.assertEqual([], self.sent())
