"""Ranks that are used again: the same processes, a fresh process group, and no way to carry a failure on."""

from __future__ import annotations

import os
import time
import unittest
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import distributed

from fsdp_conformance.errors import EnvironmentUnavailable
from fsdp_conformance.harness import devices, leases
from fsdp_conformance.harness.context import log, running
from fsdp_conformance.harness.processes.rank_set import RankPool, RankSet, pool
from fsdp_conformance.tests.harness.started_ranks import StartedRanks

PATIENCE_S = 240.0
POLL_S = 0.01


class Reused(StartedRanks):
    """Cases on ranks that are kept. Not collected."""

    __test__ = False
    case_timeout_s = 120.0
    reuse_ranks = True

    @property
    def world_size(self) -> int:
        return 2

    def test_sums(self) -> None:
        tensor = torch.full((2,), float(self.rank + 1))
        distributed.all_reduce(tensor)
        self.assertEqual(tensor, torch.full((2,), 3.0))
        self.report.measurements["random"] = torch.rand(1).item()
        self.report.measurements["dtype"] = str(torch.get_default_dtype())
        self.report.measurements["trace"] = running().order.files.collectives
        self.report.measurements["records"] = len(log().records)

    def test_leaves_a_mess(self) -> None:
        self.test_sums_once()
        torch.set_default_dtype(torch.float64)
        torch.set_grad_enabled(False)
        os.environ["FSDP_CONFORMANCE_TEST_MESS"] = "1"

    def test_sums_once(self) -> None:
        distributed.all_reduce(torch.ones(1))

    def test_raises(self) -> None:
        raise ValueError("no")


class ReusedThree(Reused):
    """Another world size."""

    @property
    def world_size(self) -> int:
        return 3

    def test_sums(self) -> None:
        distributed.all_reduce(torch.ones(1))


def run(cls: type[Reused], method: str) -> tuple[Any, Any, str]:
    """Reports, exits, and the errors of one case."""
    case = cls(method)
    result = unittest.TestResult()
    case.run(result)
    return *case.seen, "".join(text for _, text in [*result.errors, *result.failures])


def pids(exits: Any) -> list[int]:
    """Of the ranks."""
    return [end.pid for end in exits]


@pytest.mark.slow
def test_same_ranks_run_the_next_case() -> None:
    """The processes stay, the report mentions it, and each case begins from the same seed."""
    pool.close()
    first, first_exits, first_errors = run(Reused, "test_sums")
    second, second_exits, second_errors = run(Reused, "test_sums")

    assert (first_errors, second_errors) == ("", "")
    assert pids(first_exits) == pids(second_exits)
    assert [end.exitcode for end in second_exits] == [None, None]
    assert (first[0].environment["start"], second[0].environment["start"]) == ("forkserver", "reused")
    assert first[1].measurements["random"] == second[1].measurements["random"]
    # each case has its own files
    assert first[0].measurements["trace"] != second[0].measurements["trace"]


def test_mess_of_a_case_does_not_reach_the_next() -> None:
    """Defaults of torch, the environment and the log of collectives are put back."""
    run(Reused, "test_leaves_a_mess")
    reports, _, errors = run(Reused, "test_sums")

    assert errors == ""
    assert reports[0].environment["start"] == "reused"
    assert (reports[0].measurements["dtype"], reports[0].measurements["records"]) == ("torch.float32", 0)


def test_failed_case_takes_its_ranks_along() -> None:
    """After a failure the next case has fresh ranks."""
    _, before, _ = run(Reused, "test_sums")
    _, failed, errors = run(Reused, "test_raises")
    reports, after, _ = run(Reused, "test_sums")

    assert "ValueError: no" in errors
    assert pids(before) == pids(failed)
    assert not set(pids(before)) & set(pids(after))
    assert reports[0].environment["start"] == "forkserver"


def test_set_that_does_not_fit_is_ended() -> None:
    """Another world size has other ranks; there is one set at a time."""
    _, two, _ = run(Reused, "test_sums")
    _, three, errors = run(ReusedThree, "test_sums")

    assert errors == ""
    assert len(set(pids(three))) == 3
    assert not set(pids(two)) & set(pids(three))
    assert not any(os.path.exists(f"/proc/{pid}") for pid in pids(two))


def test_rank_that_died_while_idle_is_noticed() -> None:
    """A set that has lost a rank between two cases is not used."""
    _, before, _ = run(Reused, "test_sums")
    os.kill(before[1].pid, 9)
    _wait_for_end(before[1].pid)
    _, after, errors = run(Reused, "test_sums")

    assert errors == ""
    assert not set(pids(before)) & set(pids(after))


def test_idle_ranks_hold_no_devices(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Others may have them meanwhile. The set gets the same ones again, or is ended: its ranks know no others."""
    monkeypatch.setenv(leases.DIRECTORY_VARIABLE, str(tmp_path))
    monkeypatch.setattr(devices, "device_count", lambda device_type: 2)
    monkeypatch.setattr(leases, "_uuids", list)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    pool = RankPool()

    def used() -> RankSet:
        lease = leases.Lease(devices=("0", "1"))
        held = leases.again("cuda", lease)
        assert held is not None
        return RankSet(key=("a",), members=(), lease=lease, shared_before=frozenset(), resources=held)

    pool.put(used())
    with leases.lease("cuda", 2, timeout_s=0.0):
        pass
    again = pool.take(("a",), "cuda")
    assert again is not None
    with pytest.raises(EnvironmentUnavailable, match="only 0 of 1 devices"), leases.lease("cuda", 1, timeout_s=0.0):
        pass
    pool.put(again)
    with leases.lease("cuda", 1, timeout_s=0.0):
        assert pool.take(("a",), "cuda") is None
    with leases.lease("cuda", 2, timeout_s=0.0):
        assert pool.take(("a",), "cuda") is None


def test_closed_pool_has_no_ranks() -> None:
    """At the end of a run the idle ranks end too."""
    _, exits, _ = run(Reused, "test_sums")
    pool.close()

    assert not any(os.path.exists(f"/proc/{pid}") for pid in pids(exits))


def _wait_for_end(pid: int) -> None:
    # The server reaps its children as soon as they end.
    deadline = time.monotonic() + PATIENCE_S
    while os.path.exists(f"/proc/{pid}"):
        if time.monotonic() > deadline:
            raise TimeoutError(f"process {pid} did not end")
        time.sleep(POLL_S)
