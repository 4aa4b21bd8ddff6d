"""Collectives between processes on the simulated accelerator: gloo's numbers, and NCCL's errors for wrong use."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch._C._distributed_c10d import _make_nccl_premul_sum
from torch.distributed.device_mesh import init_device_mesh

from fsdp_conformance.tests.harness.recording.small_training import world
from fsdp_conformance.tests.simulator.simulator_collectives import (
    PROGRAMS,
    Values,
    all_gather_into_tensor,
    collectives,
    moves,
    reduce_scatter_tensor,
)
from fsdp_conformance.tests.simulator.simulator_ranks import OnSim, compiled
from fsdp_conformance.tests.torch_versions import OLD

pytestmark = compiled

DATA_MOVERS = (
    torch.uint8,
    torch.int8,
    torch.int32,
    torch.bool,
    torch.float8_e4m3fn,
    torch.float8_e5m2,
)


class Results(OnSim):
    """On two ranks every collective gives gloo's result, bit for bit, and no hazard."""

    def test_programs(self) -> None:
        """Plain, coalesced, point-to-point, functional collectives, and DTensor's."""
        for name, program in PROGRAMS.items():
            with self.subTest(name):
                self.assert_same_as_gloo(program)

    def test_floating_dtypes(self) -> None:
        """Reductions in half and double precision."""
        for dtype in (torch.float64, torch.float16, torch.bfloat16):
            with self.subTest(str(dtype)):
                self.assert_same_as_gloo(collectives, dtype)

    def test_integers(self) -> None:
        """Reductions of integers; their average is truncated, as NCCL's."""
        ops = (dist.ReduceOp.SUM, dist.ReduceOp.MIN, dist.ReduceOp.MAX, dist.ReduceOp.PRODUCT)
        for dtype in (torch.int64, torch.int32, torch.uint8, torch.int8):
            with self.subTest(str(dtype)):
                self.assert_same_as_gloo(lambda values: collectives(values, ops), dtype)
        average = torch.tensor([3 + self.rank, -3 - self.rank], device=self.device)
        dist.all_reduce(average, op=dist.ReduceOp.AVG)
        self.assertEqual([3, -3], average.tolist())  # 7 / 2 and -7 / 2

    @pytest.mark.slow
    def test_bool(self) -> None:
        """A sum of bools is a logical or, as NCCL's."""
        mine = torch.tensor([False, self.rank == 1, True], device=self.device)
        dist.all_reduce(mine)
        self.assertEqual([False, True, True], mine.tolist())

    def test_what_is_only_moved(self) -> None:
        """Bytes of every dtype that NCCL knows."""
        for dtype in DATA_MOVERS:
            with self.subTest(str(dtype)):
                expected = moves(Values("cpu", torch.float32))
                got = moves(Values("sim", dtype))
                # Gloo does not know all of these, so the float32 run is converted.
                self.assertEqual(expected.keys(), got.keys())
                mine = Values("sim", dtype).given(9)
                whole = got["moved"][1]
                own = whole[9 * self.rank : 9 * (self.rank + 1)]
                self.assertEqual(mine.view(torch.uint8).tolist(), own.view(torch.uint8).tolist())

    def test_complex(self) -> None:
        """Complex numbers are pairs of real ones."""
        for op in (dist.ReduceOp.SUM, *([] if OLD else [dist.ReduceOp.AVG])):
            expected, got = Values("cpu", torch.complex64).given(5), Values("sim", torch.complex64).given(5)
            dist.all_reduce(expected, op=op)
            dist.all_reduce(got, op=op)
            self.assertTrue(torch.equal(expected, got.cpu()))
        with self.assertRaisesRegex(ValueError, "complex"):
            dist.all_reduce(Values("sim", torch.complex64).given(5), op=dist.ReduceOp.MAX)

    def test_premultiplied_sum(self) -> None:
        """PREMUL_SUM multiplies what is given, by a number or by a tensor of the device."""
        for factor in (2.0, self.values(2.0)):
            mine = self.values(1.0, 3.0 + self.rank)
            dist.all_reduce(mine, op=_make_nccl_premul_sum(factor))
            self.assertEqual([4.0, 14.0], mine.tolist())

    def test_stacked_gather(self) -> None:
        """The output may have a separate dimension for the ranks, or be channels-last memory."""
        stacked = torch.zeros(2, 3, device=self.device)
        all_gather_into_tensor(stacked, self.values(1.0, 2.0, 3.0 + self.rank))
        self.assertEqual([[1.0, 2.0, 3.0], [1.0, 2.0, 4.0]], stacked.tolist())
        image = torch.arange(24.0, device=self.device).reshape(1, 2, 3, 4).to(memory_format=torch.channels_last)
        expected = image.cpu() * 2
        dist.all_reduce(image)
        self.assertTrue(torch.equal(expected, image.cpu()))

    def test_uneven_lists(self) -> None:
        """Lists of tensors of different sizes, which gloo rejects and NCCL broadcasts or reduces one by one."""
        sizes = [2, 5]
        parts = [torch.zeros(size, device=self.device) for size in sizes]
        dist.all_gather(parts, torch.arange(float(sizes[self.rank]), device=self.device) + 10 * self.rank)
        self.assertEqual([[0.0, 1.0], [10.0, 11.0, 12.0, 13.0, 14.0]], [part.tolist() for part in parts])
        mine = torch.zeros(sizes[self.rank], device=self.device)
        dist.reduce_scatter(mine, [torch.full((size,), 1.0 + self.rank, device=self.device) for size in sizes])
        self.assertEqual([3.0] * sizes[self.rank], mine.tolist())
        # Rank r sends s + 1 elements to rank s.
        parts = [torch.zeros(self.rank + 1, device=self.device) for _ in range(2)]
        dist.all_to_all(parts, [torch.full((peer + 1,), 1.0 + self.rank, device=self.device) for peer in range(2)])
        self.assertEqual([[1.0] * (self.rank + 1), [2.0] * (self.rank + 1)], [part.tolist() for part in parts])
        self.assertEqual([], self.found())


class ResultsOnFour(OnSim):
    """On four ranks, where the order of a sum matters."""

    world_size = 4

    @pytest.mark.nightly
    @pytest.mark.slow
    def test_programs(self) -> None:
        """Bit for bit gloo's: in single and in half precision."""
        for dtype in (torch.float32, torch.bfloat16):
            with self.subTest(str(dtype)):
                self.assert_same_as_gloo(collectives, dtype)
        for name in ("coalesced", "functional"):
            with self.subTest(name):
                self.assert_same_as_gloo(PROGRAMS[name])

    def test_groups(self) -> None:
        """new_group, the dimensions of a mesh, and a group of one rank."""
        mesh = init_device_mesh("sim", (2, 2), mesh_dim_names=("replicate", "shard"))
        mine = self.values(1.0 + self.rank)
        dist.all_reduce(mine, group=mesh.get_group("shard"))
        self.assertEqual([[3.0], [3.0], [7.0], [7.0]][self.rank], mine.tolist())
        dist.all_reduce(mine, group=mesh.get_group("replicate"))
        self.assertEqual([10.0], mine.tolist())
        odd = dist.new_group([1, 3], backend="simccl")
        alone = [dist.new_group([rank]) for rank in range(4)][self.rank]
        if self.rank in (1, 3):
            dist.all_reduce(mine, group=odd)
            dist.barrier(group=odd)
        dist.all_reduce(mine, group=alone)
        self.assertEqual([10.0, 20.0, 10.0, 20.0][self.rank], mine.item())
        self.assertEqual([], self.found())


class Refusals(OnSim):
    """Wrong use raises NCCL's error, with the name of the tensor."""

    def refused(
        self, error: type[Exception], text: str, call: Callable[..., object], *args: Any, **kwargs: Any
    ) -> None:
        with self.subTest(text), self.assertRaisesRegex(error, text):
            call(*args, **kwargs)

    def test_refusals(self) -> None:
        """Layout, device, dtype, size, reduction, roots."""
        matrix = torch.zeros(4, 4, device=self.device)
        four, eight = torch.zeros(4, device=self.device), torch.zeros(8, device=self.device)
        ints, shorts = four.to(torch.int32), four.to(torch.int16)
        contiguous = r"Tensors must be contiguous, got the "
        self.refused(
            ValueError, contiguous + r"tensor of shape \[4, 4\], strides \[1, 4\]", dist.all_reduce, matrix.t()
        )
        self.refused(
            ValueError,
            contiguous + "input tensor",
            all_gather_into_tensor,
            torch.zeros(32, device=self.device),
            matrix.t(),
        )
        self.refused(
            ValueError,
            contiguous + "output tensor",
            reduce_scatter_tensor,
            matrix[:, :2].t(),
            torch.zeros(16, device=self.device),
        )
        self.refused(
            ValueError,
            "on sim and dense, got the output tensor .* on cpu",
            all_gather_into_tensor,
            torch.zeros(8),
            four,
        )
        self.refused(TypeError, "must have the same type", all_gather_into_tensor, eight.to(torch.int32), four)
        self.refused(
            ValueError, "must be equal to world_size times input tensor size", all_gather_into_tensor, four, four
        )
        self.refused(ValueError, "output size times world size", reduce_scatter_tensor, four, four)
        self.refused(ValueError, r"BAND with NCCL", dist.all_reduce, ints, dist.ReduceOp.BAND)
        self.refused(TypeError, r"not supported .*: tensor of shape \[4\].* Short", dist.all_reduce, shorts)
        self.refused(TypeError, "AVG with boolean", dist.all_reduce, four.to(torch.bool), dist.ReduceOp.AVG)
        self.refused(RuntimeError, "Float8", dist.all_reduce, four.to(torch.float8_e4m3fn))
        backend: Any = world()._get_backend(self.device)
        self.refused(NotImplementedError, "recvAnysource", backend.recv_anysource, [four], 0)
        self.refused(ValueError, r"len\(tensor_list\)=1", dist.all_gather, [four], four)
        self.assertEqual([], self.found())
