"""
Ranks as threads of one process, on the simulated accelerator: rank r is a thread whose device is sim:r.

    losses = run_ranks(16, train, timeout_s=120)

64 ranks cost one process, where as processes they would need gigabytes and a minute to start. Each thread has a world
of torch.distributed of its own, and process groups whose collectives go through memory (`process_group`).

What ranks that are processes do not share, and threads do:
- Random numbers of the device: every device gets a generator of its own meanwhile, so that dropout on the device is a
  rank's own and the same in every run. The CPU's generator stays common: what is drawn from it on several ranks at once
  depends on the scheduler, so make weights and data before the ranks start, or from generators of their own.
- Modules, environment variables, default dtype, warnings, and whatever else Python keeps per process.
- The host's clock of the checker: what one rank's host waits for counts as known to all. Ranks share no memory on their
  devices, so that this hides nothing.
Autograd runs in the thread that calls `backward`, as for torch's own tests with threads.
"""

from __future__ import annotations

import queue
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, Final, Generic, TypeVar

import torch
import torch.distributed as dist
from torch._C import _distributed_c10d
from torch._C._distributed_c10d import HashStore, Store

from fsdp_conformance.config import SIMULATED
from fsdp_conformance.errors import ConfigError, RankRaised, RankTimedOut
from fsdp_conformance.simulator import build, device, process_group

__all__ = ["BACKENDS", "MAX_RANKS", "run_ranks"]

T = TypeVar("T")

#: What the default group of each rank is made with.
BACKENDS: Final = f"cpu:{process_group.BACKEND},{SIMULATED}:{process_group.BACKEND}"

#: A device index has 8 bits.
MAX_RANKS: Final = 127

#: A collective may take this part of the ranks' deadline, so that it is the first to speak, and tells who is missing.
_COLLECTIVE_PART: Final = 0.8

#: Seconds that ranks get to end after one has failed or the deadline has passed: what they wait for fails at once.
_GRACE_S: Final = 10.0


@dataclass(frozen=True, kw_only=True, slots=True)
class _Ended(Generic[T]):
    """How a rank ended."""

    rank: int
    result: T | None = None
    error: BaseException | None = None
    failed_at: float = 0.0
    """When it raised, before its peers could know."""


def run_ranks(world_size: int, function: Callable[[int], T], *, timeout_s: float) -> list[T]:
    """
    Call `function(rank)` in `world_size` threads, each a rank with an initialised default group; their results.

    The group serves tensors on the device and on the CPU. An exception of one rank ends the others, whose collectives
    fail, and is raised as RankRaised with its traceback. After `timeout_s` seconds RankTimedOut is raised with the
    stacks of all ranks that have not ended; a rank that computes without collectives cannot be ended, and its thread
    then outlives the call. Raises ConfigError for a size out of range, and inside of another `run_ranks`.
    """
    problems = []
    if not 1 <= world_size <= MAX_RANKS:
        problems.append(f"world_size={world_size}, but should be in [1, {MAX_RANKS}]")
    if timeout_s <= 0:
        problems.append(f"timeout_s={timeout_s}, but should be positive")
    if problems:
        raise ConfigError(problems, where="run_ranks")
    device.activate()
    if device.device_count() < world_size:
        device.activate(world_size)
    ended: queue.SimpleQueue[_Ended[T]] = queue.SimpleQueue()
    with process_group.thread_world() as world, _worlds_apart():
        store = HashStore()
        store.set_timeout(timedelta(seconds=timeout_s))
        ranks = [
            threading.Thread(
                target=_run_rank,
                args=(rank, world_size, function, store, world, timedelta(seconds=timeout_s * _COLLECTIVE_PART), ended),
                name=f"rank {rank}",
                daemon=True,
            )
            for rank in range(world_size)
        ]
        for thread in ranks:
            thread.start()
        return _collect(ranks, ended, world, timeout_s)


def _run_rank(
    rank: int,
    world_size: int,
    function: Callable[[int], T],
    store: Store,
    world: str,
    timeout: timedelta,
    ended: queue.SimpleQueue[_Ended[T]],
) -> None:
    """A rank's thread."""
    try:
        device.set_device(rank)
        with torch.autograd.set_multithreading_enabled(False):
            dist.init_process_group(BACKENDS, store=store, rank=rank, world_size=world_size, timeout=timeout)
            result = function(rank)
            dist.destroy_process_group()
    except BaseException as error:  # noqa: BLE001 - also SystemExit: a rank that ends early leaves its peers waiting
        failed_at = time.monotonic()
        # At once, and before the groups are left: leaving waits for what is under way.
        _abort(world, f"rank {rank} raised {type(error).__name__}: {error}")
        _leave_groups()
        ended.put(_Ended(rank=rank, error=error, failed_at=failed_at))
    else:
        ended.put(_Ended(rank=rank, result=result))


def _leave_groups() -> None:
    """Leave the groups of a rank that has failed."""
    if not dist.is_initialized():
        return
    try:
        dist.destroy_process_group()
    except Exception:  # noqa: BLE001 - the rank's first error is the one to tell
        traceback.print_exc(file=sys.stderr)


def _collect(
    ranks: list[threading.Thread], ended: queue.SimpleQueue[_Ended[T]], world: str, timeout_s: float
) -> list[T]:
    """The ranks' results, in order, once all have ended."""
    done: dict[int, _Ended[T]] = {}
    try:
        failed = _wait(ended, done, len(ranks), until=time.monotonic() + timeout_s)
        stacks = ""
        if failed is None and len(done) < len(ranks):
            stacks = _stacks(ranks, done)
            _abort(world, f"{_missing(ranks, done)} passed the deadline of {timeout_s} s")
        if len(done) < len(ranks):
            # What they wait for fails now.
            _wait(ended, done, len(ranks), until=time.monotonic() + _GRACE_S, to_the_last=True)
    except BaseException as error:
        _abort(world, f"the main thread raised {type(error).__name__}")
        raise
    for rank in done:
        ranks[rank].join()  # It has said how it ended, and waits for nobody any more.
    left = f"\nStill running, and not to be ended: {_missing(ranks, done)}." if len(done) < len(ranks) else ""
    if stacks:
        late = next(rank for rank in range(len(ranks)) if f"rank {rank}:\n" in stacks)
        raise RankTimedOut(
            f"timeout_s={timeout_s} passed, but all ranks should have ended by then.\n{stacks}{left}", rank=late
        )
    if failed is not None:
        # A peer that it has ended may have said so before it.
        failed = min((one for one in done.values() if one.error is not None), key=lambda one: one.failed_at)
    if failed is not None and failed.error is not None:
        text = "".join(traceback.format_exception(failed.error))
        raise RankRaised(f"rank {failed.rank} of {len(ranks)} raised\n{text}{left}", rank=failed.rank) from failed.error
    return [done[rank].result for rank in range(len(ranks))]  # type: ignore[misc]  # none has an error


def _wait(
    ended: queue.SimpleQueue[_Ended[T]],
    done: dict[int, _Ended[T]],
    number: int,
    *,
    until: float,
    to_the_last: bool = False,
) -> _Ended[T] | None:
    """Fill `done` until all ranks have ended, the deadline has passed, or (unless `to_the_last`) one has failed."""
    while len(done) < number:
        try:
            one = ended.get(timeout=max(0.0, until - time.monotonic()))
        except queue.Empty:
            return None
        done[one.rank] = one
        if one.error is not None and not to_the_last:
            return one
    return None


def _missing(ranks: list[threading.Thread], done: dict[int, Any]) -> str:
    return ", ".join(thread.name for rank, thread in enumerate(ranks) if rank not in done)


def _stacks(ranks: list[threading.Thread], done: dict[int, Any]) -> str:
    """Where each rank is that has not ended."""
    frames = sys._current_frames()
    texts = []
    for rank, thread in enumerate(ranks):
        frame = frames.get(thread.ident or 0)
        if rank not in done and frame is not None:
            texts.append(f"rank {rank}:\n{''.join(traceback.format_stack(frame))}")
    return "\n".join(texts)


@contextmanager
def _worlds_apart() -> Iterator[None]:
    """Torch's process groups are a thread's own, in Python and in C++; and the devices' generators each rank's."""
    from fsdp_conformance.harness.torch_testing import multi_threaded_pg

    extension = build.load()
    separate = extension.separate_generators()
    isolate: Any = getattr(_distributed_c10d, "_set_thread_isolation_mode")  # noqa: B009 - no stub has it
    isolate(True)
    worlds: Any = multi_threaded_pg
    worlds._install_threaded_pg()
    extension.set_separate_generators(True)
    try:
        yield
    finally:
        extension.set_separate_generators(separate)
        worlds._uninstall_threaded_pg()
        isolate(False)


def _abort(world: str, reason: str) -> None:
    build.load().abort_thread_world(world, reason)
