"""
Which cases run at the same time on devices that ranks own: the largest world first, smaller ones in the gaps.

    Slots       how many ranks each device holds; a case takes a slot on each of as many devices as it has ranks
    Dispatch    which worker starts which case next
    wall_time   how long that takes, with a duration for each case and no clock

A worker always has its next case at hand: pytest-xdist starts a case only when the worker knows what follows
it. So the cases that can start at any moment are those that idle workers have at hand, and it matters who has what. As
many workers as large cases fit take the largest case that is left. The others take the largest one that fits next to
them.

Small cases may overtake a large one that waits for devices, because devices should not idle. But only so often: after
that nothing starts before it.
"""

from __future__ import annotations

import heapq
from collections.abc import Hashable, Iterator, Sequence
from dataclasses import dataclass

from fsdp_conformance.errors import ConfigError

#: How many cases may overtake one that waits for devices.
PATIENCE = 8


class Slots:
    """The devices of one type on this machine, and how many ranks each of them holds."""

    def __init__(self, num_devices: int, slots_per_device: int = 1) -> None:
        problems = [
            f"{name} must be a positive integer, got {value}"
            for name, value in (("num_devices", num_devices), ("slots_per_device", slots_per_device))
            if value < 1
        ]
        if problems:
            raise ConfigError(problems, where="Slots")
        self.slots_per_device = slots_per_device
        self._held = [0] * num_devices

    @property
    def num_devices(self) -> int:
        """How many devices there are."""
        return len(self._held)

    @property
    def total(self) -> int:
        """How many ranks fit at the same time."""
        return self.num_devices * self.slots_per_device

    def needed(self, world_size: int) -> int:
        """How many slots a case takes. One with more ranks than devices takes none, because it is not run."""
        return world_size if world_size <= self.num_devices else 0

    def fits(self, world_size: int) -> bool:
        """True if a case of that world size can start now, with no two of its ranks on one device."""
        return sum(held < self.slots_per_device for held in self._held) >= self.needed(world_size)

    def take(self, world_size: int) -> tuple[int, ...]:
        """The devices of a case that fits: those that hold the fewest ranks. Pass them to `give_back` later."""
        by_load = sorted(range(self.num_devices), key=lambda index: (self._held[index], index))
        chosen = tuple(sorted(by_load[: self.needed(world_size)]))
        for index in chosen:
            self._held[index] += 1
        return chosen

    def give_back(self, chosen: Sequence[int]) -> None:
        """The case has ended."""
        for index in chosen:
            self._held[index] -= 1


@dataclass(frozen=True, slots=True)
class Start:
    """A worker starts the case that it has at hand, and takes the next one."""

    worker: Hashable
    case: int
    following: int | None
    """None: no case is left, and the worker ends after this one."""


@dataclass(slots=True)
class _Worker:
    at_hand: int | None = None
    is_large: bool = False
    """True if the case at hand was taken as the largest one left."""
    running: int | None = None
    runs_large: bool = False
    devices: tuple[int, ...] = ()
    overtaken: int = 0
    """How many cases have started while the one at hand waited for devices."""


class Dispatch:
    """
    Deals cases to workers. `sizes` has the world size of each case; a case is named by its index.

    `join` a worker for its first case, then start what `starts` yields, and say when a case is `done`.
    """

    def __init__(self, sizes: Sequence[int], slots: Slots) -> None:
        self.sizes = list(sizes)
        self.slots = slots
        # Ascending, and among equals in the order of the cases from the end: the next one to take is last.
        self._left = sorted(range(len(self.sizes)), key=lambda case: (self.sizes[case], -case))
        self._workers: dict[Hashable, _Worker] = {}

    @property
    def left(self) -> int:
        """How many cases no worker has taken."""
        return len(self._left)

    @property
    def at_hand(self) -> list[int]:
        """The cases that workers have at hand and have not started."""
        return [worker.at_hand for worker in self._workers.values() if worker.at_hand is not None]

    @property
    def running(self) -> list[int]:
        """The cases that run."""
        return [worker.running for worker in self._workers.values() if worker.running is not None]

    def waits(self, name: Hashable) -> bool:
        """True if the worker has a case at hand that it has not started."""
        return name in self._workers and self._workers[name].at_hand is not None

    def join(self, name: Hashable) -> int | None:
        """A new worker, and the case that it has at hand; None if none is left."""
        worker = self._workers[name] = _Worker()
        self._take(worker)
        return worker.at_hand

    def starts(self) -> Iterator[Start]:
        """The cases that start now, the largest first."""
        while (next_start := self._next_to_start()) is not None:
            name, worker, case = next_start
            for _, other, waiting in self._waiting():
                other.overtaken += self.sizes[waiting] > self.sizes[case]
            worker.running, worker.runs_large = case, worker.is_large
            worker.devices = self.slots.take(self.sizes[case])
            self._take(worker)
            yield Start(name, case, worker.at_hand)

    def done(self, name: Hashable) -> None:
        """The worker's case has ended."""
        worker = self._workers[name]
        self.slots.give_back(worker.devices)
        worker.running, worker.runs_large, worker.devices = None, False, ()

    def leave(self, name: Hashable) -> int | None:
        """The worker is gone. What it had at hand is left for others; returns the case that it was running."""
        worker = self._workers.pop(name)
        self.slots.give_back(worker.devices)
        if worker.at_hand is not None:
            self.put_back(worker.at_hand)
        return worker.running

    def put_back(self, case: int) -> None:
        """The case is to be run (again), by a worker that takes its next case or joins."""
        self._left.append(case)
        self._left.sort(key=lambda item: (self.sizes[item], -item))

    def _waiting(self) -> list[tuple[Hashable, _Worker, int]]:
        """The idle workers with the case that each has at hand, the largest case first."""
        waiting = [
            (name, worker, worker.at_hand)
            for name, worker in self._workers.items()
            if worker.running is None and worker.at_hand is not None
        ]
        return sorted(waiting, key=lambda item: (-self.sizes[item[2]], item[2]))

    def _next_to_start(self) -> tuple[Hashable, _Worker, int] | None:
        """The idle worker with the largest case that fits, unless a larger one has been overtaken too often."""
        for name, worker, case in self._waiting():
            if self.slots.fits(self.sizes[case]):
                return name, worker, case
            if worker.overtaken >= PATIENCE:
                return None
        return None

    def _take(self, worker: _Worker) -> None:
        """Give the worker its next case."""
        worker.at_hand, worker.overtaken, worker.is_large = None, 0, False
        if not self._left:
            return
        largest = max(1, self.slots.needed(self.sizes[self._left[-1]]))
        room = self.slots.num_devices // largest * self.slots.slots_per_device
        large = sum(other.runs_large or other.is_large for other in self._workers.values() if other is not worker)
        worker.is_large = large < max(1, room)
        worker.at_hand = self._left.pop() if worker.is_large else self._pop_beside(largest, room)

    def _pop_beside(self, largest: int, room: int) -> int:
        """The largest case that fits next to `room` cases of the largest world; the smallest case if none does."""
        gap = self.slots.total - largest * room
        fitting = [position for position, case in enumerate(self._left) if self.sizes[case] <= gap]
        if fitting:
            return self._left.pop(fitting[-1])
        smallest = self.sizes[self._left[0]]
        # Of equals the first, as elsewhere.
        last = max(position for position, case in enumerate(self._left) if self.sizes[case] == smallest)
        return self._left.pop(last)


def wall_time(cases: Sequence[tuple[int, float]], slots: Slots, *, num_workers: int) -> float:
    """
    Seconds until all cases have ended, each given as (world size, seconds), if they are dealt as `Dispatch` deals them.

    Durations do not depend on what else runs. `slots` must all be free, and are afterwards.
    """
    dispatch = Dispatch([size for size, _ in cases], slots)
    for worker in range(num_workers):
        dispatch.join(worker)
    now = 0.0
    ends: list[tuple[float, int]] = []
    while True:
        for start in dispatch.starts():
            assert isinstance(start.worker, int), "workers are numbers here"
            heapq.heappush(ends, (now + cases[start.case][1], start.worker))
        if not ends:
            return now
        now, worker = heapq.heappop(ends)
        dispatch.done(worker)
