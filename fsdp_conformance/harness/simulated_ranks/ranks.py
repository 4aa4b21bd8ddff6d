"""
Simulated ranks: N ranks of one world as threads of one process, for worlds that no machine at hand has.

    losses = run_ranks(64, train, timeout_s=120)

Each rank has a world of torch.distributed of its own, whose groups communicate in memory (`simulated_group`), random
numbers of its own, and whatever else `rank_state` keeps apart. The ranks take turns (`rank_scheduler`), so a run is the
same each time, and no rank waits for a deadline in vain.

What ranks that are processes do not share, and these do: modules and their globals, warnings, the allocator of
the CPU, and their end: a signal ends all of them.
Autograd runs in the thread that calls `backward`, as for torch's own tests with threads.
"""

from __future__ import annotations

import queue
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, Final, Generic, TypeVar

import torch
import torch.distributed as dist
from torch._C import _distributed_c10d

from fsdp_conformance.errors import ConfigError, RankRaised, RankTimedOut
from fsdp_conformance.harness import devices
from fsdp_conformance.harness.rendezvous import SCHEME, meeting_at
from fsdp_conformance.harness.simulated_ranks import scheduler as rank_scheduler
from fsdp_conformance.harness.simulated_ranks.group import simulated_groups
from fsdp_conformance.harness.simulated_ranks.scheduler import RankScheduler
from fsdp_conformance.harness.simulated_ranks.state import RankState
from fsdp_conformance.harness.simulated_ranks.store import SimulatedStore

T = TypeVar("T")

#: Seconds that ranks get to end after one has failed or the deadline has passed: what they wait for fails at once.
_GRACE_S: Final = 10.0

#: What a device that is there needs for ranks in one process: entered once for all ranks.
device_worlds: list[Callable[[int], AbstractContextManager[Any]]] = []

#: Called in the thread of each rank, with its number, before anything else.
device_ranks: list[Callable[[int], object]] = []


@dataclass(frozen=True, kw_only=True, slots=True)
class _Ended(Generic[T]):
    """How a rank ended."""

    rank: int
    result: T | None = None
    error: BaseException | None = None


def run_ranks(world_size: int, function: Callable[[int], T], *, timeout_s: float, backend: str = "") -> list[T]:
    """
    Call `function(rank)` on `world_size` simulated ranks with an initialised default group; their results.

    The group serves tensors on the CPU, and on the simulated accelerator where it is active. An exception of one rank
    ends the others when they wait for it, and is raised as RankRaised with its traceback. After `timeout_s` seconds
    RankTimedOut is raised with the stacks of all ranks that have not ended; a rank that computes without collectives
    cannot be ended, and its thread then outlives the call. Raises ConfigError for a size out of range, and inside of
    another `run_ranks`.
    """
    problems = []
    if world_size < 1:
        problems.append(f"world_size={world_size}, but should be at least 1")
    if timeout_s <= 0:
        problems.append(f"timeout_s={timeout_s}, but should be positive")
    if problems:
        raise ConfigError(problems, where="run_ranks")

    def body(rank: int) -> T:
        dist.init_process_group(
            backend or default_backend(),
            init_method=f"{SCHEME}://",
            rank=rank,
            world_size=world_size,
            timeout=timedelta(seconds=timeout_s),
        )
        result = function(rank)
        rank_scheduler.running().finish()
        dist.destroy_process_group()
        return result

    with simulated_world([RankState() for _ in range(world_size)]) as scheduler:
        ended: queue.SimpleQueue[_Ended[T]] = queue.SimpleQueue()
        threads = start_ranks(scheduler, lambda rank: ended.put(_run(rank, body)))
        return _collect(threads, ended, scheduler, timeout_s)


def default_backend() -> str:
    """The backends of all devices that simulated ranks have in this process."""
    return devices.SIMULATED_BACKEND if device_ranks else "gloo"


@contextmanager
def simulated_world(states: Sequence[RankState]) -> Iterator[RankScheduler]:
    """What torch keeps of process groups is a thread's own inside, and the ranks meet in memory."""
    from fsdp_conformance.harness.torch_testing import multi_threaded_pg

    scheduler = RankScheduler(states)
    isolate: Any = getattr(_distributed_c10d, "_set_thread_isolation_mode")  # noqa: B009 - no stub has it
    worlds: Any = multi_threaded_pg
    own = RankState()
    rank_scheduler.use(scheduler)
    try:
        with ExitStack() as stack:
            own.save()
            stack.callback(own.restore)
            isolate(True)
            stack.callback(isolate, False)
            worlds._install_threaded_pg()
            stack.callback(worlds._uninstall_threaded_pg)
            store = SimulatedStore()
            stack.enter_context(meeting_at(lambda: (store, scheduler.rank, len(states))))
            stack.enter_context(_meshes_apart())
            stack.enter_context(simulated_groups())
            for enter in device_worlds:
                stack.enter_context(enter(len(states)))
            yield scheduler
    finally:
        rank_scheduler.use(None)


@contextmanager
def _meshes_apart() -> Iterator[None]:
    """
    Meshes of two ranks are never equal: what DTensor caches by mesh is a rank's own.

    Torch counts the thread into a mesh whose default group is of its own backend for threads.
    """
    from torch.distributed import device_mesh

    module: Any = device_mesh
    ask = module.get_backend
    module.get_backend = lambda group=None: "threaded" if group is None else ask(group)
    try:
        yield
    finally:
        module.get_backend = ask


def start_ranks(scheduler: RankScheduler, body: Callable[[int], object]) -> list[threading.Thread]:
    """Threads that call `body(rank)` in turns, as `scheduler` gives them."""

    def live(rank: int) -> None:
        scheduler.enter(rank)
        try:
            for begin in device_ranks:
                begin(rank)
            with torch.autograd.set_multithreading_enabled(False):
                body(rank)
        finally:
            scheduler.leave()

    threads = [
        threading.Thread(target=live, args=(rank,), name=f"rank {rank}", daemon=True)
        for rank in range(scheduler.world_size)
    ]
    for thread in threads:
        thread.start()
    return threads


def _run(rank: int, body: Callable[[int], T]) -> _Ended[T]:
    """The whole life of a rank, in its thread."""
    try:
        return _Ended(rank=rank, result=body(rank))
    except BaseException as error:  # noqa: BLE001 - also SystemExit: a rank that ends early leaves its peers waiting
        ended: _Ended[T] = _Ended(rank=rank, error=error)
        rank_scheduler.running().finish(failure=f"{type(error).__name__}: {error}")
        _leave_groups()
        return ended


def _leave_groups() -> None:
    """Leave the groups of a rank that has failed."""
    if not dist.is_initialized():
        return
    try:
        dist.destroy_process_group()
    except Exception:  # noqa: BLE001 - the rank's first error is the one to tell
        traceback.print_exc(file=sys.stderr)


def _collect(
    threads: Sequence[threading.Thread], ended: queue.SimpleQueue[_Ended[T]], scheduler: RankScheduler, timeout_s: float
) -> list[T]:
    """The ranks' results, in order, once all have ended."""
    done: dict[int, _Ended[T]] = {}
    stacks = ""
    try:
        _wait(ended, done, len(threads), until=time.monotonic() + timeout_s)
        if len(done) < len(threads):
            stacks = _stacks(threads, done)
            scheduler.end(f"{_missing(threads, done)} passed the deadline of {timeout_s} s")
            _wait(ended, done, len(threads), until=time.monotonic() + _GRACE_S)
    except BaseException as error:
        scheduler.end(f"the main thread raised {type(error).__name__}")
        raise
    for rank in done:
        threads[rank].join()  # It has said how it ended, and waits for nobody any more.
    left = f"\nStill running, and not to be ended: {_missing(threads, done)}." if len(done) < len(threads) else ""
    if stacks:
        late = next(rank for rank in range(len(threads)) if f"rank {rank}:\n" in stacks)
        raise RankTimedOut(
            f"timeout_s={timeout_s} passed, but all ranks should have ended by then.\n{stacks}{left}", rank=late
        )
    failed = next((done[rank] for rank in scheduler.failed if done[rank].error is not None), None)
    if failed is not None and failed.error is not None:
        text = "".join(traceback.format_exception(failed.error))
        raise RankRaised(
            f"rank {failed.rank} of {len(threads)} raised\n{text}{left}", rank=failed.rank
        ) from failed.error
    return [done[rank].result for rank in range(len(threads))]  # type: ignore[misc]  # none has an error


def _wait(ended: queue.SimpleQueue[_Ended[T]], done: dict[int, _Ended[T]], number: int, *, until: float) -> None:
    """Fill `done` until all ranks have ended or the deadline has passed."""
    while len(done) < number:
        try:
            one = ended.get(timeout=max(0.0, until - time.monotonic()))
        except queue.Empty:
            return
        done[one.rank] = one


def _missing(threads: Sequence[threading.Thread], done: Mapping[int, Any]) -> str:
    return ", ".join(thread.name for rank, thread in enumerate(threads) if rank not in done)


def _stacks(threads: Sequence[threading.Thread], done: Mapping[int, Any]) -> str:
    """Where each rank is that has not ended."""
    frames = sys._current_frames()
    texts = []
    for rank, thread in enumerate(threads):
        frame = frames.get(thread.ident or 0)
        if rank not in done and frame is not None:
            texts.append(f"rank {rank}:\n{''.join(traceback.format_stack(frame))}")
    return "\n".join(texts)
