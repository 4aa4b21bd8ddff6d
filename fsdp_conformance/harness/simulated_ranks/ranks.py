"""
Simulated ranks: N ranks of one world as threads of one process, for worlds larger than any machine at hand.

    losses = run_ranks(64, train, timeout_s=120)

Each rank has its own world of torch.distributed, whose groups communicate in memory (`group`), its own random numbers,
and whatever else `state` switches. The ranks take turns (`scheduler`), so every run is the same, and a rank that can
never stop waiting gets an error at once.

Unlike processes, these ranks share modules and their globals, warnings and the CPU's allocator, and a signal ends all
of them. Autograd runs in the thread that calls `backward`, as in torch's own tests with threads.
"""

from __future__ import annotations

import queue
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
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
from fsdp_conformance.plan import SIMULATED

T = TypeVar("T")

#: How long ranks may take to end after one failed or the deadline passed: everything that they wait for fails at once.
_GRACE_S: Final = 10.0


@dataclass(frozen=True, kw_only=True, slots=True)
class _Ended(Generic[T]):
    """How a rank ended."""

    rank: int
    result: T | None = None
    error: BaseException | None = None


def run_ranks(world_size: int, function: Callable[[int], T], *, timeout_s: float, backend: str = "") -> list[T]:
    """
    Call `function(rank)` on `world_size` simulated ranks with an initialised default group, and return the results.

    The group serves tensors on the CPU, and on the simulated accelerator if it is active. If a rank raises, the ranks
    that wait for it end, and its exception is raised as RankRaised with its traceback. After `timeout_s` seconds
    RankTimedOut is raised with the stacks of all ranks that have not ended; a rank that computes without collectives
    cannot be stopped, and its thread outlives the call. Raises ConfigError for a size out of range, and inside another
    `run_ranks`.
    """
    problems = []
    if world_size < 1:
        problems.append(f"world_size must be at least 1, got {world_size}")
    if timeout_s <= 0:
        problems.append(f"timeout_s must be positive, got {timeout_s}")
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
    """The backends of all devices that simulated ranks can use in this process."""
    return devices.SIMULATED_BACKEND if _simulated_device() is not None else "gloo"


def _simulated_device() -> Any:
    """Return `torch.sim`, which the simulated accelerator registers; None if it is not active in this process."""
    return getattr(torch, SIMULATED, None)


@contextmanager
def simulated_world(states: Sequence[RankState]) -> Iterator[RankScheduler]:
    """Inside, each thread has its own process groups, and the ranks communicate in memory."""
    from fsdp_conformance.harness.torch_testing import multi_threaded_pg

    scheduler = RankScheduler(states)
    isolate: Any = getattr(_distributed_c10d, "_set_thread_isolation_mode")  # noqa: B009 - no stub has it
    worlds: Any = multi_threaded_pg
    own = RankState()
    _keep_guard_of_cuda()
    rank_scheduler.use(scheduler)
    try:
        with ExitStack() as stack:
            # Registered first, so that the state of the process is restored last, after all that belongs to the ranks.
            own.save()
            stack.callback(own.restore)
            isolate(True)
            stack.callback(isolate, False)
            worlds._install_threaded_pg()
            stack.callback(worlds._uninstall_threaded_pg)
            stack.enter_context(_without_torchcomms(worlds.ThreadLocalWorld))
            store = SimulatedStore()
            stack.enter_context(meeting_at(lambda: (store, scheduler.rank, len(states))))
            stack.enter_context(_meshes_apart())
            stack.enter_context(_profilers_off())
            stack.enter_context(simulated_groups())
            device = _simulated_device()
            if device is not None:
                stack.enter_context(device.thread_world(len(states), scheduler.wait_until))
            yield scheduler
    finally:
        rank_scheduler.use(None)


def _keep_guard_of_cuda() -> None:
    """
    Let this thread, which outlives the ranks, make the guard that torch uses for CUDA where there is no GPU.

    In torch 2.10 and 2.11, built for CUDA, it belongs to the thread that first enters a fake mode. When that thread has
    ended, the next one that enters such a mode dies with SIGSEGV.
    """
    make = getattr(torch._C, "_ensureCUDADeviceGuardSet", None)
    if make is not None and not devices.device_count("cuda"):
        make()


@contextmanager
def _without_torchcomms(world: Any) -> Iterator[None]:
    """
    Give the world of a thread the empty list of torchcomms' communicators, which groups clear when they end.

    In torch 2.11 the world of a process has one, and that of a thread was forgotten.
    """
    if hasattr(world, "comms") or not hasattr(dist.distributed_c10d._World, "comms"):
        yield
        return
    world.comms = property(lambda self: [])
    try:
        yield
    finally:
        del world.comms


@contextmanager
def _profilers_off() -> Iterator[None]:
    """
    Turn off the stopwatch with which FSDP1 times its state dicts.

    It keeps what is being timed once per process, and ranks that take turns would clear it for each other.
    """
    from torch.distributed.fsdp import _debug_utils

    stopwatch: Any = _debug_utils.SimpleProfiler
    original = vars(stopwatch)["profile"]
    stopwatch.profile = staticmethod(lambda kind: nullcontext())
    try:
        yield
    finally:
        stopwatch.profile = original


@contextmanager
def _meshes_apart() -> Iterator[None]:
    """
    Make meshes of different ranks unequal, so that DTensor's caches, which are keyed by mesh, do not mix ranks.

    Torch includes the thread in a mesh's identity if the default group has torch's own backend for threads.
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
    """Start threads that call `body(rank)`, in the turns that `scheduler` gives them."""

    def live(rank: int) -> None:
        scheduler.enter(rank)
        try:
            device = _simulated_device()
            if device is not None:
                device.set_device(rank)
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
    """Destroy the groups of a rank that has failed."""
    if not dist.is_initialized():
        return
    try:
        dist.destroy_process_group()
    except Exception:  # noqa: BLE001 - the rank's first error is reported
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
        threads[rank].join()  # its result is in, and it waits for no other rank
    still_running = f"\nStill running: {_missing(threads, done)}." if len(done) < len(threads) else ""
    if stacks:
        late = next(rank for rank in range(len(threads)) if f"rank {rank}:\n" in stacks)
        raise RankTimedOut(f"some ranks did not end within timeout_s={timeout_s}.\n{stacks}{still_running}", rank=late)
    failed = next((done[rank] for rank in scheduler.failed if done[rank].error is not None), None)
    if failed is not None and failed.error is not None:
        text = "".join(traceback.format_exception(failed.error))
        raise RankRaised(
            f"rank {failed.rank} of {len(threads)} raised\n{text}{still_running}", rank=failed.rank
        ) from failed.error
    return [done[rank].result for rank in range(len(threads))]  # type: ignore[misc]  # none has an error


def _wait(ended: queue.SimpleQueue[_Ended[T]], done: dict[int, _Ended[T]], number: int, *, until: float) -> None:
    """Add to `done` until all ranks have ended or the deadline has passed."""
    while len(done) < number:
        try:
            ending = ended.get(timeout=max(0.0, until - time.monotonic()))
        except queue.Empty:
            return
        done[ending.rank] = ending


def _missing(threads: Sequence[threading.Thread], done: Mapping[int, Any]) -> str:
    return ", ".join(thread.name for rank, thread in enumerate(threads) if rank not in done)


def _stacks(threads: Sequence[threading.Thread], done: Mapping[int, Any]) -> str:
    """The stack of each rank that has not ended."""
    frames = sys._current_frames()
    texts = []
    for rank, thread in enumerate(threads):
        frame = frames.get(thread.ident or 0)
        if rank not in done and frame is not None:
            texts.append(f"rank {rank}:\n{''.join(traceback.format_stack(frame))}")
    return "\n".join(texts)
