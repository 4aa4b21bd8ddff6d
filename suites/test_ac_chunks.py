"""AC. Chunks in a memory pool: flat storage in shards, gathered into blocks that are given back."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence

import torch
from torch import Tensor

from fsdp_conformance.adapters.components import TENSOR_STATES, ChunkPool, ChunkStorage, PoolUse
from fsdp_conformance.case import conformance_case
from fsdp_conformance.fixtures.coded import position_code
from fsdp_conformance.harness.recording import process_group
from fsdp_conformance.history.collective import Op
from fsdp_conformance.testing import ConformanceTestCase

#: Three tensors of 6, 4 and 1 elements: 11 in a chunk of 24, which 1 to 4 ranks divide.
SHAPES: tuple[tuple[int, ...], ...] = ((2, 3), (4,), ())
USED, NUMEL = 11, 24

#: From each state, the legal ones. A tensor that is used again goes back from "hold_after_bwd" to "compute".
LEGAL = {
    "free": {"hold", "compute"},
    "hold": {"free", "compute"},
    "compute": {"hold", "hold_after_bwd"},
    "hold_after_bwd": {"compute", "ready_for_reduce"},
    "ready_for_reduce": {"hold"},
}

#: Legal ways from "hold", where tensors begin.
WAYS: dict[str, tuple[str, ...]] = {
    "hold": (),
    "free": ("free",),
    "compute": ("compute",),
    "hold_after_bwd": ("compute", "hold_after_bwd"),
    "ready_for_reduce": ("compute", "hold_after_bwd", "ready_for_reduce"),
}


class Chunks(ConformanceTestCase):
    """What the cases below have in common."""

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
        """The coded tensors: first, first + 1, ... through all of them."""
        numels = [torch.Size(shape).numel() for shape in shapes]
        begins = itertools.accumulate(numels, initial=first)
        return [position_code(shape, first=begin).to(self.device) for shape, begin in zip(shapes, begins, strict=False)]

    def shard_of(self, factor: float = 1, first: int = 1, used: int = USED, numel: int = NUMEL) -> Tensor:
        """This rank's part of the coded tensors times `factor`, then zeros."""
        whole = torch.cat([position_code((used,), first=first) * factor, torch.zeros(numel - used)])
        return whole.chunk(self.world_size)[self.rank]

    def check_values(self, requirement: str, chunk: ChunkStorage, first: int = 1) -> None:
        """While it is gathered, the tensors are there in their shapes."""
        with self.blaming("implementation"):
            values = list(chunk.values)
        self.expect(len(values) == len(SHAPES), requirement, f"{len(values)} tensors, but should be {len(SHAPES)}")
        for index, (got, expected) in enumerate(zip(values, self.tensors(first), strict=False)):
            self.check_equal(requirement, got, expected.cpu(), check="gathered values", fqn=f"tensor {index}")

    def expect_use(self, requirement: str, pool: ChunkPool, free: int, used: int, *, when: str) -> None:
        """So many blocks are free, and so many are not."""
        with self.blaming("implementation"):
            got = PoolUse(*pool.use())
        self.expect(got == (free, used), requirement, f"{got} {when}, but should be {PoolUse(free, used)}", check=when)

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
        """Coded by rank: the mean over ranks is the position code times 2**ranks - 1, times `factor`."""
        return [tensor * (self.world_size * 2**self.rank * factor) for tensor in self.tensors()]


class Filling(Chunks):
    """Appending and closing."""

    @conformance_case(
        "R177",
        chapter="AC",
        axes={"world_size": (1, 2, 3, 4)},
        needs=("chunk_pool",),
        kills=("padding-not-zeroed", "every-shard-full"),
    )
    def test_close(self, world_size: int) -> None:
        """
        Each rank keeps one shard, in the order of appending, with zeros behind the tensors; its valid length is the
        whole shard, a part, or zero.
        """
        with self.poisoned_allocations():
            pool = self.pool()
            chunk = self.filled(pool)
            with self.blaming("implementation"):
                shard, valid = chunk.shard, chunk.valid_numel
        size = NUMEL // world_size  # of 4 ranks: 6, 5, 0 and 0 elements are valid
        expected = min(max(USED - self.rank * size, 0), size)
        self.check_equal("R177", shard, self.shard_of(), check="shard")
        self.expect(valid == expected, "R177", f"valid_numel={valid}, but should be {expected}")
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
        """A tensor of another dtype, or one that does not fit, is refused, and the chunk is as before."""
        pool = self.pool()
        with self.blaming("implementation"):
            chunk = pool.chunk(NUMEL, torch.float32)
            chunk.append(position_code((20,)).to(self.device))
        wrong = torch.ones(2, dtype=torch.float64) if mistake == "dtype" else torch.ones(5)
        with self.refusal("R177", f"another {mistake} than the chunk's"), self.blaming("implementation"):
            chunk.append(wrong.to(self.device))
        with self.blaming("implementation"):
            chunk.append(position_code((4,), first=21).to(self.device))  # just fits
            chunk.close()
            shard = chunk.shard
        self.check_equal("R177", shard, self.shard_of(used=24), check="shard")

    @conformance_case("R177", chapter="AC", world_size=2, needs=("chunk_pool",), kills=("rounds-sizes-down",))
    def test_size_not_divisible(self) -> None:
        """A chunk whose size the group does not divide is refused."""
        pool = self.pool(numel=25)
        with self.refusal("R177", "25 elements over 2 ranks"), self.blaming("implementation"):
            pool.chunk(25, torch.float32)


class States(Chunks):
    """What a tensor is being used for."""

    @conformance_case(
        "R178",
        chapter="AC",
        world_size=1,
        needs=("chunk_pool",),
        kills=("used-once-only", "any-transition", "same-state-refused", "refused-moves-all-the-same"),
    )
    def test_transitions(self) -> None:
        """Of the moves between five states nine are legal, others are refused, and the same state is no move."""
        chunk = self.filled(self.pool(), shapes=[(2,)])
        for begin, end in itertools.product(TENSOR_STATES, repeat=2):
            self.go(chunk, *WAYS[begin], count=1)
            legal = end in LEGAL[begin] or end == begin
            if legal:
                self._expect_moved(chunk, begin, end)
            else:
                with self.refusal("R178", f"from {begin} to {end}"), self.blaming("implementation"):
                    chunk.move(0, end)
                self._expect_state(chunk, begin, f"after a refused move to {end}")
            self._back_to_hold(chunk)

    def _expect_moved(self, chunk: ChunkStorage, begin: str, end: str) -> None:
        error: Exception | None = None
        try:
            chunk.move(0, end)
        except Exception as caught:  # noqa: BLE001 - a legal move that raises is a finding, whatever it raises
            error = caught
        self.expect(error is None, "R178", f"{begin} to {end} was refused, but is legal: {error}")
        if error is None:
            self._expect_state(chunk, end, f"after a move from {begin}")

    def _expect_state(self, chunk: ChunkStorage, state: str, when: str) -> None:
        with self.blaming("implementation"):
            got = chunk.state(0)
        self.expect(got == state, "R178", f"state={got} {when}, but should be {state}")

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

    @conformance_case("R178", chapter="AC", world_size=2, needs=("chunk_pool",), kills=("releases-in-use",))
    def test_release_guarded(self) -> None:
        """A chunk is scattered only when none of its tensors is in use."""
        pool = self.pool()
        chunk = self.filled(pool)
        with self.blaming("implementation"):
            chunk.access()
            chunk.move(1, "compute")
        with self.refusal("R178", "tensor 1 is in use"), self.blaming("implementation"):
            chunk.release()
        self.check_values("R178", chunk)
        self.expect_use("R178", pool, 1, 1, when="after a refused release")
        with self.blaming("implementation"):
            chunk.move(1, "hold")
            chunk.release()
        self.expect_use("R178", pool, 2, 0, when="after the release")

    @conformance_case("R178", chapter="AC", world_size=2, needs=("chunk_pool",), kills=("reduces-too-early",))
    def test_reduce_guarded(self) -> None:
        """A chunk is reduced only when all of its tensors are ready."""
        chunk = self.filled(self.pool())
        with self.blaming("implementation"):
            chunk.access()
            chunk.put_gradients(self.own_gradients())
        self.go(chunk, "compute", "hold_after_bwd")
        self.go(chunk, "ready_for_reduce", count=2)
        with self.refusal("R178", "tensor 2 is not ready"), self.blaming("implementation"):
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
        kills=("block-not-returned", "released-for-good"),
    )
    def test_access_and_release(self, world_size: int) -> None:
        """Gathered tensors have their values, in every round; the block is taken from the pool, and comes back."""
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
            self.expect(not gathered, "R179", "a chunk is gathered after its release, but should be sharded")
            self.expect_use("R179", pool, 2, 0, when="after the release")
            self.check_equal("R179", chunk.shard, self.shard_of(), check="shard after the release")

    @conformance_case("R179", chapter="AC", world_size=2, needs=("chunk_pool",), kills=("gathers-again",))
    def test_second_access(self) -> None:
        """A second access takes no block, communicates nothing, and leaves the values as they are."""
        pool = self.pool()
        chunk = self.filled(pool)
        with self.blaming("implementation"):
            chunk.access()
            begin = len(process_group.log().records)
            chunk.access()
        issued = [record.line() for record in process_group.log().records[begin:]]
        self.expect(not issued, "R179", f"a second access issued {issued}, but should issue nothing")
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
        """Reduce gives this rank's shard of the mean and zeros behind it, returns the block, and tensors hold again."""
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
            self.expect(states == {"hold"}, "R179", f"states={sorted(states)} after reduce, but should be hold")
            self.expect(not gathered, "R179", "the chunk is gathered after reduce, but should be sharded")
            self.expect_use("R179", pool, 2, 0, when="after reduce")
            self.check_equal("R179", chunk.shard, self.shard_of(), check="shard after reduce")

    @conformance_case("R179", chapter="AC", world_size=2, needs=("chunk_pool",), kills=("pool-grows",))
    def test_out_of_blocks(self) -> None:
        """Without a free block access is refused, chunks and counters are as before, and a release makes room."""
        pool = self.pool(num_blocks=1)
        chunk, other = self.filled(pool), self.filled(pool, first=100)
        with self.blaming("implementation"):
            chunk.access()
        with self.refusal("R179", "the only block is taken"), self.blaming("implementation"):
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
        kills=("norm-counts-padding", "norms-add-up", "norm-before-the-mean"),
    )
    def test_squared_norm(self, world_size: int) -> None:
        """The squared norm is that of the valid elements of this rank's shard, of the last reduction alone."""
        pool = self.pool()
        chunk = self.filled(pool)
        with self.refusal("R180", "no reduction yet"), self.blaming("implementation"):
            chunk.statistics()
        for factor in (1, 2):
            self.reduced(chunk, self.own_gradients(factor))
            with self.blaming("implementation"):
                norm, overflow = chunk.statistics()
            expected = float(self.shard_of(factor * (2**world_size - 1)).square().sum())
            # Both are sums of integers below 2**24 squared and rooted once: six float32 digits are sure.
            self.expect(
                math.isclose(norm, expected, rel_tol=1e-6),
                "R180",
                f"squared_norm={norm}, but should be {expected}",
                bound="relative 1e-6: one root, squared, in float32",
            )
            self.expect(not overflow, "R180", "overflow=True, but every element is finite")

    @conformance_case(
        "R180",
        chapter="AC",
        axes={"world_size": (2, 3)},
        needs=("chunk_pool",),
        kills=("total-of-one-rank", "total-of-one-chunk"),
    )
    def test_total_norm(self, world_size: int) -> None:
        """Over chunks and ranks the squared norms add up to that of the whole mean gradient, on every rank."""
        pool = self.pool()
        chunks = [self.filled(pool), self.filled(pool, first=100)]
        for chunk, factor in zip(chunks, (1, 2), strict=True):
            self.reduced(chunk, self.own_gradients(factor))
        with self.blaming("implementation"):
            total = pool.statistics()
        # 1 + 4 + ... + 121 = 506, once with the mean's factor and once with twice that.
        expected = 506.0 * (1 + 4) * (2**world_size - 1) ** 2
        self.expect(
            math.isclose(total.squared_norm, expected, rel_tol=1e-6),
            "R180",
            f"squared_norm={total.squared_norm} of all, but should be {expected}",
            bound="relative 1e-6: a root of each part, squared, in float32",
        )
        self.expect(not total.overflow, "R180", "overflow=True, but every element is finite")

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
        An infinite or undefined element is seen by the rank that owns it, and by all in the total; the next reduction
        begins anew.
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
            expected = overflows and self.rank == 0
            self.expect(own == expected, "R180", f"overflow={own} of the shard, but should be {expected}")
            self.expect(total == overflows, "R180", f"overflow={total} of all, but should be {overflows}")


class Pool(Chunks):
    """Blocks, and who has to leave."""

    @conformance_case(
        "R181",
        chapter="AC",
        world_size=1,
        needs=("chunk_pool",),
        kills=("miscounts-when-empty", "double-return-accepted", "untyped-blocks"),
    )
    def test_counters(self) -> None:
        """Blocks have their size and dtype; a request for too much and a second return raise and count nothing."""
        pool = self.pool()
        self.expect_use("R181", pool, 2, 0, when="at first")
        with self.blaming("implementation"):
            blocks = [pool.lease(), pool.lease()]
        for block in blocks:
            got = (block.payload.numel(), block.payload.dtype)
            self.expect(got == (NUMEL, torch.float32), "R181", f"block {got}, but should be {(NUMEL, torch.float32)}")
        shared = blocks[0].payload.data_ptr() == blocks[1].payload.data_ptr()
        self.expect(not shared, "R181", "two blocks have the same memory, but should have their own")
        self.expect_use("R181", pool, 0, 2, when="with both leased")
        with self.refusal("R181", "a third block of two"), self.blaming("implementation"):
            pool.lease()
        self.expect_use("R181", pool, 0, 2, when="after a refused lease")
        with self.blaming("implementation"):
            pool.give_back(blocks[0])
        self.expect_use("R181", pool, 1, 1, when="after one return")
        with self.refusal("R181", "a second return"), self.blaming("implementation"):
            pool.give_back(blocks[0])
        self.expect_use("R181", pool, 1, 1, when="after a refused return")
        with self.blaming("implementation"):
            foreign = self.pool().lease()
        with self.refusal("R181", "another pool's block"), self.blaming("implementation"):
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
            "fifo": ["evicts-the-newest"],
            "next-use": ["evicts-the-nearest-use", "ignores-next-use"],
        }[values["policy"]],
    )
    def test_eviction(self, policy: str, world_size: int) -> None:
        """
        With room for two chunks, the one that has been idle for longest leaves, or the one whose next use is farthest.
        """
        pool = self.pool()
        chunks = {name: self.filled(pool, first=100 * index) for index, name in enumerate("ABC")}
        # At C: A has been there for longer, and B is used again later than A. At the second B there are A and C (or
        # B and C), and of A and C only C is used again.
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
            message = f"{present} are gathered after {uses[: place + 1]}, but should be {expected[place]}"
            self.expect(present == expected[place], "R181", message, check="eviction")
            self.check_values("R181", chunks[name], first=100 * "ABC".index(name))
            gathers = [r for r in process_group.log().records[begin:] if r.op is Op.ALL_GATHER]
            missing = place == 0 or name not in expected[place - 1]
            wanted = int(missing and world_size > 1)
            self.expect(len(gathers) == wanted, "R181", f"{len(gathers)} gathers for {name}, but should be {wanted}")
