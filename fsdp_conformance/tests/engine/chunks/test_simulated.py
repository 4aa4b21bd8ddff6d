"""
Chunks on the simulated accelerator: bitwise as on the CPU, without a hazard, and with no wait that is not needed.

A schedule that is clean proves something only if the same schedule without waits is not, and each wait of the engine is
shown to matter: dropped alone, in at least one schedule it is found out.
"""

from __future__ import annotations

from collections.abc import Collection
from contextlib import nullcontext
from dataclasses import replace

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup

from fsdp_conformance.engine.chunks.chunk import ChunkConfig
from fsdp_conformance.engine.chunks.memory_pool import BlockKind
from fsdp_conformance.engine.chunks.storage import StorageConfig
from fsdp_conformance.plan import SIMULATED
from fsdp_conformance.simulator import checker
from fsdp_conformance.simulator.checker.hazard import Hazard
from fsdp_conformance.simulator.device import build
from fsdp_conformance.tests.engine.chunks.chunk_training import ChunkTrainer, Schedule
from fsdp_conformance.tests.engine.engine_sites import watching_engine
from fsdp_conformance.tests.simulator.simulator_ranks import SimulatedRanks

pytestmark = pytest.mark.skipif(build.unavailable() is not None, reason=str(build.unavailable()))

NUM_STEPS = 2

PLAIN = StorageConfig()
FUSED = ChunkConfig(block=BlockKind.PRIVATE)
OFFLOADED = replace(PLAIN, shard_device=torch.device("cpu"))
MIXED = replace(PLAIN, compute_dtype=torch.bfloat16, reduce_dtype=torch.float32)

PAGEABLE = "offloaded to pageable memory"

SCHEDULES = {
    "fully sharded": Schedule(config=PLAIN),
    "without prefetching": Schedule(config=PLAIN, prefetch=False),
    "kept from forward to backward": Schedule(config=PLAIN, reshard_after_forward=False),
    "accumulated": Schedule(config=PLAIN, num_unsynchronised=1, num_synchronised=2),
    "mixed precision": Schedule(config=MIXED, num_synchronised=2),
    "bfloat16 on the wire": Schedule(config=replace(MIXED, reduce_dtype=None)),
    "offloaded": Schedule(config=OFFLOADED, num_synchronised=2),
    PAGEABLE: Schedule(config=replace(OFFLOADED, pin_memory=False)),
    "offloaded, mixed precision": Schedule(config=replace(OFFLOADED, compute_dtype=torch.bfloat16)),
    "a gather wasted": Schedule(config=PLAIN, wasted_gather=True),
    "offloaded, a gather wasted": Schedule(config=OFFLOADED, wasted_gather=True),
    "fused": Schedule(config=FUSED, reshard_after_forward=False),
    "fused, accumulated": Schedule(config=FUSED, reshard_after_forward=False, num_synchronised=2),
    "chunks": Schedule(config=ChunkConfig()),
    "chunks, a reduction dropped": Schedule(config=ChunkConfig(), dropped_reduction=True),
}


class SimulatedTest(SimulatedRanks):
    """Two ranks with a simulated device each."""

    def init_rank(self) -> None:
        super().init_rank()
        # Once for all trainings: making a group is a collective.
        self.alone: ProcessGroup = [dist.new_group([rank]) for rank in range(2)][self.rank]

    def train(
        self, schedule: Schedule, device: torch.device, *, alone: bool = False, dropped: Collection[str] = ()
    ) -> tuple[list[Tensor], tuple[Hazard, ...], set[str]]:
        """The shards after two steps, what the checker found, and the waits of the engine that were executed."""
        on_cpu = device.type == "cpu"
        if on_cpu:
            schedule = replace(schedule, config=replace(schedule.config, shard_device=None))
        trainer = ChunkTrainer(device, schedule, group=self.alone if alone else None)
        trainer.put_batches(self.rank, NUM_STEPS)
        if not on_cpu:
            torch.get_device_module(SIMULATED).synchronize()
            checker.clear()
        sites: set[str] = set()
        with nullcontext() if on_cpu else watching_engine(sites, dropped):
            for _ in range(NUM_STEPS):
                trainer.step()
        hazards = () if on_cpu else checker.hazards()
        with nullcontext() if on_cpu else checker.suspended():
            return [chunk.shard.to("cpu", copy=True) for chunk in trainer.chunks], hazards, sites

    @pytest.mark.nightly
    def test_clean_and_equal_to_the_cpu(self) -> None:
        """Every schedule: shards bitwise as on the CPU, no hazard; without any wait there are hazards."""
        for name, schedule in SCHEDULES.items():
            for alone in (False, True):
                expected, _, _ = self.train(schedule, torch.device("cpu"), alone=alone)
                got, hazards, sites = self.train(schedule, self.device, alone=alone)
                self.assertEqual(0, len(hazards), msg="\n".join([name, *(hazard.explain() for hazard in hazards)]))
                self.assertTrue(sites, msg=name)
                for shard, on_cpu in zip(got, expected, strict=True):
                    self.assertTrue(torch.equal(on_cpu, shard), msg=f"{name}: expected {on_cpu}, got {shard}")
            with checker.without_waits():
                _, hazards, _ = self.train(schedule, self.device)
            self.assertNotEqual((), hazards, msg=name)

    @pytest.mark.nightly
    @pytest.mark.slow
    def test_each_wait_is_needed(self) -> None:
        """Every wait and every event of the engine, dropped alone, is a hazard in at least one schedule."""
        executed: set[str] = set()
        flagged: set[str] = set()
        for name, schedule in SCHEDULES.items():
            if name == PAGEABLE:  # Copies to pageable memory make the host wait, whoever asks for them.
                continue
            for alone in (False, True):
                _, _, sites = self.train(schedule, self.device, alone=alone)
                executed |= sites
                # Which waits are tried is the first rank's word: all ranks have to train as often.
                candidates = [sorted(sites - flagged)]
                dist.broadcast_object_list(candidates, device=torch.device("cpu"))
                for site in candidates[0]:
                    _, hazards, _ = self.train(schedule, self.device, alone=alone, dropped={site})
                    is_found = [bool(hazards)]
                    dist.broadcast_object_list(is_found, device=torch.device("cpu"))
                    flagged |= {site} if is_found[0] else set()

        self.assertGreater(len(executed), 12)
        self.assertEqual("", ", ".join(sorted(executed - flagged)))
