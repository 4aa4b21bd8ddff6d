"""The scheduler for pytest-xdist, with workers that behave as xdist's do and run tests of faked durations."""

from __future__ import annotations

import heapq
from collections import deque
from collections.abc import Sequence
from typing import Any

import pytest

from fsdp_conformance import pytest_plugin
from fsdp_conformance.contract.profile import load_profile
from fsdp_conformance.harness import devices, leases
from fsdp_conformance.harness.device_memory import RANK_MIB, DeviceMemory
from fsdp_conformance.pytest_plugin import dealing, options
from fsdp_conformance.pytest_plugin.dealing import DevicesScheduling, sizes_by_node_id
from fsdp_conformance.pytest_plugin.dispatch import Slots
from fsdp_conformance.run_settings import RunSettings

END = -1


class Worker:
    """A worker of xdist: it runs a test once it knows which one follows, or that none does."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.shutting_down = False
        self.queue: deque[int] = deque()
        self.running: int | None = None
        self.ended = False

    def send_runtest_some(self, indices: Sequence[int]) -> None:
        assert not self.shutting_down, "a test was sent after the end"
        self.queue.extend(indices)

    def shutdown(self) -> None:
        self.shutting_down = True
        self.queue.append(END)

    def step(self) -> bool:
        """Start the next test if that is possible."""
        if self.running is None and len(self.queue) >= 2 and self.queue[0] != END:
            self.running = self.queue.popleft()
            return True
        self.ended = self.ended or (self.running is None and bool(self.queue) and self.queue[0] == END)
        return False


class Session:
    """As xdist's session drives a scheduler."""

    def __init__(self, sizes: dict[str, int], num_workers: int, slots: Slots) -> None:
        self.sizes = sizes
        self.ids = [f"suites/test_a.py::{name}" for name in sizes]
        by_id = {f"test_a.py::{name}": size for name, size in sizes.items() if size}
        self.scheduler = DevicesScheduling(num_workers, slots, by_id)
        self.workers: list[Worker] = []
        self.now = 0.0
        self.ends: list[tuple[float, int]] = []
        self.order: list[str] = []
        self.most_at_once = 0
        for _ in range(num_workers):
            self.add()

    def add(self) -> Worker:
        """A worker starts and collects."""
        worker = Worker(f"gw{len(self.workers)}")
        self.workers.append(worker)
        self.scheduler.add_node(worker)
        assert not self.scheduler.tests_finished
        self.scheduler.add_node_collection(worker, self.ids)
        if self.scheduler.collection_is_completed:
            self.scheduler.schedule()
        return worker

    def steps(self) -> None:
        """Whoever can start a test does."""
        for number, worker in enumerate(self.workers):
            if worker.step():
                assert worker.running is not None
                name = self.ids[worker.running].rpartition("::")[2]
                self.order.append(name)
                heapq.heappush(self.ends, (self.now + 1.0, number))
        ranks = [
            self.sizes[self.ids[one.running].rpartition("::")[2]] for one in self.workers if one.running is not None
        ]
        self.most_at_once = max(self.most_at_once, sum(ranks))

    def complete_one(self) -> None:
        """The next test ends."""
        self.now, number = heapq.heappop(self.ends)
        worker = self.workers[number]
        if worker.running is not None:
            index, worker.running = worker.running, None
            self.scheduler.mark_test_complete(worker, index, 1.0)

    def run(self) -> Session:
        """To the end, as xdist would see it."""
        self.steps()
        while self.ends:
            self.complete_one()
            self.steps()
        assert self.scheduler.tests_finished
        for worker in self.workers:
            if not worker.shutting_down:
                worker.shutdown()
            worker.step()
            assert worker.ended
            assert self.scheduler.remove_node(worker) is None
        return self


def names(*sizes: int) -> dict[str, int]:
    return {f"case{number}_{size}": size for number, size in enumerate(sizes)}


def test_every_test_runs_once_and_devices_are_full() -> None:
    """Largest first, never more ranks than slots; a plain test needs no device."""
    cases = names(8, 8, 7, 5, 4, 4, 3, 2, 2, 2, 1, 1)
    done = Session({**cases, "test_plain": 0}, 4, Slots(8)).run()

    assert sorted(done.order) == sorted([*cases, "test_plain"])
    assert [int(name.rpartition("_")[2]) for name in done.order if name in cases][:2] == [8, 8]
    assert done.most_at_once == 8


def test_two_slots_run_twice_as_many() -> None:
    """Two worlds of eight at a time."""
    one, two = (Session(names(*[8] * 6), 4, Slots(8, slots)).run() for slots in (1, 2))

    assert (one.now, two.now) == (6.0, 3.0)


def test_more_workers_than_tests() -> None:
    """Those without a test end at once."""
    done = Session(names(2), 4, Slots(8)).run()

    assert len(done.order) == 1


def test_a_worker_that_dies_is_replaced() -> None:
    """The test that it ran is named, the one that it had next is run by another, and none runs twice."""
    session = Session(names(2, 2, 2, 2, 2, 2), 2, Slots(4))
    session.steps()
    dead = session.workers[0]
    crashed = session.scheduler.remove_node(dead)
    assert dead.running is not None
    assert crashed == session.ids[dead.running]
    dead.running = None
    dead.ended = True
    session.workers.remove(dead)
    session.ends.clear()
    session.now += 1.0
    heapq.heappush(session.ends, (session.now, 0))
    session.add()
    session.steps()
    while session.ends:
        session.complete_one()
        session.steps()

    assert session.scheduler.tests_finished
    assert sorted(session.order) == sorted(name.rpartition("::")[2] for name in session.ids)


def test_a_replacement_that_collects_something_else_is_sent_away() -> None:
    """Its tests would have other numbers."""
    session = Session(names(2, 2), 1, Slots(2))
    worker = Worker("gw9")
    session.scheduler.add_node(worker)
    session.scheduler.add_node_collection(worker, ["another"])

    assert worker.shutting_down


def test_workers_that_disagree_run_nothing() -> None:
    """A collection that depends on the process is an error with a message for its author."""
    scheduler = DevicesScheduling(2, Slots(2), {})
    for worker, collected in ((Worker("gw0"), ["a", "b"]), (Worker("gw1"), ["b", "a"])):
        scheduler.add_node(worker)
        scheduler.add_node_collection(worker, collected)

    with pytest.raises(RuntimeError, match="collected different tests"):
        scheduler.schedule()


def test_a_session_that_ends_early_starts_nothing() -> None:
    """After a failure with --fail-fast, workers finish what they have."""
    session = Session(names(2, 2, 2, 2, 2, 2), 2, Slots(2))
    session.steps()
    for worker in session.workers:
        worker.shutdown()
    while session.ends:
        session.complete_one()
        session.steps()

    assert len(session.order) < 6
    assert all(session.scheduler.remove_node(worker) is None for worker in session.workers)


class Config:
    """The part of pytest's configuration that the hooks use."""

    def __init__(self, dist: str = "load") -> None:
        self.dist = dist

    def getoption(self, name: str, default: Any = None) -> Any:
        return {"dist": self.dist, "conformance_suites": "suites"}.get(name, default)

    def getvalue(self, name: str) -> list[str]:
        assert name == "tx"
        return ["3*popen"]


@pytest.fixture
def eight_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    """A machine with eight of them, each with memory for three slots; suites of one case."""
    monkeypatch.setattr(devices, "device_count", lambda device_type: 64 if device_type == "cpu" else 8)
    monkeypatch.setattr(leases, "memory_of", lambda *_: DeviceMemory(total_mib=3 * RANK_MIB, free_mib=3 * RANK_MIB))
    monkeypatch.setattr(leases, "_uuids", list)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    monkeypatch.setattr(dealing, "sizes_by_node_id", lambda package: {"test_a.py::case": 2})
    monkeypatch.setattr(options, "targets_suites", lambda config: True)
    monkeypatch.setattr(options, "selected_entries", lambda config: load_profile("core").entries)


@pytest.mark.usefixtures("eight_gpus")
@pytest.mark.parametrize(
    ("settings", "workers", "slots"),
    [
        (RunSettings(device="cuda"), 4, 1),
        (RunSettings(device="cuda", slots_per_device=0), 12, 3),
        (RunSettings(device="cuda", slots_per_device=2), 8, 2),
        (RunSettings(device="cuda", share_devices=True), 8, None),
        (RunSettings(), 64, None),
    ],
    ids=["alone", "what fits", "two slots", "shared", "cpu"],
)
def test_workers_and_their_scheduler(
    monkeypatch: pytest.MonkeyPatch, settings: RunSettings, workers: int, slots: int | None
) -> None:
    """`-n auto` fills the node; ours deals where ranks own devices, and xdist's elsewhere."""
    monkeypatch.setattr(options, "settings_of", lambda config: settings)
    config: Any = Config()

    assert pytest_plugin.pytest_xdist_auto_num_workers(config) == workers
    made = pytest_plugin.pytest_xdist_make_scheduler(config)
    assert (made.slots.slots_per_device if made is not None else None) == slots
    assert pytest_plugin.pytest_xdist_make_scheduler(Config("loadfile")) is None  # type: ignore[arg-type]


@pytest.mark.slow
def test_the_suites_are_known_by_their_node_ids() -> None:
    """The node ids are pytest's, whatever directory they are in."""
    sizes = sizes_by_node_id("fsdp_conformance.suites")

    assert sizes["test_a_parity.py::NumericalParity::test_exact_probe_ws4"] == 4
    assert len(sizes) >= len(load_profile("core").entries)
