"""Tensors that differ in more than values raise on every rank of their row, and on no other."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from fsdp_conformance.engine.errors import TensorMetaMismatch
from fsdp_conformance.engine.mesh.tensor_meta import check_tensor_meta
from fsdp_conformance.history.collective import Op
from fsdp_conformance.tests.engine.mesh.mesh_ranks import MeshTestCase, coded


class TensorMeta(MeshTestCase):
    """Rank 3 differs; it is the second of its row on both axes."""

    def problems(self, tensor: Tensor, axis: int, **options: bool) -> list[str]:
        """The problems that this rank reports."""
        try:
            check_tensor_meta(tensor, (self.square, axis), **options)
        except TensorMetaMismatch as error:
            self.assertIn(f"[check_tensor_meta, rank {self.rank}]", str(error))
            return list(error.problems)
        return []

    def assert_told(self, mine: Tensor, *expected: str, **options: bool) -> None:
        """Every rank in a row with rank 3 reports these problems, and the other row none."""
        for axis in (0, 1):
            row = self.row(axis)
            expected_problems = [f"rank 3: {each.format(first=row[0])}" for each in expected] if 3 in row else []
            self.assertEqual(expected_problems, self.problems(mine, axis, **options))

    def different(self, different: Tensor, usual: Tensor) -> Tensor:
        return different if self.rank == 3 else usual

    def test_each_difference(self) -> None:
        """Each requested property, and no other, is mentioned."""
        usual = coded(self.rank, 2, 3)
        for other, always, optional in (
            (usual.double(), ["dtype: expected float32, as on rank {first}, got float64"], []),
            (usual.clone().requires_grad_(), ["requires_grad: expected False, as on rank {first}, got True"], []),
            (usual[:1], [], [("shape", "shape: expected (2, 3), as on rank {first}, got (1, 3)")]),
            (usual.t().contiguous().t(), [], [("stride", "stride: expected (3, 1), as on rank {first}, got (1, 2)")]),
            (
                torch.ones(6, dtype=torch.int64),
                ["dtype: expected float32, as on rank {first}, got int64"],
                [
                    ("shape", "shape: expected (2, 3), as on rank {first}, got (6,)"),
                    ("stride", "stride: expected (3, 1), as on rank {first}, got (1,)"),
                ],
            ),
        ):
            mine = self.different(other, usual)
            self.assert_told(mine, *always)
            for choice in ({"shape"}, {"stride"}, {"shape", "stride"}):
                options: dict[str, Any] = dict.fromkeys(choice, True)
                self.assert_told(mine, *always, *[text for name, text in optional if name in choice], **options)

    def test_values_and_devices_do_not_count(self) -> None:
        """Values differ on every rank, and one tensor may be on meta."""
        mine = self.different(torch.zeros(3, device="meta"), coded(self.rank, 3))
        self.assert_told(mine, shape=True, stride=True)
        self.assert_told(
            self.different(torch.zeros(4, device="meta"), mine),
            "shape: expected (3,), as on rank {first}, got (4,)",
            shape=True,
        )

    def test_the_row_alone_takes_part(self) -> None:
        """One row checks, and differs, while the other does nothing; only the row communicates."""
        self.sent()
        if self.rank >= 2:
            problems = self.problems(torch.zeros(self.rank, dtype=torch.float16), 1, shape=True)
            self.assertEqual(["rank 3: shape: expected (2,), as on rank 2, got (3,)"], problems)
            self.assertEqual({(2, 3)}, {group for _, _, group in self.sent()})
        self.assertEqual([], self.sent())

    def test_equal_tensors_cost_one_collective(self) -> None:
        """A digest of 32 bytes per rank; nothing in a group of one."""
        self.sent()
        check_tensor_meta(coded(self.rank, 3), (self.line, 0), shape=True, stride=True)
        self.assertEqual([(Op.ALL_GATHER, 4 * 32, (0, 1, 2, 3))], self.sent())
        check_tensor_meta(coded(self.rank, 3), [dist.new_group([rank]) for rank in range(4)][self.rank])
        self.assertNotIn(Op.ALL_GATHER, [op for op, _, _ in self.sent()])

    def test_several_ranks(self) -> None:
        """Each is named, on every rank."""
        dtypes = (torch.float32, torch.float64, torch.float32, torch.int8)
        with self.assertRaises(TensorMetaMismatch) as caught:
            check_tensor_meta(torch.zeros(2, dtype=dtypes[self.rank]), (self.line, 0))
        self.assertEqual(
            (
                "rank 1: dtype: expected float32, as on rank 0, got float64",
                "rank 3: dtype: expected float32, as on rank 0, got int8",
            ),
            caught.exception.problems,
        )
