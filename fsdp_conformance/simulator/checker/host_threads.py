"""
Threads of the host: a wait of one orders what that thread does, and others from where Python hands it over to them.

It is handed over where a thread starts and is joined, by locks, events, conditions, semaphores, barriers, queues,
futures of `concurrent.futures`, and calls that asyncio makes in another thread. As in ThreadSanitizer, who gets a lock
after another thread knows what that thread knew; so a lock that two threads take in another order on the next run can
hide a race, but a pool of buffers behind a lock is none. What two threads agree on in another way is not known (a flag
that one polls, a pipe).

Autograd's threads have the clock of the thread that called backward. All that was started before counts as one.
"""

from __future__ import annotations

import functools
import os
import queue
import sys
import threading
from asyncio.base_events import BaseEventLoop
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from itertools import zip_longest
from types import FrameType
from typing import Any

from fsdp_conformance.simulator.device import build
from fsdp_conformance.simulator.frames import Owner, owner
from fsdp_conformance.simulator.replacements import Replacements

__all__ = ["follow_threads"]

#: For the waits of all kinds, and for those that the program asks for: the last finished operation of each lane.
_Known = tuple[list[int], list[int]]

#: Files whose conditions and semaphores are part of something that hands over by itself, more exactly.
_INSIDE = frozenset(
    str(sys.modules[kind.__module__].__file__)
    for kind in (threading.Condition, queue.Queue, ThreadPoolExecutor, Future)
)

#: Methods of conditions that call others of theirs.
_INDIRECT = ("notify_all", "wait_for", "__enter__")

_is_fork_followed = False


def follow_threads(replaced: Replacements) -> None:
    """From now on, threads that are started have their own clocks, until `replaced` is undone."""
    _follow_forks()
    replaced.set(
        threading.Thread,
        start=_starting(threading.Thread.start),
        _bootstrap_inner=_running(threading.Thread._bootstrap_inner),  # type: ignore[attr-defined]
        join=_ending(threading.Thread.join),
        is_alive=_ending(threading.Thread.is_alive),
    )
    replaced.set(threading, Lock=_locks(threading.Lock), RLock=_locks(threading.RLock))
    replaced.set(BaseEventLoop, call_soon_threadsafe=_calling_soon(BaseEventLoop.call_soon_threadsafe))
    replaced.set(
        threading.Event,
        set=_giving(threading.Event.set),
        wait=_taking(threading.Event.wait),
        is_set=_taking(threading.Event.is_set),
    )
    replaced.set(
        threading.Condition,
        notify=_giving(threading.Condition.notify, outside=_INSIDE),
        wait=_taking(threading.Condition.wait, outside=_INSIDE),
    )
    acquire = _taking(threading.Semaphore.acquire, outside=_INSIDE)
    replaced.set(
        threading.Semaphore,
        release=_giving(threading.Semaphore.release, outside=_INSIDE),
        acquire=acquire,
        __enter__=acquire,
    )
    replaced.set(threading.BoundedSemaphore, release=_giving(threading.BoundedSemaphore.release, outside=_INSIDE))
    replaced.set(threading.Barrier, wait=_giving(_taking(threading.Barrier.wait)))
    replaced.set(
        Future,
        set_result=_giving(Future.set_result),
        set_exception=_giving(Future.set_exception),
        result=_taking_always(Future.result),
        exception=_taking_always(Future.exception),
        done=_taking(Future.done),
    )
    _follow_queues(replaced)


def _follow_queues(replaced: Replacements) -> None:
    for kind in (queue.LifoQueue, queue.PriorityQueue):
        replaced.set(kind, _put=_giving(kind._put), _get=_taking_always(kind._get))
    put, get = queue.Queue._put, queue.Queue._get

    # Both are called with the queue's lock. Each item hands over what its producer knew then.
    def put_with_clock(self: Any, item: Any) -> None:
        vars(self).setdefault("_known_to_producers", deque()).append(_checker().known_here())
        put(self, item)

    def get_with_clock(self: Any) -> Any:
        known = vars(self).get("_known_to_producers")
        if known:  # else it was filled before
            _checker().learn(known.popleft())
        return get(self)

    replaced.set(
        queue.Queue,
        _put=put_with_clock,
        _get=get_with_clock,
        task_done=_giving(queue.Queue.task_done),
        join=_taking_always(queue.Queue.join),
    )
    replaced.set(queue, SimpleQueue=_SimpleQueue)


class _Lock:
    """A lock that hands over: those of Python are written in C."""

    def __init__(self, lock: Any) -> None:
        self._lock = lock

    def acquire(self, blocking: bool = True, timeout: float = -1) -> bool:
        """Take the lock. Returns False if another thread has it all the time."""
        is_taken: bool = self._lock.acquire(blocking, timeout)
        if is_taken:
            _take(self)
        return is_taken

    def release(self) -> None:
        """Give the lock back."""
        _give(self)
        self._lock.release()

    def __enter__(self) -> bool:
        return self.acquire()

    def __exit__(self, *unused: object) -> None:
        self.release()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._lock, name)


def _locks(make: Callable[[], Any]) -> Callable[[], Any]:
    """Makes locks that hand over, except for what hands over by itself, more exactly."""

    @functools.wraps(make)
    def made() -> Any:
        lock = make()
        return lock if sys._getframe(1).f_code.co_filename in _INSIDE else _Lock(lock)

    return made


def _calling_soon(call_soon: Callable[..., Any]) -> Callable[..., Any]:
    """`call_soon_threadsafe`, by which a future of another thread comes to the thread of an event loop."""

    @functools.wraps(call_soon)
    def calling(self: Any, callback: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        known = _checker().known_here()

        def learn_and_call(*given: Any) -> Any:
            _checker().learn(known)
            return callback(*given)

        return call_soon(self, learn_and_call, *args, **kwargs)

    return calling


class _SimpleQueue(queue.SimpleQueue):  # type: ignore[type-arg]
    """One that hands over: its class is written in C. Executors use it."""

    def put(self, item: Any, block: bool = True, timeout: float | None = None) -> None:
        """Add an item."""
        super().put((_checker().known_here(), item), block, timeout)

    def put_nowait(self, item: Any) -> None:
        """Add an item."""
        self.put(item)

    def get(self, block: bool = True, timeout: float | None = None) -> Any:
        """Remove an item."""
        known, item = super().get(block, timeout)
        _checker().learn(known)
        return item

    def get_nowait(self) -> Any:
        """Remove an item."""
        return self.get(False)


def _starting(start: Callable[..., None]) -> Callable[..., None]:
    @functools.wraps(start)
    def starting(self: Any) -> None:
        self._known_at_start = _checker().known_here()
        start(self)

    return starting


def _running(run: Callable[..., None]) -> Callable[..., None]:
    @functools.wraps(run)
    def running(self: Any) -> None:
        code = getattr(getattr(self, "_target", None), "__code__", None)
        # A thread of this package does nothing on a device, and its clock would stand still.
        if hasattr(self, "_known_at_end") or (code is not None and owner(code.co_filename) is Owner.MACHINERY):
            run(self)
            return
        self._known_at_end = None
        checker = _checker()
        checker.begin_host_thread()
        checker.learn(self._known_at_start)
        try:
            run(self)
        finally:
            self._known_at_end = checker.known_here()
            checker.end_host_thread()

    return running


def _ending(method: Callable[..., Any]) -> Callable[..., Any]:
    """`join` and `is_alive`: a thread that has ended hands over what it knew."""

    @functools.wraps(method)
    def ending(self: Any, *args: Any, **kwargs: Any) -> Any:
        result = method(self, *args, **kwargs)
        known = getattr(self, "_known_at_end", None)
        if known is not None and not is_alive(self):
            _checker().learn(known)
        return result

    is_alive = threading.Thread.is_alive
    return ending


def _giving(method: Callable[..., Any], *, outside: frozenset[str] = frozenset()) -> Callable[..., Any]:
    """A method that hands over to others what this thread knows."""

    @functools.wraps(method)
    def giving(self: Any, *args: Any, **kwargs: Any) -> Any:
        if not outside or _caller() not in outside:
            _give(self)
        return method(self, *args, **kwargs)

    return giving


def _taking(method: Callable[..., Any], *, outside: frozenset[str] = frozenset()) -> Callable[..., Any]:
    """A method that returns False unless others have handed over what they knew."""

    @functools.wraps(method)
    def taking(self: Any, *args: Any, **kwargs: Any) -> Any:
        result = method(self, *args, **kwargs)
        if result is not False and (not outside or _caller() not in outside):
            _take(self)
        return result

    return taking


def _taking_always(method: Callable[..., Any]) -> Callable[..., Any]:
    """A method that returns, or raises, when others have handed over what they knew."""

    @functools.wraps(method)
    def taking(self: Any, *args: Any, **kwargs: Any) -> Any:
        try:
            return method(self, *args, **kwargs)
        finally:
            _take(self)

    return taking


def _give(giver: Any) -> None:
    vars(giver)["_known_here"] = _merged(vars(giver).get("_known_here"), _checker().known_here())


def _take(giver: Any) -> None:
    known = vars(giver).get("_known_here")
    if known is not None:
        _checker().learn(known)


def _merged(first: _Known | None, second: _Known) -> _Known:
    if first is None:
        return second
    everything, explicit = ([*map(max, zip_longest(*pair, fillvalue=0))] for pair in zip(first, second, strict=True))
    return everything, explicit


def _caller() -> str:
    """The file that calls a method of a condition or a semaphore."""
    frame: FrameType | None = sys._getframe(2)
    while frame is not None and frame.f_code.co_filename == threading.__file__ and frame.f_code.co_name in _INDIRECT:
        frame = frame.f_back
    return frame.f_code.co_filename if frame is not None else ""


def _checker() -> Any:
    return build.active().Checker.get()


def _follow_forks() -> None:
    """In a child that is forked, the thread that forked is the only one."""
    global _is_fork_followed
    if not _is_fork_followed:
        os.register_at_fork(after_in_child=lambda: _checker().only_this_host_thread())
        _is_fork_followed = True
