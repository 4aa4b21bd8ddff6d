"""Whole tensors out of a chunk and into it, and chunks in pairs: over the chunk's own group, and no other."""

from __future__ import annotations

import torch
from torch import Tensor

from fsdp_conformance.engine.chunks.config import ChunkConfig
from fsdp_conformance.engine.chunks.memory_pool import BlockKind
from fsdp_conformance.engine.chunks.state import ChunkState
from fsdp_conformance.engine.errors import ChunkError, ChunkStateError, TensorRefused
from fsdp_conformance.tests.engine.chunks.chunk_ranks import SHAPES, ChunkTestCase, coded, flat_of, padded, parameters


def other_values() -> list[Tensor]:
    """Values that are in no chunk of coded parameters."""
    return [-coded(index, shape) for index, shape in enumerate(SHAPES)]


class TransferTest(ChunkTestCase):
    """cpu_copy and load."""

    def groups_line(self) -> str:
        """This rank's pair, as the schedule writes it."""
        return "[0,1]" if self.rank < 2 else "[2,3]"

    def test_copies_of_sharded_and_unsharded_chunks(self) -> None:
        """
        Copies in the order of appending, whatever state the chunk is in and stays in. Sharded, one gather on its group
        and memory that is freed; unsharded, no collective. A kept copy keeps only itself alive.
        """
        pair = self.pair_group()
        chunk = self.chunk_of(group=pair)
        for state, schedule in ((ChunkState.SHARDED, 1), (ChunkState.UNSHARDED, 0)):
            self.schedule()
            copies = chunk.cpu_copy()
            self.assertEqual([f"all_gather 128B float32 {self.groups_line()}"] * schedule, self.schedule())
            self.assertIs(state, chunk.state)
            for index, (copy, shape) in enumerate(zip(copies, SHAPES, strict=True)):
                assert copy is not None
                self.assert_equal(coded(index, shape), copy)
                self.assertEqual(copy.numel() * 4, copy.untyped_storage().nbytes())
            chunk.access()

    def test_a_copy_is_no_view(self) -> None:
        """Writing to the unsharded tensors later does not change it."""
        chunk = self.chunk_of(group=self.own_group(), alias_whole=True)
        chunk.access()
        (first, *_) = chunk.cpu_copy()
        with torch.no_grad():
            chunk.views[0].zero_()
        assert first is not None

        self.assert_equal(coded(0, SHAPES[0]), first)

    def test_only_the_first_rank_of_the_group(self) -> None:
        """Rank 2 is the first of its pair, and gets the copies; the others get None for each."""
        chunk = self.chunk_of(group=self.pair_group())
        copies = chunk.cpu_copy(only_rank_0=True)

        if self.rank in (0, 2):
            self.assertEqual(
                [torch.Size(shape) for shape in SHAPES], [copy.shape for copy in copies if copy is not None]
            )
        else:
            self.assertEqual([None] * 5, copies)

    def test_copies_have_the_dtype_of_the_shard(self) -> None:
        """Though unsharded in bfloat16: 257 is copied as 257."""
        tensors = [torch.nn.Parameter(torch.full((5,), 257.0))]
        chunk = self.chunk_of(tensors, compute_dtype=torch.bfloat16)
        chunk.access()
        (copy,) = chunk.cpu_copy()
        assert copy is not None

        self.assert_equal(torch.full((5,), 257.0), copy)
        self.assertEqual(256.0, chunk.views[0][0].item())

    def test_load(self) -> None:
        """Every rank's part is written, cast; None leaves a tensor as it is; nothing is sent."""
        chunk = self.chunk_of()
        values = other_values()
        self.schedule()
        chunk.load([values[0].double(), None, values[2], values[3].transpose(0, 2).contiguous().transpose(0, 2), None])
        self.assertEqual([], self.schedule())
        expected = [values[0], coded(1, SHAPES[1]), values[2], values[3], coded(4, SHAPES[4])]

        self.assert_equal(self.expected_shard(flat_of(expected, 32)), chunk.shard)

    def test_load_into_an_unsharded_chunk(self) -> None:
        """The tensors that are in use change too, and so does what the next gather sends."""
        chunk = self.chunk_of()
        chunk.access()
        chunk.load(other_values())
        for index, shape in enumerate(SHAPES):
            self.assert_equal(-coded(index, shape), chunk.views[index])
        chunk.release()
        chunk.access()

        self.assert_equal(-coded(3, SHAPES[3]), chunk.views[3])

    def test_load_from_the_first_rank_of_the_group(self) -> None:
        """Rank 2's values reach rank 3, rank 0's reach rank 1, on their own groups; None of the first rank counts."""
        chunk = self.chunk_of(group=self.pair_group())
        values: list[Tensor | None] = [value * (1 + self.rank) for value in other_values()]
        self.schedule()
        chunk.load([None, *values[1:]] if self.rank % 2 == 0 else [], only_rank_0=True)

        self.assertEqual({self.groups_line()}, {line.split()[-1] for line in self.schedule()})
        factor = 1 if self.rank < 2 else 3
        expected = [coded(0, SHAPES[0]), *(value * factor for value in other_values()[1:])]
        self.assert_equal(self.expected_shard(flat_of(expected, 32), chunk.group), chunk.shard)

    def test_values_that_do_not_fit(self) -> None:
        """
        Shapes and numbers are checked before anything is written, all named; with the first rank's, on every rank.
        """
        chunk = self.chunk_of(group=self.pair_group())
        before = chunk.shard.clone()
        values = other_values()
        with self.assertRaisesRegex(TensorRefused, r"tensor 0 is \(5, 3\), but should be \(3, 5\).*tensor 1 is \(3,\)"):
            chunk.load([values[0].t(), torch.ones(3), *values[2:]])
        with self.assertRaisesRegex(TensorRefused, "4 tensors, but should be 5"):
            chunk.load(values[:4])
        with self.assertRaises(TensorRefused) as caught:
            chunk.load([torch.ones(1), *values[1:]] if self.rank % 2 == 0 else values, only_rank_0=True)
        text = "tensor 0 is (1,)" if self.rank % 2 == 0 else "the first rank refused its tensors"

        self.assertIn(text, str(caught.exception))
        self.assert_equal(before, chunk.shard)


class PartnerTest(ChunkTestCase):
    """Chunks in pairs."""

    def test_pairs_are_symmetric_and_for_good(self) -> None:
        """Made again it changes nothing; another partner, oneself, or another layout is refused."""
        low, master, other = (self.chunk_of() for _ in range(3))
        low.pair(master)
        low.pair(master)
        master.pair(low)
        self.assertEqual((master, low), (low.partner, master.partner))
        with self.assertRaisesRegex(ChunkError, "has the partner"):
            low.pair(other)
        with self.assertRaisesRegex(ChunkError, "should be another chunk with the same tensors"):
            other.pair(other)
        with self.assertRaisesRegex(ChunkError, "should be another chunk with the same tensors"):
            other.pair(self.chunk_of(parameters()[:4]))

        self.assertEqual((None, master), (other.partner, low.partner))

    def test_the_partner_is_sent_by_the_next_gather(self) -> None:
        """
        On the CPU an update is a note: the next gather sends the master's shard, cast; the release puts it into the own
        shard, and the gather after that sends this one.
        """
        low = self.chunk_of(parameters(dtype=torch.bfloat16))
        master = self.chunk_of(bind=False)
        low.pair(master)
        master.shard.mul_(-2)
        self.schedule()
        low.update_from_partner()
        self.assertTrue(low.stale)
        self.assertEqual([], self.schedule())
        low.access()

        self.assertEqual(["all_gather 64B bfloat16 [0,1,2,3]"], self.schedule())
        self.assert_equal(-2 * coded(0, SHAPES[0]).bfloat16(), low.tensors[0].detach())
        low.release()
        self.assertFalse(low.stale)
        self.assert_equal(self.expected_shard(-2 * flat_of(parameters(), 32)).bfloat16(), low.shard)
        master.shard.zero_()
        low.access()
        self.assert_equal(-2 * coded(3, SHAPES[3]).bfloat16(), low.tensors[3].detach())

    def test_an_update_while_unsharded(self) -> None:
        """What is unsharded is older than the update, and does not overwrite it: the next gather sends the master's."""
        low, master = self.chunk_of(parameters(dtype=torch.bfloat16)), self.chunk_of(bind=False)
        low.pair(master)
        low.access()
        master.shard.mul_(-2)
        low.update_from_partner()
        low.release()
        self.assertTrue(low.stale)
        low.access()

        self.assert_equal(-2 * coded(0, SHAPES[0]).bfloat16(), low.tensors[0].detach())

    def test_updates_that_cannot_be(self) -> None:
        """Without a partner, or with one that is unsharded: typed errors."""
        low, master = self.chunk_of(), self.chunk_of(bind=False)
        with self.assertRaisesRegex(ChunkError, "partner=None, but should be a chunk"):
            low.update_from_partner()
        low.pair(master)
        master.access()
        with self.assertRaisesRegex(ChunkStateError, "UNSHARDED, but should be SHARDED"):
            low.update_from_partner()
        master.release()
        master.shard_device = torch.device("meta")
        with self.assertRaisesRegex(ChunkError, "shards on cpu and meta, but should be on one type of device"):
            low.update_from_partner()

    def test_copies_and_loads_of_a_stale_chunk(self) -> None:
        """A copy shows the master's values; a load of some tensors keeps the master's of the others."""
        low, master = self.chunk_of(parameters(dtype=torch.bfloat16)), self.chunk_of(bind=False)
        low.pair(master)
        master.shard.mul_(-2)
        low.update_from_partner()
        copies = low.cpu_copy()
        assert copies[0] is not None
        self.assert_equal(-2 * coded(0, SHAPES[0]).bfloat16(), copies[0])
        low.load([torch.zeros(3, 5), None, None, None, None])
        expected = [torch.zeros(3, 5), *(-2 * coded(index, SHAPES[index]) for index in range(1, 5))]

        self.assertFalse(low.stale)
        self.assert_equal(self.expected_shard(flat_of(expected, 32)).bfloat16(), low.shard)

    def test_a_fused_pair(self) -> None:
        """A fused chunk, which is never released, follows its partner after every reduction."""
        low = self.chunk_of(block=BlockKind.PRIVATE)
        master = self.chunk_of(bind=False)
        low.pair(master)
        for factor in (2, 3):
            low.access()
            low.states.reset()
            for state in ("COMPUTE", "HOLD_AFTER_BWD", "READY_FOR_REDUCE"):
                low.move_all(type(low.states[0])[state])
            low.reduce()
            master.shard.copy_(self.expected_shard(flat_of(parameters(), padded(4)) * factor))
            low.update_from_partner()
            low.access()
            self.assert_equal(coded(0, SHAPES[0]) * factor, low.tensors[0].detach())
        self.assertEqual(ChunkConfig(block=BlockKind.PRIVATE), low.config)
