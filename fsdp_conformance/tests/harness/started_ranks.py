"""Base classes of tests that run in ranks: the ranks start with each method and have a default group by then."""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Any

import torch.distributed as dist

from fsdp_conformance.harness import context
from fsdp_conformance.harness.recording import process_group
from fsdp_conformance.harness.testcase import ShardedTrainingTestCase


class StartedRanks(ShardedTrainingTestCase):
    """Ranks on stock process groups. `seen` has their reports and exits, for tests of the harness itself."""

    def setUp(self) -> None:
        super().setUp()
        self._spawn_processes()

    def init_rank(self) -> None:
        super().init_rank()
        self.start_process_group()

    def conclude(self, reports: Any, exits: Any) -> None:
        self.seen = reports, exits
        super().conclude(reports, exits)


class RecordedRanks(ShardedTrainingTestCase):
    """Two ranks, unless a subclass changes that, on process groups that record every collective."""

    @property
    def world_size(self) -> int:
        return 2

    def setUp(self) -> None:
        super().setUp()
        self._spawn_processes()

    def init_rank(self) -> None:
        super().init_rank()
        process_group.register_recording_backend(self.device_type)
        self.start_process_group(process_group.BACKEND)

    def shared_directory(self) -> Path:
        """A directory that all ranks see, and that goes with the test. Collective."""
        made: list[Any] = [None]
        if self.rank == 0:
            # The controller removes the case's directory, also after a rank that was ended.
            made = [tempfile.mkdtemp(dir=context.running().order.case.directory)]
        dist.broadcast_object_list(made)
        return Path(made[0])
