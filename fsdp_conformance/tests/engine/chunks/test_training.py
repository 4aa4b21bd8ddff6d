"""Whole steps on chunks are those of an unsharded model, in every schedule, with no collective more than needed."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from torch.distributed import ProcessGroup

from fsdp_conformance.engine.chunks.chunk import ChunkConfig
from fsdp_conformance.engine.chunks.memory_pool import BlockKind
from fsdp_conformance.engine.chunks.storage import StorageConfig
from fsdp_conformance.tests.engine.chunks.chunk_ranks import ChunkTestCase
from fsdp_conformance.tests.engine.chunks.chunk_training import (
    NUM_LAYERS,
    TOLERANCE,
    ChunkTrainer,
    Schedule,
    reference_shards,
)

pytestmark = pytest.mark.slow

NUM_STEPS = 3


class TrainingTest(ChunkTestCase):
    """Four ranks, four layers, three steps."""

    def train(
        self, schedule: Schedule, *, group: ProcessGroup | None = None, replica_group: ProcessGroup | None = None
    ) -> ChunkTrainer:
        """Train, and compare the shards with those of one model trained on the batches of all ranks."""
        trainer = ChunkTrainer(torch.device("cpu"), schedule, group=group, replica_group=replica_group)
        trainer.put_batches(self.rank, NUM_STEPS)
        self.schedule()
        for _ in range(NUM_STEPS):
            trainer.step()
        expected = reference_shards(4, NUM_STEPS, schedule, dist.get_world_size(group), dist.get_rank(group))
        for shard, chunk in zip(expected, trainer.chunks, strict=True):
            torch.testing.assert_close(chunk.shard, shard, rtol=TOLERANCE, atol=TOLERANCE)
        counters = trainer.pool.counters
        self.assertEqual((0, 0), (counters.resized_leased, counters.cached_leased))
        return trainer

    def test_fully_sharded(self) -> None:
        """
        ZeRO-3, with and without prefetching: two gathers and one reduction for each layer and step, nothing else.

        Most is held when a layer's first gradient arrives: its tensors, its gradient buffer, the one of the layer
        behind it, whose reduction is on its way, and the tensors of the one before it, if gathered ahead.
        """
        for prefetch, num_held in ((True, 4), (False, 3)):
            trainer = self.train(Schedule(prefetch=prefetch))
            lines = [line.split()[0] for line in self.schedule()]
            counts = lines.count("all_gather"), lines.count("reduce_scatter"), len(lines)
            each = NUM_STEPS * NUM_LAYERS
            self.assertEqual((2 * each, each, 3 * each), counts)
            self.assertEqual(num_held * trainer.chunks[0].numel * 4, trainer.pool.counters.peak_held_bytes)

    def test_parameters_kept_from_forward_to_backward(self) -> None:
        """ZeRO-2: one gather for each layer and step."""
        self.train(Schedule(reshard_after_forward=False))

        self.assertEqual(NUM_STEPS * NUM_LAYERS, sum(line.startswith("all_gather") for line in self.schedule()))

    @pytest.mark.nightly
    def test_accumulation(self) -> None:
        """Any mixture of micro-batches that are reduced, and accumulated in the shard, and such as are not."""
        for unsynchronised, synchronised in ((2, 1), (0, 3), (1, 2)):
            self.train(Schedule(num_unsynchronised=unsynchronised, num_synchronised=synchronised))
            lines = [line.split()[0] for line in self.schedule()]
            self.assertEqual(NUM_STEPS * NUM_LAYERS * synchronised, lines.count("reduce_scatter"))

    def test_hybrid(self) -> None:
        """Sharded in pairs, replicated across: as one model on all four ranks' batches."""
        self.train(Schedule(), group=self.pair_group(), replica_group=self.replica_group())

    def test_replicated(self) -> None:
        """A shard group of one, replicated over all: no gathers."""
        config = StorageConfig(alias_whole=True)
        self.train(Schedule(config=config), group=self.own_group(), replica_group=dist.group.WORLD)

        self.assertEqual({"all_reduce"}, {line.split()[0] for line in self.schedule()})

    def test_private_blocks(self) -> None:
        """Fused chunks: gathered into the same block each time."""
        config = ChunkConfig(block=BlockKind.PRIVATE)
        schedule = Schedule(config=config, reshard_after_forward=False)
        self.train(schedule)
