"""AC. Chunks in a memory pool: flat storage in shards, gathered into blocks that return to the pool."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence

import torch
from torch import Tensor

from fsdp_conformance.adapters.components import TENSOR_STATES, ChunkPool, ChunkStorage, PoolUse
from fsdp_conformance.cases.base import ConformanceTestCase
from fsdp_conformance.cases.declaration import conformance_case
from fsdp_conformance.checks.result import comparison
from fsdp_conformance.fixtures.coded import position_code
from fsdp_conformance.harness.recording import process_group
from fsdp_conformance.history.collective import Op

#: Three tensors of 6, 4 and 1 elements: 11 in a chunk of 24, which 1 to 4 ranks divide.
SHAPES: tuple[tuple[int, ...], ...] = ((2, 3), (4,), ())
USED, NUMEL = 11, 24

#: The legal next states. A tensor that is used again returns from "hold_after_bwd" to "compute".
LEGAL = {
    "free": {"hold", "compute"},
    "hold": {"free", "compute"},
    "compute": {"hold", "hold_after_bwd"},
    "hold_after_bwd": {"compute", "ready_for_reduce"},
    "ready_for_reduce": {"hold"},
}

#: Legal paths from "hold", the initial state.
WAYS: dict[str, tuple[str, ...]] = {
    "hold": (),
    "free": ("free",),
    "compute": ("compute",),
    "hold_after_bwd": ("compute", "hold_after_bwd"),
    "ready_for_reduce": ("compute", "hold_after_bwd", "ready_for_reduce"),
}


class Chunks(ConformanceTestCase):
    """Shared parts of the cases below."""

    def pool(self, num_blocks: int = 2, numel: int = NUMEL) -> ChunkPool:
        """A pool on this rank's device."""
        adapter = self.subject()
        with self.blaming("implementation"):
            return adapter.chunk_pool(num_blocks, numel, torch.float32, self.device)

    def filled(self, pool: ChunkPool, first: int = 1, shapes: Sequence[Sequence[int]] = SHAPES) -> ChunkStorage:
        """A closed chunk of coded tensors."""
        with self.blaming("implementation"):
            chunk = pool.chunk(NUMEL, torch.float32)
            for tensor in self.tensors(first, shapes):
                chunk.append(tensor)
            chunk.close()
        return chunk

    def tensors(self, first: int = 1, shapes: Sequence[Sequence[int]] = SHAPES) -> list[Tensor]:
        """The coded tensors: first, first + 1, ... continued through all of them."""
        numels = [torch.Size(shape).numel() for shape in shapes]
        begins = itertools.accumulate(numels, initial=first)
        return [position_code(shape, first=begin).to(self.device) for shape, begin in zip(shapes, begins, strict=False)]

    def shard_of(self, factor: float = 1, first: int = 1, used: int = USED, numel: int = NUMEL) -> Tensor:
        """This rank's shard of the coded tensors times `factor`, padded with zeros."""
        whole = torch.cat([position_code((used,), first=first) * factor, torch.zeros(numel - used)])
        return whole.chunk(self.world_size)[self.rank]

    def check_values(self, requirement: str, chunk: ChunkStorage, first: int = 1) -> None:
        """The gathered tensors have their values and shapes."""
        with self.blaming("implementation"):
            values = list(chunk.values)
        self.expect_equal(requirement, "tensors", len(values), len(SHAPES))
        for index, (got, expected) in enumerate(zip(values, self.tensors(first), strict=False)):
            self.check_equal(requirement, got, expected.cpu(), check="gathered values", fqn=f"tensor {index}")

    def expect_use(self, requirement: str, pool: ChunkPool, free: int, used: int, *, when: str) -> None:
        """This many blocks are free and in use."""
        with self.blaming("implementation"):
            got = PoolUse(*pool.use())
        self.expect_equal(requirement, f"blocks {when}", got, PoolUse(free, used), check=when)

    def go(self, chunk: ChunkStorage, *states: str, count: int = len(SHAPES)) -> None:
        """Move every tensor through these states."""
        with self.blaming("implementation"):
            for state in states:
                for index in range(count):
                    chunk.move(index, state)

    def reduced(self, chunk: ChunkStorage, gradients: Sequence[Tensor]) -> Tensor:
        """This rank's shard of the reduction of these gradients."""
        with self.blaming("implementation"):
            chunk.put_gradients(list(gradients))
        self.go(chunk, *WAYS["ready_for_reduce"])
        with self.blaming("implementation"):
            return chunk.reduce()

    def own_gradients(self, factor: float = 1) -> list[Tensor]:
        """Encoded by rank: the mean over ranks is the position code times 2**ranks - 1, times `factor`."""
        return [tensor * (self.world_size * 2**self.rank * factor) for tensor in self.tensors()]


class Filling(Chunks):
    """Appending and closing."""

    @conformance_case(
        "R177",
        chapter="AC",
        axes={"world_size": (1, 2, 3, 4)},
        needs=("chunk_pool",),
        kills=("chunk-shows-copies-that-are-shifted", "padding-not-zeroed", "every-shard-full"),
    )
    def test_close(self, world_size: int) -> None:
        """
        Each rank keeps one shard, in the order of appending, padded with zeros; its valid length is the whole shard, a
        part of it, or zero.
        """
        with self.poisoned_allocations():
            pool = self.pool()
            chunk = self.filled(pool)
            with self.blaming("implementation"):
                shard, valid = chunk.shard, chunk.valid_numel
        size = NUMEL // world_size  # of 4 ranks: 6, 5, 0 and 0 elements are valid
        expected = min(max(USED - self.rank * size, 0), size)
        self.check_equal("R177", shard, self.shard_of(), check="shard")
        self.expect_equal("R177", "valid_numel", valid, expected)
        self.expect_use("R177", pool, 2, 0, when="after close")

    @conformance_case(
        "R177",
        chapter="AC",
        axes={"mistake": ("dtype", "room"), "world_size": (2,)},
        needs=("chunk_pool",),
        kills=lambda values: {
            "dtype": ["appends-other-dtypes"],
            "room": ["appends-what-fits", "refused-tensor-takes-room"],
        }[values["mistake"]],
    )
    def test_append_refused(self, mistake: str, world_size: int) -> None:
        """A tensor of another dtype, or one that does not fit, is rejected, and the chunk is unchanged."""
        pool = self.pool()
        with self.blaming("implementation"):
            chunk = pool.chunk(NUMEL, torch.float32)
            chunk.append(position_code((20,)).to(self.device))
        wrong = torch.ones(2, dtype=torch.float64) if mistake == "dtype" else torch.ones(5)
        with (
            self.refusal(
                "R177", f"a tensor with the wrong {mistake}", names=("dtype", "room", "element", "size", "fit")
            ),
            self.blaming("implementation"),
        ):
            chunk.append(wrong.to(self.device))
        with self.blaming("implementation"):
            chunk.append(position_code((4,), first=21).to(self.device))  # just fits
            chunk.close()
            shard = chunk.shard
        self.check_equal("R177", shard, self.shard_of(used=24), check="shard")

    @conformance_case("R177", chapter="AC", world_size=2, needs=("chunk_pool",), kills=("rounds-sizes-down",))
    def test_size_not_divisible(self) -> None:
        """A chunk size that is not a multiple of the group size is rejected."""
        pool = self.pool(numel=25)
        with (
            self.refusal("R177", "25 elements over 2 ranks", names=("divi", "multiple")),
            self.blaming("implementation"),
        ):
            pool.chunk(25, torch.float32)


class States(Chunks):
    """The current use of each tensor."""

    @conformance_case(
        "R178",
        chapter="AC",
        world_size=1,
        needs=("chunk_pool",),
        kills=(
            "parts-refuse-nothing",
            "used-once-only",
            "any-transition",
            "same-state-refused",
            "refused-moves-all-the-same",
        ),
    )
    def test_transitions(self) -> None:
        """Nine of the transitions between five states are legal, others are rejected, and staying is allowed."""
        chunk = self.filled(self.pool(), shapes=[(2,)])
        for begin, end in itertools.product(TENSOR_STATES, repeat=2):
            self.go(chunk, *WAYS[begin], count=1)
            legal = end in LEGAL[begin] or end == begin
            if legal:
                self._expect_moved(chunk, begin, end)
            else:
                with (
                    self.refusal("R178", f"from {begin} to {end}", names=("state", "transition", begin, end)),
                    self.blaming("implementation"),
                ):
                    chunk.move(0, end)
                self._expect_state(chunk, begin, f"after a rejected move to {end}")
            self._back_to_hold(chunk)

    def _expect_moved(self, chunk: ChunkStorage, begin: str, end: str) -> None:
        error: Exception | None = None
        try:
            chunk.move(0, end)
        except Exception as caught:  # noqa: BLE001 - a legal move that raises anything is a finding
            error = caught
        self.expect(error is None, "R178", f"the legal move from {begin} to {end} raised: {error}")
        if error is None:
            self._expect_state(chunk, end, f"after a move from {begin}")

    def _expect_state(self, chunk: ChunkStorage, state: str, when: str) -> None:
        with self.blaming("implementation"):
            got = chunk.state(0)
        self.expect_equal("R178", f"state {when}", got, state)

    def _back_to_hold(self, chunk: ChunkStorage) -> None:
        ways = {
            "hold": (),
            "free": ("hold",),
            "compute": ("hold",),
            "hold_after_bwd": ("ready_for_reduce", "hold"),
            "ready_for_reduce": ("hold",),
        }
        with self.blaming("implementation"):
            state = chunk.state(0)
        self.go(chunk, *ways[state], count=1)

    @conformance_case(
        "R178",
        chapter="AC",
        world_size=2,
        needs=("chunk_pool",),
        kills=(
            "parts-give-no-reasons",
            "releases-in-use",
        ),
    )
    def test_release_guarded(self) -> None:
        """A chunk can be released only when none of its tensors is in use."""
        pool = self.pool()
        chunk = self.filled(pool)
        with self.blaming("implementation"):
            chunk.access()
            chunk.move(1, "compute")
        with (
            self.refusal("R178", "tensor 1 is in use", names=("state", "in use", "tensor 1", "compute")),
            self.blaming("implementation"),
        ):
            chunk.release()
        self.check_values("R178", chunk)
        self.expect_use("R178", pool, 1, 1, when="after a rejected release")
        with self.blaming("implementation"):
            chunk.move(1, "hold")
            chunk.release()
        self.expect_use("R178", pool, 2, 0, when="after the release")

    @conformance_case("R178", chapter="AC", world_size=2, needs=("chunk_pool",), kills=("reduces-too-early",))
    def test_reduce_guarded(self) -> None:
        """A chunk can be reduced only when all of its tensors are ready."""
        chunk = self.filled(self.pool())
        with self.blaming("implementation"):
            chunk.access()
            chunk.put_gradients(self.own_gradients())
        self.go(chunk, "compute", "hold_after_bwd")
        self.go(chunk, "ready_for_reduce", count=2)
        with (
            self.refusal("R178", "tensor 2 is not ready", names=("state", "ready", "tensor 2")),
            self.blaming("implementation"),
        ):
            chunk.reduce()
        with self.blaming("implementation"):
            chunk.move(2, "ready_for_reduce")
            got = chunk.reduce()
        self.check_equal("R178", got, self.shard_of(2**self.world_size - 1), check="mean of the gradients")


class RoundTrips(Chunks):
    """Access, release and reduce."""

    @conformance_case(
        "R179",
        chapter="AC",
        axes={"world_size": (1, 2, 3, 4)},
        needs=("chunk_pool",),
        kills=("chunk-says-that-it-is-whole", "block-not-returned", "released-for-good"),
    )
    def test_access_and_release(self, world_size: int) -> None:
        """Gathered tensors have their values in every round, and the block goes back to the pool."""
        pool = self.pool()
        chunk, other = self.filled(pool), self.filled(pool, first=100)
        for _ in range(3):
            with self.blaming("implementation"):
                chunk.access()
            self.check_values("R179", chunk)
            self.expect_use("R179", pool, 1, 1, when="with one chunk gathered")
            with self.blaming("implementation"):
                other.access()
            self.check_values("R179", other, first=100)
            self.check_values("R179", chunk)
            with self.blaming("implementation"):
                chunk.release()
                other.release()
                gathered = chunk.is_unsharded or other.is_unsharded
            self.expect_equal("R179", "is_unsharded after release", gathered, False)
            self.expect_use("R179", pool, 2, 0, when="after the release")
            self.check_equal("R179", chunk.shard, self.shard_of(), check="shard after the release")

    @conformance_case(
        "R179",
        chapter="AC",
        world_size=2,
        needs=("chunk_pool",),
        kills=(
            "chunk-never-moves",
            "gathers-again",
        ),
    )
    def test_second_access(self) -> None:
        """A second access takes no block, communicates nothing, and does not change the values."""
        pool = self.pool()
        chunk = self.filled(pool)
        with self.blaming("implementation"):
            chunk.access()
            begin = len(process_group.log().records)
            chunk.access()
        issued = [record.line() for record in process_group.log().records[begin:]]
        self.expect_equal("R179", "collectives of a second access", issued, [])
        self.expect_use("R179", pool, 1, 1, when="after a second access")
        self.check_values("R179", chunk)

    @conformance_case(
        "R179",
        chapter="AC",
        axes={"world_size": (1, 2, 3, 4)},
        needs=("chunk_pool",),
        kills=("reduces-to-the-sum", "block-kept-after-reduce", "next-shard-of-gradients"),
    )
    def test_reduce(self, world_size: int) -> None:
        """Reduce returns this rank's shard of the mean, frees the block, and sets tensors to hold."""
        pool = self.pool()
        chunk = self.filled(pool)
        for factor in (1, 3):
            with self.blaming("implementation"):
                chunk.access()
            with self.poisoned_allocations():
                got = self.reduced(chunk, self.own_gradients(factor))
            expected = self.shard_of(factor * (2**world_size - 1))
            with self.blaming("implementation"):
                valid = chunk.valid_numel
                states = {chunk.state(index) for index in range(len(SHAPES))}
                gathered = chunk.is_unsharded
            self.check_equal("R179", got[:valid], expected[:valid], check="mean of the gradients")
            self.expect_equal("R179", "states after reduce", sorted(states), ["hold"])
            self.expect_equal("R179", "is_unsharded after reduce", gathered, False)
            self.expect_use("R179", pool, 2, 0, when="after reduce")
            self.check_equal("R179", chunk.shard, self.shard_of(), check="shard after reduce")

    @conformance_case("R179", chapter="AC", world_size=2, needs=("chunk_pool",), kills=("pool-grows",))
    def test_out_of_blocks(self) -> None:
        """Without a free block access is refused, chunks and counters are as before, and a release makes room."""
        pool = self.pool(num_blocks=1)
        chunk, other = self.filled(pool), self.filled(pool, first=100)
        with self.blaming("implementation"):
            chunk.access()
        with self.refusal("R179", "the only block is taken", names=("block", "pool")), self.blaming("implementation"):
            other.access()
        self.expect_use("R179", pool, 0, 1, when="after a refused access")
        self.check_values("R179", chunk)
        with self.blaming("implementation"):
            chunk.release()
            other.access()
        self.check_values("R179", other, first=100)


class Statistics(Chunks):
    """Norm and overflow of reduced gradients."""

    @conformance_case(
        "R180",
        chapter="AC",
        axes={"world_size": (2, 4)},
        needs=("chunk_pool",),
        kills=("chunk-doubles-everything", "norm-counts-padding", "norms-add-up", "norm-before-the-mean"),
    )
    def test_squared_norm(self, world_size: int) -> None:
        """The squared norm covers the valid elements of this rank's shard, from the last reduction only."""
        pool = self.pool()
        chunk = self.filled(pool)
        with (
            self.refusal("R180", "no reduction yet", names=("reduc", "norm", "statistics")),
            self.blaming("implementation"),
        ):
            chunk.statistics()
        for factor in (1, 2):
            self.reduced(chunk, self.own_gradients(factor))
            with self.blaming("implementation"):
                norm, overflow = chunk.statistics()
            expected = float(self.shard_of(factor * (2**world_size - 1)).square().sum())
            # Both are sums of integers below 2**24, squared after one root: six float32 digits are certain.
            message = comparison("squared_norm", expected=expected, got=norm)
            bound = "relative 1e-6: one root, squared, in float32"
            self.expect(math.isclose(norm, expected, rel_tol=1e-6), "R180", message, bound=bound)
            self.expect_equal("R180", "overflow", overflow, False, details="every element is finite")

    @conformance_case(
        "R180",
        chapter="AC",
        axes={"world_size": (2, 3)},
        needs=("chunk_pool",),
        kills=("total-of-one-rank", "total-of-one-chunk", "overflow-of-one-rank"),
    )
    def test_total_norm(self, world_size: int) -> None:
        """Summed over chunks and ranks, the squared norm is that of the whole mean gradient, on every rank."""
        pool = self.pool()
        chunks = [self.filled(pool), self.filled(pool, first=100)]
        for chunk, factor in zip(chunks, (1, 2), strict=True):
            self.reduced(chunk, self.own_gradients(factor))
        with self.blaming("implementation"):
            total = pool.statistics()
        # 1 + 4 + ... + 121 = 506, once with the mean's factor and once with twice that.
        expected = 506.0 * (1 + 4) * (2**world_size - 1) ** 2
        message = comparison("total squared_norm", expected=expected, got=total.squared_norm)
        bound = "relative 1e-6: a root of each part, squared, in float32"
        self.expect(math.isclose(total.squared_norm, expected, rel_tol=1e-6), "R180", message, bound=bound)
        self.expect_equal("R180", "overflow", total.overflow, False, details="every element is finite")

    @conformance_case(
        "R180",
        chapter="AC",
        axes={"value": ("inf", "nan"), "world_size": (2,)},
        needs=("chunk_pool",),
        kills=lambda values: {
            "inf": ["overflow-sticks", "overflow-of-one-rank"],
            "nan": ["overflow-sticks", "overflow-unseen"],
        }[values["value"]],
    )
    def test_overflow(self, value: str, world_size: int) -> None:
        """
        The rank that owns an infinite or NaN element reports an overflow, as does the total on every rank; the next
        reduction starts afresh.
        """
        pool = self.pool()
        chunk = self.filled(pool)
        for overflows in (True, False):
            gradients = self.own_gradients()
            if overflows and self.rank == 1:
                gradients[0][1, 2] = float(value)  # element 5, which rank 0 owns
            self.reduced(chunk, gradients)
            with self.blaming("implementation"):
                own, total = chunk.statistics().overflow, pool.statistics().overflow
            self.expect_equal("R180", "overflow of the shard", own, overflows and self.rank == 0)
            self.expect_equal("R180", "overflow of the total", total, overflows)


class Pool(Chunks):
    """Blocks and eviction."""

    @conformance_case(
        "R181",
        chapter="AC",
        world_size=1,
        needs=("chunk_pool",),
        kills=("parts-refuse-nothing", "miscounts-when-empty", "double-return-accepted", "untyped-blocks"),
    )
    def test_counters(self) -> None:
        """Blocks have the pool's size and dtype; leasing too many or returning one twice raises and changes nothing."""
        pool = self.pool()
        self.expect_use("R181", pool, 2, 0, when="at first")
        with self.blaming("implementation"):
            blocks = [pool.lease(), pool.lease()]
        for block in blocks:
            got = (block.payload.numel(), block.payload.dtype)
            self.expect_equal("R181", "block", got, (NUMEL, torch.float32))
        shared = blocks[0].payload.data_ptr() == blocks[1].payload.data_ptr()
        self.expect(not shared, "R181", "two blocks share their memory")
        self.expect_use("R181", pool, 0, 2, when="with both leased")
        with self.refusal("R181", "a third block of two", names=("block", "pool")), self.blaming("implementation"):
            pool.lease()
        self.expect_use("R181", pool, 0, 2, when="after a rejected lease")
        with self.blaming("implementation"):
            pool.give_back(blocks[0])
        self.expect_use("R181", pool, 1, 1, when="after one return")
        with self.refusal("R181", "a second return", names=("block", "pool")), self.blaming("implementation"):
            pool.give_back(blocks[0])
        self.expect_use("R181", pool, 1, 1, when="after a rejected return")
        with self.blaming("implementation"):
            foreign = self.pool().lease()
        with self.refusal("R181", "another pool's block", names=("block", "pool")), self.blaming("implementation"):
            pool.give_back(foreign)
        with self.blaming("implementation"):
            pool.lease()
        self.expect_use("R181", pool, 0, 2, when="at the end")

    @conformance_case(
        "R181",
        chapter="AC",
        axes={"policy": ("fifo", "next-use"), "world_size": (1, 2)},
        needs=("chunk_pool",),
        kills=lambda values: {
            "fifo": ["evicts-the-newest", "chunk-doubles-everything", "chunk-says-that-it-is-whole"],
            "next-use": ["evicts-the-nearest-use", "ignores-next-use"],
        }[values["policy"]],
    )
    def test_eviction(self, policy: str, world_size: int) -> None:
        """
        With room for two chunks, the oldest is evicted, or with a schedule the one whose next use is farthest away.
        """
        pool = self.pool()
        chunks = {name: self.filled(pool, first=100 * index) for index, name in enumerate("ABC")}
        # At C, A has been gathered for longer, and B is used again later than A. At the second B, A and C (or B and C)
        # are gathered, and of A and C only C is used again.
        uses = "ABCABC"
        expected = {"fifo": ["A", "AB", "BC", "AC", "AB", "BC"], "next-use": ["A", "AB", "AC", "AC", "BC", "BC"]}[
            policy
        ]
        with self.blaming("implementation"):
            pool.schedule([chunks[name] for name in uses] if policy == "next-use" else None)
        for place, name in enumerate(uses):
            begin = len(process_group.log().records)
            with self.blaming("implementation"):
                pool.compute(chunks[name])
                present = "".join(other for other in chunks if chunks[other].is_unsharded)
            what = f"gathered chunks after {uses[: place + 1]}"
            self.expect_equal("R181", what, present, expected[place], check="eviction")
            self.check_values("R181", chunks[name], first=100 * "ABC".index(name))
            gathers = [r for r in process_group.log().records[begin:] if r.op is Op.ALL_GATHER]
            missing = place == 0 or name not in expected[place - 1]
            self.expect_equal("R181", f"all-gathers for {name}", len(gathers), int(missing and world_size > 1))
