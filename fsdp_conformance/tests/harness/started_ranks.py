"""Ranks on the CPU that are started for each method, with a default group when it begins."""

from __future__ import annotations

from typing import Any

from fsdp_conformance.harness.testcase import ShardedTrainingTestCase


class StartedRanks(ShardedTrainingTestCase):
    """What tests of the harness look at: `seen` has the reports and the ends of the ranks."""

    def setUp(self) -> None:
        super().setUp()
        self._spawn_processes()

    def init_rank(self) -> None:
        super().init_rank()
        self.start_process_group()

    def conclude(self, reports: Any, exits: Any) -> None:
        self.seen = reports, exits
        super().conclude(reports, exits)
