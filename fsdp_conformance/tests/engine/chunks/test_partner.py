"""Chunks in pairs: which shard the next gather sends, and when the own shard catches up."""

from __future__ import annotations

import torch

from fsdp_conformance.engine.chunks.chunk import ChunkConfig
from fsdp_conformance.engine.chunks.memory_pool import BlockKind
from fsdp_conformance.engine.errors import ChunkError, ChunkStateError
from fsdp_conformance.tests.engine.chunks.chunk_ranks import SHAPES, ChunkTestCase, coded, flat_of, padded, parameters


class PartnerTest(ChunkTestCase):
    """Tests of chunks in pairs."""

    def test_pairs_are_symmetric_and_for_good(self) -> None:
        """Made again it changes nothing; another partner, oneself, or another layout is refused."""
        low, master, other = (self.chunk_of() for _ in range(3))
        low.pair(master)
        low.pair(master)
        master.pair(low)
        self.assertEqual((master, low), (low.partner, master.partner))
        with self.assertRaisesRegex(ChunkError, "already has a partner"):
            low.pair(other)
        with self.assertRaisesRegex(ChunkError, "must be another chunk with the same tensors"):
            other.pair(other)
        with self.assertRaisesRegex(ChunkError, "must be another chunk with the same tensors"):
            other.pair(self.chunk_of(parameters()[:4]))

        self.assertEqual((None, master), (other.partner, low.partner))

    def test_the_partner_is_sent_by_the_next_gather(self) -> None:
        """
        On the CPU an update is a note: the next gather sends the master's shard, cast; the release puts it into the own
        shard, and the gather after that sends this one.
        """
        low = self.chunk_of(parameters(dtype=torch.bfloat16))
        master = self.chunk_of()
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
        """Unsharded data older than the update do not overwrite it: the next gather sends the master's."""
        low, master = self.chunk_of(parameters(dtype=torch.bfloat16)), self.chunk_of()
        low.pair(master)
        low.access()
        master.shard.mul_(-2)
        low.update_from_partner()
        low.release()
        self.assertTrue(low.stale)
        low.access()

        self.assert_equal(-2 * coded(0, SHAPES[0]).bfloat16(), low.tensors[0].detach())

    def test_updates_that_cannot_be(self) -> None:
        """An update without a partner, or with one that is unsharded, raises a typed error."""
        low, master = self.chunk_of(), self.chunk_of()
        with self.assertRaisesRegex(ChunkError, "the chunk has no partner: pair it first"):
            low.update_from_partner()
        low.pair(master)
        master.access()
        with self.assertRaisesRegex(ChunkStateError, "expected state SHARDED, got UNSHARDED"):
            low.update_from_partner()
        master.release()
        master.shard_device = torch.device("meta")
        with self.assertRaisesRegex(ChunkError, "one type of device, got cpu and meta"):
            low.update_from_partner()

    def test_a_fused_pair(self) -> None:
        """A fused chunk, which is never released, follows its partner after every reduction."""
        low = self.chunk_of(block=BlockKind.PRIVATE)
        master = self.chunk_of()
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
