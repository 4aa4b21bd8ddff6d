"""AD. Collectives along the axes of a mesh: each row separately, shards of any size, and a check of metadata."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh

from fsdp_conformance.adapters.components import MeshCollectives
from fsdp_conformance.cases.base import ConformanceTestCase
from fsdp_conformance.cases.declaration import conformance_case
from fsdp_conformance.fixtures.coded import position_code
from fsdp_conformance.harness.recording import process_group

#: Meshes by name: 2x4 is [[0, 1, 2, 3], [4, 5, 6, 7]].
MESHES: dict[str, tuple[int, ...]] = {"4": (4,), "2x2": (2, 2), "2x4": (2, 4), "2x2x2": (2, 2, 2)}

#: Even, uneven and with empty shards, over 2 ranks and over 4, along each dim.
SHAPES: tuple[tuple[tuple[int, ...], int], ...] = (
    ((8, 2), 0),
    ((3, 8), 1),
    ((5, 3), 0),
    ((3, 5), 1),
    ((2, 1, 3), 1),
    ((2, 2, 6), -1),
)

#: Each axis of 2 x 2, and of each larger mesh one axis with neighbours on both sides.
ROWS = {"mesh": tuple(MESHES), "axis": (0, 1)}


def _is_row(values: dict[str, Any]) -> bool:
    mesh, axis = values["mesh"], values["axis"]
    return bool(mesh == "2x2" or axis == min(len(MESHES[mesh]) - 1, 1))


def _num_ranks(values: dict[str, Any]) -> int:
    return math.prod(MESHES[values["mesh"]])


def _has_more_rows(values: dict[str, Any]) -> bool:
    return len(MESHES[values["mesh"]]) > 1


class Mesh(ConformanceTestCase):
    """Shared parts of the cases below: rows computed by hand, and values that encode rank and position."""

    def start(self, mesh: str = "4", axis: int = 0) -> MeshCollectives:
        """The collectives, and a mesh of the world: `row` is this rank's along the axis, `place` its index in it."""
        shape, self.axis = MESHES[mesh], axis
        step = math.prod(shape[axis + 1 :])
        self.place = self.rank // step % shape[axis]
        self.row = [self.rank + (other - self.place) * step for other in range(shape[axis])]
        self.mesh = init_device_mesh(self.device_type, shape)
        self.last_record = len(process_group.log().records)
        adapter = self.subject()
        with self.blaming("implementation"):
            return adapter.mesh_collectives()

    def values(self, rank: int, shape: Sequence[int]) -> Tensor:
        """Element i of rank r is 1000 r + i + 1."""
        values: Tensor = position_code(shape, first=1000 * rank + 1).to(self.device)
        return values

    def ignored_list(self, *shape: int) -> list[Tensor] | None:
        """
        The argument of a rank other than the source: a list of NaN tensors, one of the wrong shape and dtype, or None.
        """
        nothing = torch.full(shape, torch.nan, device=self.device)
        return [[nothing] * len(self.row), [nothing.flatten().double()], None][self.place % 3]

    def sizes(self, length: int) -> list[int]:
        """The lengths of the row's shards: those of `torch.chunk`, then empty ones."""
        sizes = [len(chunk) for chunk in torch.arange(length).chunk(len(self.row))]
        return sizes + [0] * (len(self.row) - len(sizes))

    def shard_of(self, whole: Tensor, dim: int) -> Tensor:
        """This rank's shard, as a view."""
        shards: tuple[Tensor, ...] = whole.split(self.sizes(whole.shape[dim]), dim)
        return shards[self.place]

    def strided(self, tensor: Tensor) -> Tensor:
        """The same values with a different memory layout, which varies between the ranks of a row."""
        return tensor if self.place % 2 else tensor.transpose(0, -1).contiguous().transpose(0, -1)

    def groups(self) -> set[tuple[int, ...]]:
        """The groups that this rank has communicated over since the last call."""
        records = process_group.log().records
        used = {record.group for record in records[self.last_record :]}
        self.last_record = len(records)
        return used

    def expect_row_alone(self, requirement: str) -> None:
        """Everything sent since the last call was sent over this rank's row."""
        self.expect_equal(requirement, "groups used", self.groups(), {tuple(self.row)})


class Sources(Mesh):
    """From one rank of a row to the whole row."""

    @conformance_case(
        "R182",
        chapter="AD",
        axes=ROWS,
        only=_is_row,
        world_size=_num_ranks,
        needs=("mesh",),
        kills=lambda values: [
            *(["source-of-the-world"] if _has_more_rows(values) else []),
            *(["first-axis-always"] if values["axis"] else []),
            "first-source-always",
            "broadcast-into-a-copy",
        ],
    )
    def test_broadcast(self, mesh: str, axis: int) -> None:
        """Each row receives, in place, the tensor of its own source: the rank with that index in the row."""
        collectives = self.start(mesh, axis)
        for source, sender in enumerate(self.row):
            tensor = self.values(self.rank, (2, 3))
            with self.blaming("implementation"):
                collectives.broadcast(tensor, self.mesh, axis, source)
            self.check_equal("R182", tensor, self.values(sender, (2, 3)), check="broadcast", fqn=f"source {source}")

    @conformance_case(
        "R182", chapter="AD", world_size=4, needs=("mesh",), kills=("broadcast-by-memory", "first-source-always")
    )
    def test_broadcast_strided(self) -> None:
        """A non-contiguous tensor receives the source's values, even if its strides differ from the source's."""
        collectives = self.start()
        for source in range(4):
            tensor = self.strided(self.values(self.rank, (2, 3)))
            strides = tensor.stride()
            with self.blaming("implementation"):
                collectives.broadcast(tensor, self.mesh, 0, source)
            self.check_equal("R182", tensor, self.values(source, (2, 3)), check="broadcast", fqn=f"source {source}")
            self.expect_equal("R182", "stride", tensor.stride(), strides)

    @conformance_case(
        "R182", chapter="AD", world_size=8, needs=("mesh",), kills=("first-axis-always", "broadcast-into-a-copy")
    )
    def test_broadcast_axis_by_axis(self) -> None:
        """Along one axis after another, the first rank of 2 x 2 x 2 reaches all ranks."""
        collectives = self.start("2x2x2")
        tensor = self.values(self.rank, (3,))
        for axis in range(3):
            # By then the source holds what the first rank along the earlier axes sent it.
            sender = self.rank % 2 ** (2 - axis)
            with self.blaming("implementation"):
                collectives.broadcast(tensor, self.mesh, axis)
            self.check_equal("R182", tensor, self.values(sender, (3,)), check="broadcast", fqn=f"axis {axis}")

    @conformance_case(
        "R182",
        chapter="AD",
        axes=ROWS,
        only=_is_row,
        world_size=_num_ranks,
        needs=("mesh",),
        kills=lambda values: [
            *(["source-of-the-world"] if _has_more_rows(values) else []),
            *(["first-axis-always"] if values["axis"] else []),
            "first-source-always",
            "scatters-its-own-list",
            "lists-must-fit",
            "scatter-into-a-copy",
        ],
    )
    def test_scatter(self, mesh: str, axis: int) -> None:
        """Each rank receives its entry of the list of its row's source, in place; other ranks' lists are ignored."""
        collectives = self.start(mesh, axis)
        for source, sender in enumerate(self.row):
            whole = self.values(self.rank, (len(self.row), 2, 3))
            mine = list(whole) if sender == self.rank else self.ignored_list(2, 3)
            output = torch.full((2, 3), torch.nan, device=self.device)
            with self.blaming("implementation"):
                collectives.scatter(output, mine, self.mesh, axis, source)
            expected = self.values(sender, (len(self.row), 2, 3))[self.place]
            self.check_equal("R182", output, expected, check="scatter", fqn=f"source {source}")

    @conformance_case(
        "R182",
        chapter="AD",
        axes={"mesh": ("4", "2x4"), "dim": (0, 1)},
        world_size=_num_ranks,
        needs=("mesh",),
        kills=("pads-in-front", "scatter-into-a-copy", "first-source-always"),
    )
    def test_scatter_uneven(self, mesh: str, dim: int) -> None:
        """5 rows, or columns, over 4 ranks arrive as 2, 2, 1 and an empty shard that keeps its other dims."""
        axis = len(MESHES[mesh]) - 1
        collectives = self.start(mesh, axis)
        shape = (5, 3) if dim == 0 else (3, 5)
        for source in (0, 2):
            whole = self.values(self.row[source], shape)
            mine = list(whole.split(self.sizes(5), dim)) if source == self.place else self.ignored_list(*shape)
            expected = self.shard_of(whole, dim)
            output = torch.full_like(expected, torch.nan)
            with self.blaming("implementation"):
                collectives.scatter(output, mine, self.mesh, axis, source, dim=dim, length=5)
            self.check_equal("R182", output, expected, check="uneven scatter", fqn=f"source {source}")

    @conformance_case(
        "R182",
        chapter="AD",
        world_size=4,
        needs=("mesh",),
        kills=("scatter-by-memory", "scatter-into-a-copy", "lists-must-fit"),
    )
    def test_scatter_strided(self) -> None:
        """Columns of one tensor are scattered by value, not by memory layout."""
        collectives = self.start()
        whole = self.values(self.row[1], (3, 8))
        output = torch.full((3, 2), torch.nan, device=self.device)
        mine = list(whole.chunk(4, dim=1)) if self.place == 1 else None
        with self.blaming("implementation"):
            collectives.scatter(output, mine, self.mesh, 0, 1)
        self.check_equal("R182", output, self.shard_of(whole, 1), check="strided scatter")


class Shards(Mesh):
    """Splitting, padding and unpadding; nothing is sent."""

    @conformance_case(
        "R182",
        chapter="AD",
        axes={"dim": (0, 1), "world_size": (1,)},
        needs=("mesh",),
        kills=("mesh-negates", "balanced-shards", "empty-shards-missing", "empty-shards-flat"),
    )
    def test_shards(self, dim: int, world_size: int) -> None:
        """Splits like `torch.chunk`, but into one shard per rank: empty shards keep their other dims."""
        adapter = self.subject()
        for length, sizes in ((5, [2, 2, 1, 0]), (4, [1, 1, 1, 1]), (2, [1, 1, 0, 0]), (0, [0, 0, 0, 0])):
            whole = self.values(0, (length, 3) if dim == 0 else (3, length))
            with self.blaming("implementation"):
                got = list(adapter.mesh_collectives().shards(whole, 4, dim))
            self.expect_equal("R182", f"shards of {length} rows", len(got), 4)
            for index, (mine, expected) in enumerate(zip(got, whole.split(sizes, dim), strict=False)):
                self.check_equal("R182", mine, expected, check="shards", fqn=f"shard {index} of {length}")

    @conformance_case(
        "R182",
        chapter="AD",
        axes={"dim": (0, 1), "world_size": (1,)},
        needs=("mesh",),
        kills=("mesh-adds-a-dimension", "padding-not-zero", "padding-copies", "unpads-the-front"),
    )
    def test_padding(self, dim: int, world_size: int) -> None:
        """Padding appends zeros and unpadding removes them; padding by zero returns the same object."""
        adapter = self.subject()
        tensor = self.values(0, (2, 3))
        zeros = torch.zeros((2, 3) if dim == 0 else (2, 2), device=self.device)
        with self.poisoned_allocations(), self.blaming("implementation"):
            collectives = adapter.mesh_collectives()
            padded = collectives.pad(tensor, dim, 2)
            unpadded = collectives.unpad(torch.cat([tensor, zeros], dim), dim, 2)
            same = [collectives.pad(tensor, dim, 0) is tensor, collectives.unpad(tensor, dim, 0) is tensor]
        self.check_equal("R182", padded, torch.cat([tensor, zeros], dim), check="padded")
        self.check_equal("R182", unpadded, tensor, check="unpadded")
        self.expect_equal("R182", "same object after padding and unpadding by zero", same, [True, True])


class Wholes(Mesh):
    """From all ranks of a row to all of them."""

    @conformance_case(
        "R183",
        chapter="AD",
        axes=ROWS,
        only=_is_row,
        world_size=_num_ranks,
        needs=("mesh",),
        kills=lambda values: [
            *(["first-axis-always"] if values["axis"] else []),
            "keeps-padding",
            "gathers-along-first-dim",
            "gathers-in-reverse",
        ],
    )
    def test_all_gather(self, mesh: str, axis: int) -> None:
        """Shards of each row, including uneven and empty ones, are concatenated along any dim without padding."""
        collectives = self.start(mesh, axis)
        for shape, dim in SHAPES:
            whole = self.values(self.row[0], shape)
            shard = self.shard_of(whole, dim)
            for mine in (shard.contiguous(), self.strided(shard)):
                with self.poisoned_allocations(), self.blaming("implementation"):
                    got = collectives.all_gather(mine, self.mesh, axis, dim, shape[dim])
                self.check_equal("R183", got, whole, check="all-gather", fqn=f"{shape} along {dim}")

    @conformance_case(
        "R183",
        chapter="AD",
        axes=ROWS,
        only=_is_row,
        world_size=_num_ranks,
        needs=("mesh",),
        kills=lambda values: [
            *(["first-axis-always"] if values["axis"] else []),
            *(["sums-over-the-world"] if _has_more_rows(values) else []),
            "averages-the-row",
            "next-ranks-sum",
            "reduces-by-memory",
            "sum-keeps-padding",
        ],
    )
    def test_reduce_scatter(self, mesh: str, axis: int) -> None:
        """
        Each rank receives its shard of the sum over its row, in which each rank of the row counts once and no other
        rank counts, without padding.
        """
        collectives = self.start(mesh, axis)
        for shape, dim in SHAPES:
            code = position_code(shape).to(self.device)
            for mine in (code * 2**self.rank, self.strided(code * 2**self.rank)):
                with self.poisoned_allocations(), self.blaming("implementation"):
                    got = collectives.reduce_scatter(mine, self.mesh, axis, dim)
                expected = self.shard_of(code * sum(2**rank for rank in self.row), dim)
                self.check_equal("R183", got, expected, check="reduce-scatter", fqn=f"{shape} along {dim}")

    @conformance_case(
        "R183",
        chapter="AD",
        axes=ROWS,
        only=_is_row,
        world_size=_num_ranks,
        needs=("mesh",),
        kills=lambda values: [
            *(["first-axis-always"] if values["axis"] else []),
            "exchanges-in-reverse",
            "exchange-is-strided",
            "exchange-rounds-down",
        ],
    )
    def test_all_to_all(self, mesh: str, axis: int) -> None:
        """Resharding from one dim to another equals gathering and chunking, and is contiguous."""
        collectives = self.start(mesh, axis)
        for shape, gather_dim, shard_dim in (
            ((8, 4), 0, 1),
            ((8, 4), 1, 0),
            ((5, 3), 0, 1),
            ((3, 2, 5), 2, 0),
            ((3, 2, 5), -2, -1),
        ):
            whole = self.values(self.row[0], shape)
            with self.blaming("implementation"):
                got = collectives.shard_dim_all_to_all(
                    self.shard_of(whole, gather_dim), self.mesh, axis, gather_dim, shard_dim, shape[gather_dim]
                )
            where = f"{shape} from {gather_dim} to {shard_dim}"
            self.check_equal("R183", got, self.shard_of(whole, shard_dim), check="all-to-all", fqn=where)
            details = f"stride {got.stride()}"
            self.expect_equal("R183", "is_contiguous", got.is_contiguous(), True, details=details, fqn=where)

    @conformance_case(
        "R183",
        chapter="AD",
        world_size=4,
        needs=("mesh",),
        kills=(
            "meta-communicates",
            "sums-over-the-world",
            "mesh-talks-to-the-world",
        ),
    )
    def test_meta(self) -> None:
        """Collectives on meta tensors send nothing."""
        collectives = self.start("2x2", 1)
        tensor = torch.empty(4, 4, device="meta")
        for name, call in {
            "broadcast": lambda: collectives.broadcast(tensor, self.mesh, 1),
            "scatter": lambda: collectives.scatter(tensor, [tensor, tensor], self.mesh, 1),
            "all-gather": lambda: collectives.all_gather(tensor, self.mesh, 1, 0, 8),
            "reduce-scatter": lambda: collectives.reduce_scatter(tensor, self.mesh, 1, 0),
            "all-to-all": lambda: collectives.shard_dim_all_to_all(tensor, self.mesh, 1, 0, 1, 8),
        }.items():
            with self.blaming("implementation"):
                call()
            self.expect_equal("R183", f"groups used by {name} on meta", self.groups(), set())


class Metadata(Mesh):
    """The check that the tensors of a row differ only in their values."""

    def tensor(self, difference: str, *, different: bool) -> Tensor:
        """A tensor with this rank's values, which may also differ from the others in one property."""
        tensor = self.values(self.rank, (2, 3))
        if not different:
            return tensor
        changed: dict[str, Tensor] = {
            "dtype": tensor.double(),
            "requires-grad": tensor.clone().requires_grad_(),
            "shape": self.values(self.rank, (3, 3)),
            "stride": tensor.t().contiguous().t(),
        }
        return changed[difference]

    @conformance_case(
        "R185",
        chapter="AD",
        axes={"difference": ("dtype", "requires-grad", "shape", "stride"), "mesh": ("2x2", "2x4"), "axis": (0, 1)},
        only=lambda values: values["mesh"] == "2x2" or (values["difference"], values["axis"]) == ("dtype", 1),
        world_size=_num_ranks,
        needs=("mesh",),
        kills=lambda values: [
            f"{values['difference']}-ignored",
            "raises-where-different",
            "checks-the-world",
            *(["first-axis-always"] if values["axis"] else []),
        ],
    )
    def test_difference(self, difference: str, mesh: str, axis: int) -> None:
        """If one rank differs, every rank of its row raises; other rows neither raise nor communicate."""
        collectives = self.start(mesh, axis)
        odd = self.world_size - 1
        tensor = self.tensor(difference, different=self.rank == odd)
        options = {name: True for name in ("shape", "stride") if name == difference}
        if odd in self.row:
            with (
                self.refusal("R185", f"a different {difference} on rank {odd}", names=(difference.replace("-", "_"),)),
                self.blaming("implementation"),
            ):
                collectives.check_meta(tensor, self.mesh, axis, **options)
        else:
            with self.blaming("implementation"):
                collectives.check_meta(tensor, self.mesh, axis, **options)
        self.expect_row_alone("R185")

    @conformance_case(
        "R185",
        chapter="AD",
        axes={"difference": ("shape", "stride"), "world_size": (4,)},
        needs=("mesh",),
        kills=lambda values: [f"{values['difference']}-always-compared"],
    )
    def test_not_asked_for(self, difference: str, world_size: int) -> None:
        """Values are never compared, shapes and strides only on request."""
        collectives = self.start("2x2", 1)
        tensor = self.tensor(difference, different=self.rank == 3)
        with self.blaming("implementation"):
            collectives.check_meta(tensor, self.mesh, 1)
            collectives.check_meta(self.values(self.rank, (2, 3)), self.mesh, 1, shape=True, stride=True)
        self.expect_row_alone("R185")

    @conformance_case(
        "R185", chapter="AD", world_size=4, needs=("mesh",), kills=("raises-where-different", "dtype-ignored")
    )
    def test_row_alone(self) -> None:
        """One row can run the check while the other does not."""
        collectives = self.start("2x2", 1)
        if self.rank >= 2:
            tensor = self.tensor("dtype", different=self.rank == 3)
            with self.refusal("R185", "a different dtype on rank 3", names=("dtype",)), self.blaming("implementation"):
                collectives.check_meta(tensor, self.mesh, 1)
            self.expect_row_alone("R185")
        else:
            self.expect_equal("R185", "groups used by a row that runs no check", self.groups(), set())
