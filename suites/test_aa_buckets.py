"""AA. Buckets of the reducer: which gradients are reduced together."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from fsdp_conformance.adapters.components import Assignment
from fsdp_conformance.cases.base import ConformanceTestCase
from fsdp_conformance.cases.declaration import conformance_case


class Assignments(ConformanceTestCase):
    """Which tensors share a bucket."""

    def assigned(self, tensors: list[Tensor], limits: list[int], *more: Any) -> Assignment:
        """The implementation's answer."""
        adapter = self.subject()
        with self.blaming("implementation"):
            assignment = adapter.bucket_assignment(tensors, limits, *more)
        return Assignment([list(bucket) for bucket in assignment.buckets], list(assignment.limits))

    def expect_assignment(
        self, requirement: str, got: Assignment, buckets: list[list[int]], limits: list[int] | None = None
    ) -> None:
        """Compare buckets, and the limits under which they were filled."""
        self.expect_equal(requirement, "buckets", got.buckets, buckets)
        if limits is not None:
            self.expect_equal(requirement, "limits", got.limits, limits)

    @conformance_case(
        "R163",
        chapter="AA",
        world_size=1,
        needs=("reducer",),
        kills=(
            "buckets-in-reverse",
            "closes-before-adding",
            "limits-never-advance",
            "one-bucket-for-all-dtypes",
            "buckets-as-closed",
        ),
    )
    def test_assignment_by_size(self) -> None:
        """
        A tensor joins the open bucket of its dtype, which closes when its bytes reach the limit; each closing advances
        that dtype's limit, the last limit repeats, and buckets are sorted by their lowest index.
        """

        def filled(*numels: int, dtypes: Sequence[torch.dtype] = (torch.float32,)) -> list[Tensor]:
            return [torch.empty(numel, dtype=dtypes[index % len(dtypes)]) for index, numel in enumerate(numels)]

        both = (torch.float32, torch.float64)
        # 400, 800 and 400 bytes each reach the limit of 400 immediately; 200 bytes are left over.
        got = self.assigned(filled(100, 200, 100, 50), [400])
        self.expect_assignment("R163", got, [[0], [1], [2], [3]], [400] * 4)
        # float32: 200 + 200, then 200 left over; float64: 200 + 400 exceed the limit together, then 400.
        got = self.assigned(filled(50, 25, 50, 50, 50, 50, dtypes=both), [400])
        self.expect_assignment("R163", got, [[0, 2], [1, 3], [4], [5]], [400] * 4)
        # 40 reach the first limit of 40; 40 + 40 the second of 80; the last is left over under 80.
        got = self.assigned(filled(10, 10, 10, 10), [40, 80])
        self.expect_assignment("R163", got, [[0], [1, 2], [3]], [40, 80, 80])
        # The limit rises from 200 to 400 separately for each dtype.
        got = self.assigned(filled(50, 25, 50, 25, 50, 25, dtypes=both), [200, 400])
        self.expect_assignment("R163", got, [[0], [1], [2, 4], [3, 5]], [200, 200, 400, 400])
        # A tensor larger than the limit joins the open bucket.
        got = self.assigned(filled(10, 100, 10), [80])
        self.expect_assignment("R163", got, [[0, 1], [2]], [80, 80])
        # The bucket of 1 and 2 closes first, but still comes after that of 0 and 3.
        mixed = [torch.empty(5), *filled(5, 5, dtypes=both[1:]), torch.empty(15)]
        self.expect_assignment("R163", self.assigned(mixed, [80]), [[0, 3], [1, 2]], [80, 80])

    @conformance_case(
        "R163", chapter="AA", world_size=1, needs=("reducer",), kills=("ignores-order", "closes-before-adding")
    )
    def test_assignment_in_an_order(self) -> None:
        """With a given order, buckets hold the tensors' original indices, in the order in which buckets close."""
        tensors = [torch.empty(10) for _ in range(4)]
        got = self.assigned(tensors, [80], [], [3, 1, 0, 2])
        self.expect_assignment("R163", got, [[3, 1], [0, 2]], [80, 80])

    @conformance_case("R164", chapter="AA", world_size=1, needs=("reducer",), kills=("ignores-sparse-flags",))
    def test_sparse_flags(self) -> None:
        """A tensor flagged as sparse gets its own bucket with limit 0, and the open bucket stays open."""
        tensors = [torch.empty(10) for _ in range(3)]
        got = self.assigned(tensors, [400], [False, True, False])
        self.expect_assignment("R164", got, [[0, 2], [1]], [400, 0])

    @conformance_case(
        "R164",
        chapter="AA",
        axes={"mistake": ("empty", "sparse")},
        world_size=1,
        needs=("reducer",),
        kills=("accepts-nothing-and-sparse",),
    )
    def test_assignment_refused(self, mistake: str) -> None:
        """An empty list and an actual sparse tensor are rejected."""
        tensors = [] if mistake == "empty" else [torch.eye(3).to_sparse()]
        adapter = self.subject()
        with (
            self.refusal("R164", f"tensors: {mistake}", names=("tensors", "empty", "sparse", "flags")),
            self.blaming("implementation"),
        ):
            adapter.bucket_assignment(tensors, [400])
