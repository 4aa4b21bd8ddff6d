"""Ranks that get ready for the next case: fresh, used once, and only if all that they have done holds for it."""

from __future__ import annotations

import os
import time
import unittest
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import distributed

from fsdp_conformance.harness import context, devices, leases, rank_startup
from fsdp_conformance.harness.device_memory import RANK_MIB, DeviceMemory
from fsdp_conformance.harness.order import FirstGroup
from fsdp_conformance.harness.processes import prepared as preparation
from fsdp_conformance.harness.processes.prepared import prepared
from fsdp_conformance.harness.rank_startup import make_first_group
from fsdp_conformance.harness.recording import process_group
from fsdp_conformance.harness.testcase import ShardedTrainingTestCase
from fsdp_conformance.outcome.records import REFERENCES
from fsdp_conformance.run_settings import RunSettings
from fsdp_conformance.selftest.cases import bound_case, run_case
from fsdp_conformance.tests.harness.test_torchrun_dealing import orders
from fsdp_conformance.verdict import Verdict

PATIENCE_S = 60.0
POLL_S = 0.01


class Cases(ShardedTrainingTestCase):
    """Cases that begin as conformance cases do. Not collected."""

    __test__ = False
    case_timeout_s = 120.0
    first_group: FirstGroup | None = FirstGroup()

    @property
    def world_size(self) -> int:
        return 2

    def setUp(self) -> None:
        super().setUp()
        self._spawn_processes()

    def init_rank(self) -> None:
        super().init_rank()
        run = context.running()
        if not run.has_group:
            make_first_group(run.order, self.device)
        process_group.log().clear()

    def conclude(self, reports: Any, exits: Any) -> None:
        self.seen = reports, exits
        super().conclude(reports, exits)

    def test_sums(self) -> None:
        tensor = torch.full((2,), float(self.rank + 1))
        distributed.all_reduce(tensor)
        self.assertEqual(tensor, torch.full((2,), 3.0))
        self.report.measurements["records"] = len(process_group.log().records)
        self.report.measurements["random"] = torch.rand(1).item()
        self.report.measurements["test"] = os.environ.get("FSDP_CONFORMANCE_TEST_AHEAD", "")

    def test_raises(self) -> None:
        raise ValueError("no")


class Three(Cases):
    """Another world size."""

    @property
    def world_size(self) -> int:
        return 3

    def test_sums(self) -> None:
        distributed.all_reduce(torch.ones(1))


class WithoutGroup(Cases):
    """A test that makes its own group."""

    first_group = None

    def init_rank(self) -> None:
        ShardedTrainingTestCase.init_rank(self)
        self.start_process_group()
        process_group.log().clear()


@pytest.fixture(autouse=True)
def slow_devices(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """The CPU stands in for a device that takes long to get ready."""
    monkeypatch.setattr(devices, "begins_slowly", lambda device_type: True)
    prepared.close()
    yield
    prepared.expect(0)
    prepared.close()


def run(cls: type[Cases], method: str = "test_sums", *, following: int = 0) -> tuple[Any, list[int], str]:
    """Reports, pids and errors of one case; the next has `following` ranks."""
    prepared.expect(following)
    case = cls(method)
    result = unittest.TestResult()
    case.run(result)
    reports, exits = case.seen
    return reports, [end.pid for end in exits], "".join(text for _, text in [*result.errors, *result.failures])


def starts(reports: Any) -> list[str]:
    """How each rank came to be."""
    return [report.environment["start"] for report in reports]


def waiting() -> list[int]:
    """The pids of the set that waits."""
    session = prepared._waiting
    return [int(process.pid or 0) for process, _ in session.ranks.members] if session is not None else []


def gone(pids: list[int]) -> bool:
    """True if the processes end within the deadline."""
    deadline = time.monotonic() + PATIENCE_S
    while any(os.path.exists(f"/proc/{pid}") for pid in pids):
        if time.monotonic() > deadline:
            return False
        time.sleep(POLL_S)
    return True


@pytest.mark.slow
def test_the_next_case_finds_fresh_ranks_ready() -> None:
    """They have their group, a clean log, the same seed, and their own environment; each set is used once."""
    first, first_pids, first_errors = run(Cases, following=2)
    ready = waiting()
    second, second_pids, second_errors = run(Cases, following=2)
    third, third_pids, _ = run(Cases)

    assert (first_errors, second_errors) == ("", "")
    assert starts(first) + starts(second) == ["forkserver"] * 2 + ["prepared"] * 2
    assert second_pids == ready
    assert len({*first_pids, *second_pids, *third_pids}) == 6
    assert [report.measurements["records"] for report in (first[0], second[1])] == [1, 1]
    assert first[0].measurements["random"] == second[0].measurements["random"] == third[0].measurements["random"]
    assert waiting() == []
    assert gone([*first_pids, *second_pids, *third_pids])


@pytest.mark.slow
def test_what_does_not_fit_is_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    """Another world size, or another environment: the case starts its own ranks."""
    run(Cases, following=2)
    ready = waiting()
    reports, _, errors = run(Three)
    assert (starts(reports), errors) == (["forkserver"] * 3, "")
    assert gone(ready)

    run(Cases, following=2)
    ready = waiting()
    monkeypatch.setenv("FSDP_CONFORMANCE_TEST_AHEAD", "changed")
    reports, _, _ = run(Cases)
    assert starts(reports) == ["forkserver"] * 2
    assert reports[0].measurements["test"] == "changed"
    assert gone(ready)


def test_pytests_own_variable_does_not_count(monkeypatch: pytest.MonkeyPatch) -> None:
    """It changes with every test."""
    monkeypatch.setenv("PYTEST_CURRENT_TEST", "one")
    run(Cases, following=2)
    monkeypatch.setenv("PYTEST_CURRENT_TEST", "two")

    assert starts(run(Cases)[0]) == ["prepared"] * 2


def test_a_rank_that_died_while_it_waited_costs_only_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """The case starts fresh ranks at once and blames no rank, even if the surviving rank is still waiting for it."""
    monkeypatch.setattr(preparation, "READY_S", 86400.0)
    run(Cases, following=2)
    ready = waiting()
    os.kill(ready[1], 9)
    reports, _, errors = run(Cases)

    assert (starts(reports), errors) == (["forkserver"] * 2, "")
    assert gone(ready)


def test_a_failure_does_not_reach_the_set_that_waits() -> None:
    """It has run nothing of the case that failed."""
    _, _, errors = run(Cases, "test_raises", following=2)
    reports, _, after = run(Cases)

    assert "ValueError: no" in errors
    assert (starts(reports), after) == (["prepared"] * 2, "")


def test_nothing_is_prepared_without_need(monkeypatch: pytest.MonkeyPatch) -> None:
    """No ranks are prepared for a test that makes its own group, for no next case, or on devices that begin quickly."""
    run(WithoutGroup, following=2)
    assert waiting() == []
    run(Cases)
    assert waiting() == []
    monkeypatch.setattr(devices, "begins_slowly", lambda device_type: False)
    run(Cases, following=2)
    assert waiting() == []


def test_other_launches_leave_the_set_alone() -> None:
    """A probe between two cases neither takes the ranks nor ends them."""
    run(Cases, following=2)
    ready = waiting()
    reports, _, errors = run(WithoutGroup, following=2)

    assert (starts(reports), errors, waiting()) == (["forkserver"] * 2, "", ready)
    assert starts(run(Cases)[0]) == ["prepared"] * 2


def test_which_cases_can_be_prepared(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Ranks that own a GPU each, in processes of this host without a debugger."""
    monkeypatch.setattr(devices, "begins_slowly", devices.is_scarce)
    group = FirstGroup()

    assert preparation.can_prepare(orders(tmp_path, "cuda", group=group))
    assert not preparation.can_prepare(orders(tmp_path, "cuda"))
    for device in ("cpu", "sim"):
        assert not preparation.can_prepare(orders(tmp_path, device, group=group))
    for option in ("reuse", "simulated", "share_devices", "worker", "debugged"):
        assert not preparation.can_prepare(orders(tmp_path, "cuda", group=group, **{option: True}))


def test_devices_without_room_prepare_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """There must be memory for the rank that waits, and for one that runs at the same time."""
    case, lease = orders(tmp_path, "cuda"), leases.Lease(devices=("0", "1"))
    memory = {"0": DeviceMemory(total_mib=80_000, free_mib=2 * RANK_MIB)}
    monkeypatch.setattr(leases, "memory_of", lambda device_type, name: memory.get(name))
    assert preparation._has_room(case, lease)
    memory["1"] = DeviceMemory(total_mib=80_000, free_mib=2 * RANK_MIB - 1)
    assert not preparation._has_room(case, lease)


def test_devices_that_others_took_meanwhile(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A set on devices that the case cannot have at once is of no use; otherwise it gets exactly these."""
    monkeypatch.setenv(leases.DIRECTORY_VARIABLE, str(tmp_path))
    monkeypatch.setattr(devices, "device_count", lambda device_type: 4)
    monkeypatch.setattr(leases, "_uuids", list)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    lease = leases.Lease(devices=("1", "2"))
    with leases.lease("cuda", 3):
        assert leases.again("cuda", lease) is None
    held = leases.again("cuda", lease)
    assert held is not None
    with held, leases.lease("cuda", 2, timeout_s=0.0) as others:
        assert others.devices == ("0", "3")


def test_getting_ready_touches_the_device_in_order(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Settings, device, libraries, then the group: what cuBLAS and NCCL read must be there before they start."""
    done: list[str] = []
    (order, _) = orders(tmp_path, "cpu", group=FirstGroup(only="nccl")).for_ranks({})
    monkeypatch.setattr(type(order.case.determinism), "apply", lambda self: done.append("settings"))
    monkeypatch.setattr(devices, "activate", lambda device_type: done.append(f"activate {device_type}"))
    monkeypatch.setattr(devices, "use_device", lambda device: done.append(f"use {device}"))
    monkeypatch.setattr(rank_startup, "warm_up", lambda device: done.append(f"warm up {device}"))
    monkeypatch.setattr(rank_startup, "make_first_group", lambda order, device: done.append(f"group on {device}"))
    rank_startup.get_ready(order)

    assert done == ["settings", "activate cpu", "use cpu", "warm up cpu", "group on cpu"]


@pytest.mark.nightly
@pytest.mark.slow
@pytest.mark.parametrize(
    ("case", "device"),
    [
        ("R001/exact-probe-ws2", "cpu"),
        pytest.param("R034/freed-after-forward-reshard-ws2", "sim", marks=pytest.mark.nightly),
    ],
    ids=["parity", "bytes on a device"],
)
def test_a_case_judges_prepared_ranks_alike(case: str, device: str) -> None:
    """The same verdict, comparisons and measured bytes as with ranks that were started for it."""
    bound = bound_case(case)
    records = []
    for _ in range(2):
        prepared.expect(2)
        records.append(run_case(bound, "torch-fsdp2", base=RunSettings(device=device)))
    started, ready = records
    for record in records:
        # With a store, the second takes what the first has trained.
        del record.measurements[REFERENCES]

    assert (started.verdict, ready.verdict) == (Verdict.PASS, Verdict.PASS), ready.reason
    assert (started.environment["start"], ready.environment["start"]) == ("forkserver", "prepared")
    assert (started.comparisons, started.schedule) == (ready.comparisons, ready.schedule)
    assert started.measurements == ready.measurements
