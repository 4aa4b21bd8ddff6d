"""Base classes of tests that run in ranks: the ranks start with each method and have a default group by then."""

from __future__ import annotations

from typing import Any

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
