"""Which cases run at the same time: largest first, gaps filled, none overtaken forever. With faked durations."""

from __future__ import annotations

import heapq
import random
from collections.abc import Callable, Iterator, Sequence

import pytest

from fsdp_conformance.contract.profile import load_profile
from fsdp_conformance.errors import ConfigError
from fsdp_conformance.pytest_plugin.dispatch import PATIENCE, Dispatch, Slots, Start, wall_time


def test_no_two_ranks_of_a_case_share_a_device() -> None:
    """Four slots on two devices: a case of three ranks does not fit, two cases of two do."""
    slots = Slots(2, 2)

    assert [slots.fits(size) for size in (1, 2)] == [True, True]
    assert (slots.needed(3), slots.total) == (0, 4)
    assert [slots.take(2), slots.take(1), slots.take(1)] == [(0, 1), (0,), (1,)]
    assert not slots.fits(1)
    slots.give_back((0,))
    assert [slots.fits(size) for size in (1, 2)] == [True, False]


def test_the_emptiest_devices_come_first() -> None:
    """Cases spread over devices before they share one."""
    slots = Slots(4, 2)

    assert [slots.take(2), slots.take(1), slots.take(1), slots.take(3)] == [(0, 1), (2,), (3,), (0, 1, 2)]


def test_impossible_slots() -> None:
    """Both numbers are named."""
    with pytest.raises(ConfigError, match=r"num_devices must be .* got 0.*slots_per_device must be .* got -1"):
        Slots(0, -1)


class Simulation:
    """Workers that run cases of these sizes and durations."""

    def __init__(self, sizes: Sequence[int], slots: Slots, workers: int, seconds: Callable[[int], float]) -> None:
        self.dispatch = Dispatch(sizes, slots)
        self.slots = slots
        self.seconds = seconds
        self.now = 0.0
        self.ends: list[tuple[float, int, int]] = []
        self.order: list[int] = []
        self.busy: list[tuple[float, int]] = []
        """When how many ranks began to run."""
        for worker in range(workers):
            self.dispatch.join(worker)

    def run(self) -> Simulation:
        """Until nothing runs and nothing can start."""
        while True:
            self.begin(self.dispatch.starts())
            if not self.ends:
                return self
            self.end_one()

    def begin(self, starts: Iterator[Start]) -> None:
        for start in starts:
            assert isinstance(start.worker, int)
            self.order.append(start.case)
            heapq.heappush(self.ends, (self.now + self.seconds(start.case), start.worker, start.case))
        sizes = [self.slots.needed(self.dispatch.sizes[case]) for case in self.dispatch.running]
        assert sum(sizes) <= self.slots.total
        self.busy.append((self.now, sum(sizes)))

    def end_one(self) -> None:
        self.now, worker, _ = heapq.heappop(self.ends)
        self.dispatch.done(worker)


@pytest.mark.parametrize("per_device", [1, 2, 4])
@pytest.mark.parametrize("seed", range(5))
def test_every_case_runs_once(per_device: int, seed: int) -> None:
    """Whatever the sizes and durations, and with more workers than fit or fewer."""
    draw = random.Random(seed)
    sizes = sorted((draw.choice([1, 2, 2, 3, 4, 5, 7, 8, 11]) for _ in range(60)), reverse=True)
    durations = [draw.uniform(0.1, 9.0) for _ in sizes]
    for workers in (1, 3, 8 * per_device):
        done = Simulation(sizes, Slots(8, per_device), workers, durations.__getitem__).run()

        assert sorted(done.order) == list(range(60))
        assert (done.dispatch.left, done.dispatch.at_hand, done.dispatch.running) == (0, [], [])
        assert done.slots.fits(8)


def test_the_largest_worlds_start_first() -> None:
    """As long as cases of eight ranks are left, no smaller one delays them."""
    done = Simulation([8, 8, 8, 2, 2, 2, 1], Slots(8), 4, lambda case: 1.0).run()

    assert done.order[:3] == [0, 1, 2]
    assert done.now == 4.0


def test_small_cases_fill_the_gap() -> None:
    """Next to a case of five ranks there is room for one of three, and for none of four."""
    sizes = [5, 5, 4, 4, 3, 3]
    done = Simulation(sizes, Slots(8), 4, lambda case: 1.0).run()

    assert [sizes[case] for case in done.order] == [5, 3, 5, 3, 4, 4]
    assert done.now == 3.0


def test_a_large_case_is_not_overtaken_for_ever() -> None:
    """Small cases that always fit would keep a device busy; after some of them, the large case gets its turn."""
    dispatch = Dispatch([8, *[1] * 40], Slots(8))
    for worker in range(4):
        dispatch.join(worker)
    # Another kind of run has taken a device meanwhile: the large case waits from the start.
    dispatch.slots.take(1)
    order = []
    for _ in range(30):
        started = list(dispatch.starts())
        order += [start.case for start in started]
        for start in started:
            dispatch.done(start.worker)
    assert len(order) == PATIENCE
    dispatch.slots.give_back((0,))
    started = list(dispatch.starts())

    assert started[0].case == 0


def test_a_worker_that_dies_leaves_its_next_case_to_others() -> None:
    """The dispatch also returns the case that the worker was running."""
    dispatch = Dispatch([2, 2, 1], Slots(2))
    assert [dispatch.join("a"), dispatch.join("b")] == [0, 2]
    (first,) = dispatch.starts()

    assert (first.worker, first.case, first.following) == ("a", 0, 1)
    assert dispatch.leave("a") == 0
    assert dispatch.join("c") == 1
    assert [start.case for start in dispatch.starts()] == [1]


def test_cases_without_devices_always_fit() -> None:
    """A case with more ranks than devices is not run, and is reported at once."""
    done = Simulation([11, 2, 0], Slots(2), 2, lambda case: 1.0).run()

    assert (sorted(done.order), done.now) == ([0, 1, 2], 2.0)


def test_a_node_is_filled() -> None:
    """The core profile on eight GPUs takes at most a tenth more than the GPUs themselves need, however many slots."""
    cases = [(entry.world_size, 1.0) for entry in load_profile("core").entries if entry.world_size <= 8]
    cases.sort(key=lambda case: -case[0])
    for per_device in (1, 2, 4):
        slots = Slots(8, per_device)
        least = sum(size * seconds for size, seconds in cases) / slots.total
        assert least <= wall_time(cases, slots, num_workers=4 * per_device) <= 1.1 * least


def test_one_worker_takes_the_sum() -> None:
    """Without any case, it takes no time."""
    assert wall_time([(2, 3.0), (1, 4.0)], Slots(2), num_workers=1) == 7.0
    assert wall_time([], Slots(2), num_workers=2) == 0.0
