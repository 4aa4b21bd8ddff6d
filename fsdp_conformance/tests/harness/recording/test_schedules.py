"""
The communication schedules of torch's engines on three linear layers and two ranks, pinned to the byte.

Parameters by layer: 42, 56, 24. DDP reduces them all in one bucket: 488 bytes. FSDP1 aligns each parameter of a flat
one to 16 bytes and pads the end to the world size: 36+7+1, 52+7+1 and 24+3+1 make 176, 240 and 112 bytes. FSDP2 pads
each parameter's rows, 7 to 8 and 3 to 4: 8*5+8, 8*7+8 and 4*7+4 make 192, 256 and 128 bytes.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch.distributed as dist

from fsdp_conformance.harness.context import log
from fsdp_conformance.harness.recording.process_group import BACKEND, register_recording_backend
from fsdp_conformance.harness.testcase import ShardedTrainingTestCase
from fsdp_conformance.tests.harness.recording import small_training


class Schedules(ShardedTrainingTestCase):
    """The collectives that each engine issues in its set-up and in two steps, equal on both ranks."""

    world_size = 2
    preload = ("fsdp_conformance.tests.harness.recording.small_training",)

    def setUp(self) -> None:
        super().setUp()
        self._spawn_processes()

    def _schedule(self, engine: str) -> str:
        register_recording_backend()
        self.start_process_group(BACKEND)
        small_training.train(engine)
        records = [record for record in log().records if record.phase != "observe"]
        setup, first, second = ([record.line() for record in records if record.step == step] for step in (None, 0, 1))
        of_ranks: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(of_ranks, [setup, first, second])
        self.assertEqual(of_ranks[0], of_ranks[1], msg="the ranks differ")
        return "\n".join([*setup, *first, "then the same" if second == first else "\n".join(["then", *second])])

    @pytest.mark.nightly
    def test_ddp(self) -> None:
        """
        DDP checks shapes and broadcasts its parameters when it is made, then reduces one bucket in each backward.

        Before the second forward it broadcasts the order in which gradients became ready, to rebuild its buckets.
        """
        self.assertExpectedInline(
            self._schedule("ddp"),
            """\
setup all_gather 16B int64 [0,1]
setup broadcast 144B int64 [0,1]
setup broadcast 488B float32 [0,1]
backward all_reduce 488B float32 SUM [0,1]
then
forward broadcast 28B int32 [0,1]
forward broadcast 4B int32 [0,1]
backward all_reduce 488B float32 SUM [0,1]""",
        )

    def test_fsdp1_full_shard(self) -> None:
        """FULL_SHARD gathers each unit in forward and again in backward, ahead of the previous unit's reduction."""
        self.assertExpectedInline(
            self._schedule("fsdp1_full_shard"),
            """\
forward all_gather 176B float32 [0,1]
forward all_gather 240B float32 [0,1]
forward all_gather 112B float32 [0,1]
backward all_gather 112B float32 [0,1]
backward all_gather 240B float32 [0,1]
backward reduce_scatter 112B float32 SUM [0,1]
backward all_gather 176B float32 [0,1]
backward reduce_scatter 240B float32 SUM [0,1]
backward reduce_scatter 176B float32 SUM [0,1]
then the same""",
        )

    def test_fsdp1_shard_grad_op(self) -> None:
        """SHARD_GRAD_OP gathers each unit once a step."""
        self.assertExpectedInline(
            self._schedule("fsdp1_shard_grad_op"),
            """\
forward all_gather 176B float32 [0,1]
forward all_gather 240B float32 [0,1]
forward all_gather 112B float32 [0,1]
backward reduce_scatter 112B float32 SUM [0,1]
backward reduce_scatter 240B float32 SUM [0,1]
backward reduce_scatter 176B float32 SUM [0,1]
then the same""",
        )

    def test_fsdp1_no_shard(self) -> None:
        """NO_SHARD gathers nothing and reduces each unit in backward."""
        self.assertExpectedInline(
            self._schedule("fsdp1_no_shard"),
            """\
backward all_reduce 112B float32 SUM [0,1]
backward all_reduce 240B float32 SUM [0,1]
backward all_reduce 176B float32 SUM [0,1]
then the same""",
        )

    @pytest.mark.slow
    def test_fsdp2_reshard(self) -> None:
        """With reshard_after_forward each unit is gathered in forward and in backward; the reduction averages."""
        self.assertExpectedInline(
            self._schedule("fsdp2_reshard"),
            """\
forward all_gather 192B float32 [0,1]
forward all_gather 256B float32 [0,1]
forward all_gather 128B float32 [0,1]
backward all_gather 128B float32 [0,1]
backward all_gather 256B float32 [0,1]
backward reduce_scatter 128B float32 AVG [0,1]
backward all_gather 192B float32 [0,1]
backward reduce_scatter 256B float32 AVG [0,1]
backward reduce_scatter 192B float32 AVG [0,1]
then the same""",
        )

    @pytest.mark.slow
    def test_fsdp2_keep(self) -> None:
        """Without reshard_after_forward each unit is gathered once a step."""
        self.assertExpectedInline(
            self._schedule("fsdp2_keep"),
            """\
forward all_gather 192B float32 [0,1]
forward all_gather 256B float32 [0,1]
forward all_gather 128B float32 [0,1]
backward reduce_scatter 128B float32 AVG [0,1]
backward reduce_scatter 256B float32 AVG [0,1]
backward reduce_scatter 192B float32 AVG [0,1]
then the same""",
        )
