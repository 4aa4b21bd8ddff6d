"""AD. The cost model: the cost of redistributing a tensor over a mesh, compared with other redistributions."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence

import torch
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import Partial, Replicate, Shard
from torch.distributed.tensor.placement_types import Placement

from fsdp_conformance.adapters.components import TensorLayout
from fsdp_conformance.cases.base import ConformanceTestCase
from fsdp_conformance.cases.declaration import conformance_case
from fsdp_conformance.checks.result import comparison

#: All ranks' shards are equally large at every world size used here.
SHAPE = (24, 8)

#: By letter: the layout "SR" is sharded along the first axis and replicated along the second.
PLACEMENTS: dict[str, Placement] = {"R": Replicate(), "S": Shard(0), "P": Partial()}


class Costs(ConformanceTestCase):
    """Queries to a cost model; layouts are written as words."""

    def mesh(self, *shape: int) -> DeviceMesh:
        """A mesh of all ranks."""
        return init_device_mesh(self.device_type, shape)

    def cost(
        self,
        mesh: DeviceMesh,
        source: str,
        target: str,
        *,
        shape: Sequence[int] = SHAPE,
        dtype: torch.dtype = torch.float32,
        target_mesh: DeviceMesh | None = None,
    ) -> float:
        """The implementation's answer, in microseconds."""
        adapter = self.subjects[-1] if self.subjects else self.subject()
        layouts = [
            TensorLayout(each, tuple(PLACEMENTS[letter] for letter in word))
            for each, word in ((mesh, source), (target_mesh or mesh, target))
        ]
        with self.blaming("implementation"):
            return float(adapter.redistribution_cost(shape, dtype, *layouts))

    def expect_cost(self, got: float, expected: float, what: str) -> None:
        """A cost has this value."""
        self.expect_equal("R184", f"cost of {what} in us", got, expected)

    def expect_less(self, less: float, more: float, what: str) -> None:
        """One cost is positive and less than another finite one."""
        message = comparison(f"cost of {what} in us", expected="0 < first < second < inf", got=f"{less}, {more}")
        self.expect(0 < less < more < math.inf, "R184", message)


class Extremes(Costs):
    """Conversions that cost nothing, and impossible ones."""

    @conformance_case(
        "R184",
        chapter="AD",
        axes={"world_size": (2, 3, 4)},
        needs=("mesh",),
        kills=("charges-equal-layouts", "charges-slices"),
    )
    def test_costs_nothing(self, world_size: int) -> None:
        """Keeping a layout costs nothing, and neither does slicing what every rank has."""
        mesh = self.mesh(world_size)
        for source, target in ("RR", "SS", "PP", "RS"):
            self.expect_cost(self.cost(mesh, source, target), 0.0, f"{source} to {target}")

    @conformance_case("R184", chapter="AD", world_size=4, needs=("mesh",), kills=("outsiders-pay",))
    def test_outside(self) -> None:
        """The cost is zero on a rank outside the mesh, and positive on ranks in the mesh."""
        mesh = DeviceMesh(self.device_type, [0, 1])
        for source, target in ("SR", "PR", "PS"):
            cost = self.cost(mesh, source, target)
            if self.rank < 2:
                what = f"cost of {source} to {target} in us"
                self.expect(0 < cost < math.inf, "R184", comparison(what, expected="a positive one", got=cost))
            else:
                self.expect_cost(cost, 0.0, f"{source} to {target}, outside the mesh")

    @conformance_case(
        "R184",
        chapter="AD",
        world_size=4,
        needs=("mesh",),
        kills=("shards-become-partial", "crosses-meshes", "first-axis-only"),
    )
    def test_cannot_be(self) -> None:
        """Turning shards into partial sums, or redistributing to another mesh, is impossible: the cost is infinite."""
        flat, square = self.mesh(4), self.mesh(2, 2)
        self.expect_cost(self.cost(flat, "S", "P"), math.inf, "S to P")
        for source, target in (("SR", "PR"), ("RS", "RP"), ("PS", "RP")):
            self.expect_cost(self.cost(square, source, target), math.inf, f"{source} to {target}")
        pairs = [DeviceMesh(self.device_type, ranks) for ranks in ([0, 1, 2, 3], [3, 2, 1, 0])]
        for source, target in ("SR", "PR", "SS"):
            cost = self.cost(pairs[0], source, target, target_mesh=pairs[1])
            self.expect_cost(cost, math.inf, f"{source} to {target} of another mesh")


class Relations(Costs):
    """Which redistributions cost more than others."""

    @conformance_case(
        "R184",
        chapter="AD",
        axes={"world_size": (2, 3, 4)},
        needs=("mesh",),
        kills=("what-is-dear-is-cheap", "gathers-one-shard", "no-start-up"),
    )
    def test_one_axis(self, world_size: int) -> None:
        """
        All-gather and reduce-scatter cost the same; one all-reduce is cheaper than both together by more than a
        microsecond, because it starts only once.
        """
        mesh = self.mesh(world_size)
        gather, scatter, reduce = (self.cost(mesh, *pair) for pair in ("SR", "PS", "PR"))
        self.expect_cost(gather, scatter, "all-gather, as reduce-scatter")
        self.expect_less(gather, reduce, "all-gather and all-reduce")
        self.expect_less(reduce + 1, gather + scatter, "one all-reduce, and two collectives")

    @conformance_case(
        "R184",
        chapter="AD",
        world_size=4,
        needs=("mesh",),
        kills=("reduces-in-one-pass", "first-axis-only"),
    )
    def test_two_axes(self) -> None:
        """Along two axes an all-reduce costs more than an all-gather, a reduce-scatter, or itself along one axis."""
        mesh = self.mesh(2, 2)
        reduce = self.cost(mesh, "PP", "RR")
        self.expect_less(self.cost(mesh, "SS", "RR"), reduce, "all-gather and all-reduce over two axes")
        self.expect_less(self.cost(mesh, "PP", "SS"), reduce, "reduce-scatter and all-reduce over two axes")
        self.expect_less(self.cost(mesh, "PR", "RR"), reduce, "all-reduce over the first axis, and over both")
        self.expect_less(self.cost(mesh, "RP", "RR"), reduce, "all-reduce over the second axis, and over both")

    @conformance_case(
        "R184",
        chapter="AD",
        axes={"world_size": (2, 4)},
        needs=("mesh",),
        kills=("everything-costs-the-same", "counts-elements", "every-tensor-alike"),
    )
    def test_bytes(self, world_size: int) -> None:
        """More bytes cost more, whether through more elements or a wider dtype."""
        mesh = self.mesh(world_size)
        for source, target in ("SR", "PS", "PR"):
            by_size = [self.cost(mesh, source, target, shape=(24 * 4**power, 8)) for power in range(8)]
            dtypes = (torch.int8, torch.bfloat16, torch.float32, torch.float64)
            by_dtype = [self.cost(mesh, source, target, dtype=dtype) for dtype in dtypes]
            for costs, what in ((by_size, "four times the elements"), (by_dtype, "twice the itemsize")):
                for less, more in itertools.pairwise(costs):
                    self.expect_less(less, more, f"{source} to {target}, {what}")
