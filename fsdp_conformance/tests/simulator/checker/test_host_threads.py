"""A wait of one thread of the host orders that thread, and others where Python hands it over, on every run."""

from __future__ import annotations

import _thread
import asyncio
import queue
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor, wait
from contextlib import contextmanager
from typing import Any

import pytest
import torch

from fsdp_conformance.simulator import checker
from fsdp_conformance.simulator.checker import labels
from fsdp_conformance.simulator.checker.host_threads import follow_threads
from fsdp_conformance.simulator.device import build, torch_sim
from fsdp_conformance.simulator.replacements import Replacements
from fsdp_conformance.tests.simulator.simulator_process import compiled, in_process_of_its_own

pytestmark = compiled

#: For a thread that has nothing to wait for.
DEADLINE_S = 60


@contextmanager
def _followed() -> Iterator[None]:
    replaced = Replacements()
    follow_threads(replaced)
    names = labels.install()
    try:
        yield
    finally:
        names.remove()
        replaced.undo()


class _Flag:
    """Says that something has happened. Threads see that, the checker does not: nothing replaces this lock."""

    def __init__(self) -> None:
        self._lock = _thread.allocate_lock()
        self._lock.acquire()

    def set(self) -> None:
        self._lock.release()

    def wait(self) -> None:
        assert self._lock.acquire(timeout=DEADLINE_S)


def _by_flag(work: Callable[[], object]) -> threading.Thread:
    """Run something in another thread, and wait until it has happened, without joining the thread."""
    flag = _Flag()

    def run() -> None:
        work()
        flag.set()

    thread = threading.Thread(target=run)
    thread.start()
    flag.wait()
    return thread


def _by_join(work: Callable[[], None]) -> None:
    thread = threading.Thread(target=work)
    thread.start()
    thread.join(DEADLINE_S)


def _by_end(work: Callable[[], None]) -> None:
    thread = _by_flag(work)
    while thread.is_alive():
        pass


def _by_event(work: Callable[[], None]) -> None:
    event = threading.Event()
    _by_flag(lambda: (work(), event.set()))  # type: ignore[func-returns-value]
    assert event.is_set()


def _by_condition(work: Callable[[], None]) -> None:
    condition, flag = threading.Condition(), _Flag()

    def run() -> None:
        work()
        with condition:
            condition.notify_all()

    with condition:
        thread = threading.Thread(target=run)
        thread.start()
        assert condition.wait(DEADLINE_S)
    flag.set()


def _by_semaphore(work: Callable[[], None]) -> None:
    semaphore = threading.Semaphore(0)
    _by_flag(lambda: (work(), semaphore.release()))  # type: ignore[func-returns-value]
    with semaphore:
        pass


def _by_barrier(work: Callable[[], None]) -> None:
    barrier = threading.Barrier(2)
    threading.Thread(target=lambda: (work(), barrier.wait(DEADLINE_S))).start()  # type: ignore[func-returns-value]
    barrier.wait(DEADLINE_S)


def _by_queue(kind: Callable[[], queue.Queue[int]]) -> Callable[[Callable[[], None]], None]:
    def by(work: Callable[[], None]) -> None:
        items = kind()
        _by_flag(lambda: (work(), items.put(1)))  # type: ignore[func-returns-value]
        assert items.get(timeout=DEADLINE_S) == 1

    return by


def _by_lock(make: Callable[[], Any]) -> Callable[[Callable[[], None]], None]:
    def by(work: Callable[[], None]) -> None:
        lock = make()

        def run() -> None:
            with lock:
                work()

        _by_flag(run)
        assert lock.acquire(timeout=DEADLINE_S)
        lock.release()

    return by


def _by_event_loop(work: Callable[[], None]) -> None:
    async def wait_for() -> None:
        await asyncio.to_thread(work)

    asyncio.run(wait_for())


def _by_simple_queue(work: Callable[[], None]) -> None:
    items: queue.SimpleQueue[int] = queue.SimpleQueue()
    _by_flag(lambda: (work(), items.put(1)))  # type: ignore[func-returns-value]
    assert items.get_nowait() == 1


def _by_finished_tasks(work: Callable[[], None]) -> None:
    items: queue.Queue[int] = queue.Queue()
    items.put(1)
    _by_flag(lambda: (items.get(), work(), items.task_done()))  # type: ignore[func-returns-value]
    items.join()


def _by_result(work: Callable[[], None]) -> None:
    with ThreadPoolExecutor(1) as executor:
        executor.submit(work).result(DEADLINE_S)


def _by_finished_future(work: Callable[[], None]) -> None:
    with ThreadPoolExecutor(1) as executor:
        future = executor.submit(work)
        wait([future], DEADLINE_S)
        assert future.done()


HAND_OVERS = {
    "join": _by_join,
    "end": _by_end,
    "lock": _by_lock(lambda: threading.Lock()),  # noqa: PLW0108 - the name has another value by then
    "reentrant lock": _by_lock(lambda: threading.RLock()),  # noqa: PLW0108
    "event loop": _by_event_loop,
    "event": _by_event,
    "condition": _by_condition,
    "semaphore": _by_semaphore,
    "barrier": _by_barrier,
    "queue": _by_queue(queue.Queue),
    "stack": _by_queue(queue.LifoQueue),
    "priority": _by_queue(queue.PriorityQueue),
    "simple queue": _by_simple_queue,
    "tasks": _by_finished_tasks,
    "result": _by_result,
    "future": _by_finished_future,
}


def _found() -> list[str]:
    kinds = [hazard.kind.value for hazard in checker.hazards()]
    checker.clear()
    return kinds


@in_process_of_its_own
def test_a_wait_that_is_handed_over() -> None:
    """In each way, also if the program has asked for the wait and others do not count."""
    with _followed():
        for waits in checker.Waits:
            checker.set_waits(waits)
            for name, hand_over in HAND_OVERS.items():
                data = torch.ones(4, device="sim")
                hand_over(torch_sim.synchronize)
                with torch_sim.stream(torch_sim.Stream()):
                    data.mul_(2)
                assert _found() == [], name


@pytest.mark.parametrize("is_first", [True, False], ids=["before", "after"])
@in_process_of_its_own
def test_a_wait_of_another_thread(is_first: bool) -> None:
    """Like that of a checkpoint in the background: whether it was fast or slow, it orders nothing of this thread."""
    with _followed():
        data, go = torch.ones(4, device="sim"), _Flag()
        if is_first:
            _by_flag(torch_sim.synchronize)
        else:
            thread = threading.Thread(target=lambda: (go.wait(), torch_sim.synchronize()))  # type: ignore[func-returns-value]
            thread.start()
        with torch_sim.stream(torch_sim.Stream()):
            data.mul_(2)
        if not is_first:
            go.set()
            thread.join(DEADLINE_S)

    assert _found() == ["read_after_write"]


@in_process_of_its_own
def test_a_wait_of_this_thread_does_not_order_another() -> None:
    """A thread that has been there before, and is handed nothing."""
    with _followed():
        data, go = torch.ones(4, device="sim"), _Flag()

        def work() -> None:
            go.wait()
            with torch_sim.stream(torch_sim.Stream()):
                data.mul_(2)

        thread = threading.Thread(target=work)
        thread.start()
        torch_sim.synchronize()
        data.sum().item()  # nothing of this is forgotten
        go.set()
        thread.join(DEADLINE_S)

    assert "read_after_write" in _found()


@in_process_of_its_own
def test_what_a_thread_starts_with() -> None:
    """It knows what the thread that starts it has waited for; an executor's, what each task was given with."""
    with _followed(), ThreadPoolExecutor(1) as executor:
        executor.submit(int).result(DEADLINE_S)

        def use(data: torch.Tensor) -> None:
            with torch_sim.stream(torch_sim.Stream()):
                data.mul_(2)

        data = torch.ones(4, device="sim")
        torch_sim.synchronize()
        _by_join(lambda: use(data))
        later = torch.ones(4, device="sim")
        torch_sim.synchronize()
        executor.submit(use, later).result(DEADLINE_S)

    assert _found() == []


@in_process_of_its_own
def test_an_event_of_another_thread() -> None:
    """It holds what that thread knew when it recorded the event, not only what the stream was given."""
    with _followed():
        data, events = torch.ones(4, device="sim"), []

        def work() -> None:
            torch_sim.synchronize()
            events.append(torch_sim.Stream().record_event())

        _by_flag(work)
        side = torch_sim.Stream()
        side.wait_event(events[0])
        with torch_sim.stream(side):
            data.mul_(2)

    assert _found() == []


@in_process_of_its_own
def test_backward_in_a_thread() -> None:
    """Autograd's threads know what the thread knows that calls backward, and no more."""
    with _followed():
        weight = torch.ones(4, device="sim", requires_grad=True)
        side = torch_sim.Stream()

        def work() -> None:
            torch_sim.synchronize()
            with torch_sim.stream(side):
                (weight * 2).sum().backward()
            side.synchronize()

        _by_join(work)
        assert weight.grad is not None
        weight.grad.mul_(2)

    assert _found() == []


@in_process_of_its_own
def test_threads_that_have_ended_are_forgotten() -> None:
    """Accesses that all living threads know are no longer kept."""
    with _followed():
        data, flag = torch.ones(4, device="sim"), _Flag()
        thread = threading.Thread(target=flag.wait)
        thread.start()
        for part in data.split(1):
            part.fill_(2)
        torch_sim.synchronize()
        data[:1].fill_(3)
        kept = build.active().Checker.get().history_size()
        flag.set()
        thread.join(DEADLINE_S)
        data[:1].fill_(4)

    assert build.active().Checker.get().history_size() < kept
    assert _found() == []
