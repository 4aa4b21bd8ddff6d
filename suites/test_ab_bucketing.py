"""AB. Reduce-scatter bucketing: small inputs are collected, large ones are sent immediately."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup

from fsdp_conformance.adapters.components import Bucketer
from fsdp_conformance.cases.base import ConformanceTestCase
from fsdp_conformance.cases.declaration import conformance_case
from fsdp_conformance.fixtures.coded import position_code
from fsdp_conformance.harness.recording import process_group
from fsdp_conformance.history.collective import Op


class Bucketing(ConformanceTestCase):
    """Shared by the cases below: inputs that encode rank, target, input and element, and a record of the results."""

    def start(self, row_numel: float, dtype: torch.dtype = torch.float32) -> Bucketer:
        """A bucketer with room for `row_numel` elements per rank."""
        self.results: list[tuple[int, Tensor]] = []
        self.last_record = len(process_group.log().records)
        adapter = self.subject()
        with self.blaming("implementation"):
            return adapter.reduce_scatter_bucketer(row_numel * self.world_size * dtype.itemsize)

    def inputs(self, tag: int, shape: Sequence[int], dtype: torch.dtype = torch.float32) -> list[Tensor]:
        """This rank's input for each rank: 2**rank times a code of tag, target and element."""
        rows = [position_code(shape, first=1000 * tag + 100 * target + 1) for target in range(self.world_size)]
        return [(row * 2**self.rank).to(dtype).to(self.device) for row in rows]

    def sum_of(self, tag: int, shape: Sequence[int], dtype: torch.dtype = torch.float32) -> Tensor:
        """The sum that this rank must receive: every rank counted once."""
        code = position_code(shape, first=1000 * tag + 100 * self.rank + 1)
        return torch.mul(code, 2**self.world_size - 1).to(dtype)

    def note(self, tag: int) -> Callable[[Tensor], None]:
        """A callback that stores its result, not a copy."""
        return lambda result: self.results.append((tag, result))

    def give(
        self,
        bucketer: Bucketer,
        tag: int,
        *shape: int,
        dtype: torch.dtype = torch.float32,
        group: ProcessGroup | None = None,
    ) -> None:
        """Pass one input for each rank."""
        with self.blaming("implementation"):
            bucketer.reduce_scatter(self.inputs(tag, shape, dtype), group, self.note(tag))

    def finish(self, bucketer: Bucketer, *, flush: bool = True) -> None:
        """Wait until every input (without `flush`: every issued one) has had its callback."""
        with self.blaming("implementation"):
            if flush:
                bucketer.flush()
            bucketer.wait()

    def expect_sent(self, requirement: str, *rows: int, itemsize: int = 4, when: str) -> None:
        """Since the last call, reduce-scatters of this many elements per rank were issued, in this order."""
        records = process_group.log().records
        got = [record.nbytes for record in records[self.last_record :] if record.op is Op.REDUCE_SCATTER]
        self.last_record = len(records)
        expected = [numel * self.world_size * itemsize for numel in rows]
        self.expect_equal(requirement, f"bytes of each reduce-scatter {when}", got, expected, check=when)

    def expect_called(self, requirement: str, *tags: int, when: str) -> None:
        """Exactly these callbacks have run so far, in this order."""
        self.expect_equal(requirement, f"callbacks {when}", [tag for tag, _ in self.results], list(tags), check=when)

    def check_sums(
        self, requirement: str, shapes: dict[int, tuple[int, ...]], dtype: torch.dtype = torch.float32
    ) -> None:
        """Every callback received this rank's sum in the shape of its input, and the results still hold it."""
        for tag, result in self.results:
            if tag in shapes:
                expected = self.sum_of(tag, shapes[tag], dtype)
                self.check_equal(requirement, result, expected, check="this rank's sum", fqn=f"input {tag}")


class Capacity(Bucketing):
    """How much a bucket holds."""

    @conformance_case(
        "R172",
        chapter="AB",
        axes={"dtype": ("float32", "float64"), "world_size": (2, 3, 4)},
        needs=("bucketing",),
        kills=("capacity-for-one-rank", "capacity-rounds-up", "reduces-at-capacity"),
    )
    def test_capacity(self, dtype: str, world_size: int) -> None:
        """
        The capacity per rank is the cap divided by element size and group size, rounded down: that many elements wait,
        one more does not.
        """
        kind: torch.dtype = getattr(torch, dtype)
        bucketer = self.start(5.75, kind)  # rounded down: 5
        self.give(bucketer, 1, 5, dtype=kind)
        self.expect_sent("R172", itemsize=kind.itemsize, when="when the bucket is exactly full")
        self.finish(bucketer)
        self.expect_sent("R172", 5, itemsize=kind.itemsize, when="at the flush")
        self.give(bucketer, 2, 6, dtype=kind)
        self.expect_sent("R172", 6, itemsize=kind.itemsize, when="for one more element")
        self.finish(bucketer)
        self.expect_called("R172", 1, 2, when="at the end")
        self.check_sums("R172", {1: (5,), 2: (6,)}, kind)

    @conformance_case(
        "R172",
        chapter="AB",
        axes={"cap": ("zero", "negative", "below-one-element"), "world_size": (2,)},
        needs=("bucketing",),
        kills=("no-cap-for-zero",),
    )
    def test_nothing_waits(self, cap: str, world_size: int) -> None:
        """With a capacity of zero every input is reduced immediately and separately."""
        bucketer = self.start({"zero": 0, "negative": -4, "below-one-element": 0.75}[cap])
        self.give(bucketer, 1, 2)
        self.expect_sent("R172", 2, when="for the first input")
        self.give(bucketer, 2, 1)
        self.expect_sent("R172", 1, when="for the second input")
        self.finish(bucketer, flush=False)
        self.expect_called("R172", 1, 2, when="without a flush")
        self.check_sums("R172", {1: (2,), 2: (1,)})
        self.finish(bucketer)
        self.expect_sent("R172", when="at the flush")


class Order(Bucketing):
    """The order of sending."""

    @conformance_case(
        "R173",
        chapter="AB",
        axes={"world_size": (2, 4)},
        needs=("bucketing",),
        kills=(
            "large-input-flushes",
            "large-input-drops-pending",
            "large-input-waits",
            "flat-results",
            "next-ranks-shard",
        ),
    )
    def test_large_input_overtakes(self, world_size: int) -> None:
        """An input larger than the capacity is reduced immediately and calls back, while smaller ones keep waiting."""
        bucketer = self.start(8)
        self.give(bucketer, 1, 3)
        self.give(bucketer, 2, 9)
        self.expect_sent("R173", 9, when="for a large input behind a small one")
        self.finish(bucketer, flush=False)
        self.expect_called("R173", 2, when="before the flush")
        self.give(bucketer, 3, 2, 2)
        self.expect_sent("R173", when="for a small input behind the large one")
        self.finish(bucketer)
        self.expect_sent("R173", 7, when="at the flush")
        self.expect_called("R173", 2, 1, 3, when="after the flush")
        self.check_sums("R173", {1: (3,), 2: (9,), 3: (2, 2)})

    @conformance_case(
        "R174",
        chapter="AB",
        axes={"world_size": (2, 3)},
        needs=("bucketing",),
        kills=("flushes-when-full", "places-then-flushes"),
    )
    def test_flush_before_placing(self, world_size: int) -> None:
        """
        An input that just fits is stored and waits for the next call; if there is not enough room, what is waiting is
        flushed first and the input waits alone.
        """
        bucketer = self.start(8)
        self.give(bucketer, 1, 5)
        self.give(bucketer, 2, 3)
        self.expect_sent("R174", when="when the bucket is exactly full")
        self.give(bucketer, 3, 1)
        self.expect_sent("R174", 8, when="for one more element")
        self.give(bucketer, 4, 8)
        self.expect_sent("R174", 1, when="for an input that fills a bucket by itself")
        self.finish(bucketer)
        self.expect_sent("R174", 8, when="at the flush")
        self.expect_called("R174", 1, 2, 3, 4, when="at the end")
        self.check_sums("R174", {1: (5,), 2: (3,), 3: (1,), 4: (8,)})


class Separation(Bucketing):
    """Inputs that must stay separate."""

    @conformance_case(
        "R175",
        chapter="AB",
        axes={"world_size": (2, 4)},
        needs=("bucketing",),
        kills=("one-bucket-for-equal-groups", "one-bucket-for-dtypes", "result-buffer-reused"),
    )
    def test_separate_buckets(self, world_size: int) -> None:
        """Each dtype and each group, even of the same ranks, has its own bucket, in the order of first use."""
        other = dist.new_group(list(range(world_size)))
        bucketer = self.start(64)
        self.give(bucketer, 1, 3)
        self.give(bucketer, 2, 5, dtype=torch.float64)
        self.give(bucketer, 3, 7, group=other)
        self.give(bucketer, 4, 2)
        self.expect_sent("R175", when="while they wait")
        self.finish(bucketer)
        self.expect_sent("R175", 5, 10, 7, when="at the flush")  # 5 elements of 8 bytes count as 10 of 4
        self.expect_called("R175", 1, 4, 2, 3, when="at the end")
        shapes = {1: (3,), 2: (5,), 3: (7,), 4: (2,)}
        for tag, result in self.results:
            expected = self.sum_of(tag, shapes[tag], torch.float64 if tag == 2 else torch.float32)
            self.check_equal("R175", result, expected, check="this rank's sum", fqn=f"input {tag}")

    @conformance_case(
        "R175", chapter="AB", world_size=4, needs=("bucketing",), kills=("one-bucket-for-equal-groups", "called-twice")
    )
    def test_subgroups(self) -> None:
        """An input for a subgroup is summed over that subgroup only."""
        pairs = [dist.new_group([0, 1]), dist.new_group([2, 3])]
        crossed = [dist.new_group([0, 2]), dist.new_group([1, 3])]
        bucketer = self.start(64)
        for tag, group in enumerate((pairs[self.rank // 2], crossed[self.rank % 2])):
            rows = [position_code((3,), first=100 * target + 1) * 2**self.rank for target in range(2)]
            with self.blaming("implementation"):
                bucketer.reduce_scatter([row.to(self.device) for row in rows], group, self.note(tag))
        self.finish(bucketer)
        self.expect_called("R175", 0, 1, when="at the end")
        partners = {0: self.rank ^ 1, 1: self.rank ^ 2}
        for tag, result in self.results:
            place = int(self.rank > partners[tag])
            expected = position_code((3,), first=100 * place + 1) * (2**self.rank + 2 ** partners[tag])
            self.check_equal("R175", result, expected, check="sum over a subgroup", fqn=f"input {tag}")

    @conformance_case(
        "R175",
        chapter="AB",
        axes={"world_size": (2, 3, 4)},
        needs=("bucketing",),
        kills=("callbacks-reversed", "next-ranks-shard", "result-buffer-reused", "called-twice", "flat-results"),
    )
    def test_results(self, world_size: int) -> None:
        """
        Callbacks run once each, first in, first out; each receives its rank's shard in the shape of its input, and the
        shard stays valid after later flushes and teardown.
        """
        bucketer = self.start(16)
        shapes: dict[int, tuple[int, ...]] = {1: (3,), 2: (2, 2), 3: (), 4: (3, 7), 5: (3,), 6: (2, 2)}
        for tag in (1, 2, 3):
            self.give(bucketer, tag, *shapes[tag])
        self.finish(bucketer)
        self.check_sums("R175", shapes)
        for tag in (4, 5, 6):
            self.give(bucketer, tag, *shapes[tag])
        self.finish(bucketer)
        with self.blaming("implementation"):
            bucketer.teardown()
        self.expect_called("R175", *shapes, when="at the end")
        self.check_sums("R175", shapes)

    @conformance_case("R175", chapter="AB", world_size=2, needs=("bucketing",), kills=("rows-flattened-by-memory",))
    def test_strides(self) -> None:
        """Non-contiguous inputs are summed by element, not by memory layout."""
        bucketer = self.start(16)
        for tag, shape in ((1, (2, 3)), (2, (5, 4))):
            rows = [row.t().contiguous().t() for row in self.inputs(tag, shape)]
            with self.blaming("implementation"):
                bucketer.reduce_scatter(rows, None, self.note(tag))
        self.finish(bucketer)
        self.expect_equal("R175", "callbacks", len(self.results), 2)
        self.check_sums("R175", {1: (2, 3), 2: (5, 4)})


class Edges(Bucketing):
    """Misuse, and edge cases of inputs."""

    @conformance_case(
        "R176",
        chapter="AB",
        axes={"length": ("short", "long"), "world_size": (2,)},
        needs=("bucketing",),
        kills=("any-length-accepted", "called-twice", "next-ranks-shard"),
    )
    def test_wrong_length(self, length: str, world_size: int) -> None:
        """A list with more or fewer inputs than ranks is rejected."""
        bucketer = self.start(16)
        inputs = self.inputs(1, (3,))
        wrong = inputs[:-1] if length == "short" else [*inputs, inputs[0]]
        with (
            self.refusal("R176", f"{len(wrong)} inputs for {world_size} ranks", names=("inputs", "tensors", "list")),
            self.blaming("implementation"),
        ):
            bucketer.reduce_scatter(wrong, None, self.note(1))
        self.give(bucketer, 2, 3)
        self.finish(bucketer)
        self.expect_called("R176", 2, when="at the end")
        self.check_sums("R176", {2: (3,)})

    @conformance_case("R176", chapter="AB", world_size=2, needs=("bucketing",), kills=("teardown-drops-pending",))
    def test_teardown_with_pending(self) -> None:
        """Teardown raises while inputs are pending, and they are not lost."""
        bucketer = self.start(16)
        self.give(bucketer, 1, 3)
        with (
            self.refusal("R176", "teardown with pending data", names=("pending", "waiting", "flush")),
            self.blaming("implementation"),
        ):
            bucketer.teardown()
        self.finish(bucketer)
        self.expect_called("R176", 1, when="after the flush")
        self.check_sums("R176", {1: (3,)})

    @conformance_case(
        "R176",
        chapter="AB",
        world_size=2,
        needs=("bucketing",),
        kills=("empty-flush-communicates", "teardown-is-final"),
    )
    def test_empty_flush_and_setup(self) -> None:
        """An empty flush communicates nothing, and after teardown and setup the bucketer works as before."""
        bucketer = self.start(16)
        self.finish(bucketer)
        self.expect_sent("R176", when="for an empty flush")
        for tag in (1, 2):
            self.give(bucketer, tag, 3)
            self.finish(bucketer)
            self.finish(bucketer)
            self.expect_sent("R176", 3, when=f"for input {tag}, flushed twice")
            with self.blaming("implementation"):
                bucketer.teardown()
                bucketer.setup()
        self.expect_called("R176", 1, 2, when="at the end")
        self.check_sums("R176", {1: (3,), 2: (3,)})

    @conformance_case("R176", chapter="AB", world_size=2, needs=("bucketing",), kills=("empty-input-forgotten",))
    def test_empty_input(self) -> None:
        """An input without elements gets one callback with an empty tensor of its shape."""
        bucketer = self.start(16)
        self.give(bucketer, 1, 0, 3)
        self.finish(bucketer)
        self.give(bucketer, 2, 3)
        self.give(bucketer, 3, 0)
        self.finish(bucketer)
        self.expect_called("R176", 1, 2, 3, when="at the end")
        self.check_sums("R176", {1: (0, 3), 2: (3,), 3: (0,)})

    @conformance_case("R176", chapter="AB", world_size=2, needs=("bucketing",), kills=("lost-from-callbacks",))
    def test_callback_enqueues(self) -> None:
        """An input that a callback passes to the bucketer is reduced by the next flush, like any other."""
        bucketer = self.start(16)

        def enqueue(result: Tensor) -> None:
            self.results.append((1, result))
            bucketer.reduce_scatter(self.inputs(3, (4,)), None, self.note(3))

        with self.blaming("implementation"):
            bucketer.reduce_scatter(self.inputs(1, (3,)), None, enqueue)
        self.give(bucketer, 2, 5)
        self.finish(bucketer)
        self.expect_called("R176", 1, 2, when="after the first flush")
        self.finish(bucketer)
        self.expect_called("R176", 1, 2, 3, when="after the second flush")
        self.check_sums("R176", {1: (3,), 2: (5,), 3: (4,)})
