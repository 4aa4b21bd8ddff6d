"""How ranks leave: together, after the last word of each, and without finalizing Python."""

from __future__ import annotations

import atexit
import copy
import json
import os
import time
import unittest
from pathlib import Path
from typing import Any, cast

import pytest
import torch
from torch import distributed, nn
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard
from torch.nn.parallel import DistributedDataParallel

from fsdp_conformance.outcome.records import RankExit, RankReport
from fsdp_conformance.tests.harness.started_ranks import StartedRanks

#: Runs of the case that died at shutdown about once in twenty when ranks ended through Python's finalization.
NUM_RUNS = 8


class Leaving(StartedRanks):
    """Three ranks. Not collected."""

    __test__ = False
    case_timeout_s = 60.0

    @property
    def world_size(self) -> int:
        return 3

    def conclude(self, reports: Any, exits: Any) -> None:
        self.moments = [json.loads(path.read_text()) for path in sorted(Path(self.file_name).parent.glob("moments*"))]
        super().conclude(reports, exits)

    def test_all_three_engines(self) -> None:
        """DDP, FSDP1 and FSDP2 in one process, all alive at the end."""
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(9, 9), nn.ReLU(), nn.Linear(9, 5))
        self.engines: list[nn.Module] = [
            DistributedDataParallel(copy.deepcopy(model)),
            FullyShardedDataParallel(copy.deepcopy(model), device_id=torch.device("cpu")),
            cast(nn.Module, fully_shard(copy.deepcopy(model))),
        ]
        for engine in self.engines:
            for _ in range(2):
                engine(torch.randn(4, 9)).sum().backward()

    def test_one_is_late(self) -> None:
        """Rank 0 is done at once; the others go on communicating among themselves."""
        pair = distributed.new_group([1, 2])
        if self.rank:
            for _ in range(50):
                distributed.all_reduce(torch.ones(1), group=pair)
        self.done = time.monotonic()

    def test_registers_at_exit(self) -> None:
        atexit.register(print, "Python was finalized", flush=True)

    def shutdown_rank(self) -> None:
        began = time.monotonic()
        super().shutdown_rank()
        moments = {"done": getattr(self, "done", began), "shutdown": began}
        Path(self.file_name).with_name(f"moments{self.rank}").write_text(json.dumps(moments))


def run(method: str) -> tuple[list[RankReport | None], list[RankExit], Leaving]:
    """Run one method; an error in the controller is the test's own."""
    case = Leaving(method)
    result = unittest.TestResult()
    case.run(result)
    if not result.wasSuccessful():
        raise AssertionError([text for _, text in [*result.errors, *result.failures]])
    return *case.seen, case


@pytest.mark.nightly
@pytest.mark.slow
def test_ranks_with_three_engines_end_with_zero() -> None:
    """gloo's threads outlive their group while an engine holds it, and no rank dies of that."""
    exits = [end for _ in range(NUM_RUNS) for end in run("test_all_three_engines")[1]]

    assert [end.exitcode for end in exits] == [0] * 3 * NUM_RUNS
    assert not any(end.ended_by_controller for end in exits)


@pytest.mark.slow
def test_no_rank_shuts_down_before_the_last_is_done() -> None:
    """The first shutdown begins after the last body has ended."""
    _, exits, case = run("test_one_is_late")

    assert [end.exitcode for end in exits] == [0, 0, 0]
    assert min(item["shutdown"] for item in case.moments) >= max(item["done"] for item in case.moments)


def test_rank_ends_without_finalizing_python() -> None:
    """Exit handlers do not run: the process ends at once."""
    _, exits, _ = run("test_registers_at_exit")

    assert [(end.exitcode, "finalized" in end.output) for end in exits] == [(0, False)] * 3
    assert not any(os.path.exists(f"/proc/{end.pid}") for end in exits)
