"""
Asynchronous collectives that complete as late as a backend may complete them, and out of order.

A collective that the code under test issues asynchronously is held back. The backend gets it when this rank next waits
for anything in a process group, so that a rank that waits always has its own part under way; collectives of a group
are handed over in the order of their issue. Its outputs arrive when its own `wait()` is called, no matter what was
waited for before, or at a barrier of its group.

A caller that takes a future instead of waiting (DDP's reducer) gets one that a thread completes after a random delay,
so that futures complete out of order. The thread also hands over what has been held back for long: a rank may wait for
its peers in a way that is invisible here, such as a store.

Everything else is passed on as it is: synchronous calls, messages between two ranks, tensors of other devices than the
CPU, and what a backend may reject at the call, such as sparse tensors.
"""

from __future__ import annotations

import contextlib
import heapq
import random
import threading
import time
import weakref
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch
from torch import Tensor
from torch.distributed import Work

from fsdp_conformance.errors import EnvironmentUnavailable
from fsdp_conformance.faults.pending import LateWork, PendingCollective
from fsdp_conformance.faults.poison import in_engine, is_poisoned, is_there, uncounted
from fsdp_conformance.faults.recorded import RecordedFault
from fsdp_conformance.harness.context import log
from fsdp_conformance.harness.recording.collective_log import Collective
from fsdp_conformance.harness.recording.process_group import DROPS_PYTHON_WORKS
from fsdp_conformance.history.collective import Op
from fsdp_conformance.stress import Provocation

#: The methods that can be held back. A backend raises at the call for what it cannot do, so anything that gloo may
#: reject is passed on at once. Names as in `collective_calls.METHODS`.
_METHODS = frozenset(
    {
        "allgather", "_allgather_base", "all_gather_single", "allgather_into_tensor_coalesced",
        "all_gather_single_coalesced", "_reduce_scatter_base", "reduce_scatter_single",
        "reduce_scatter_tensor_coalesced", "reduce_scatter_single_coalesced", "allreduce", "allreduce_coalesced",
        "broadcast", "reduce", "gather", "scatter", "alltoall_base", "all_to_all_single",
    }
)  # fmt: skip
_REDUCTIONS = frozenset({"", "SUM", "PRODUCT", "MIN", "MAX"})
_DTYPES = frozenset(
    {torch.float32, torch.float64, torch.float16, torch.bfloat16, torch.int8, torch.uint8, torch.int32, torch.int64}
)

#: The longest delay of a future.
_FUTURE_S = 0.005

#: How long a collective is held back if the rank waits for nothing. Engines reuse a buffer within microseconds of the
#: issue; a rank that waits by other means loses this time once.
_KEPT_BACK_S = 1.0

_NO_TIMEOUT = timedelta(0)


#: The time when it is due, the collective's number, the collective, and the future that triggers the caller's one (None
#: if no caller took a future).
_Promise = tuple[float, int, PendingCollective, "torch.futures.Future[Any] | None"]


class LateCollectives(RecordedFault):
    """Asynchronous collectives complete late and out of order, read their inputs late, and poison their outputs."""

    need = "the engine must issue asynchronous collectives of tensors on the CPU while it is installed"

    def __init__(self, lot: random.Random, strike: Callable[[Provocation], None] = uncounted) -> None:
        super().__init__()
        if DROPS_PYTHON_WORKS:  # DDP's constructor waits in C++
            raise EnvironmentUnavailable(
                f"late collectives (--stress) need torch 2.7 or newer, got {torch.__version__}: before, torch drops "
                "the Python half of a collective, which completes it late. Install a newer torch, or leave them out."
            )
        self._lot = lot
        self._count = strike
        self._lock = threading.RLock()
        self._changed = threading.Condition(self._lock)
        self._kept: list[tuple[float, PendingCollective]] = []
        """Collectives that are held back, in the order of issue, with the time of the issue."""
        self._open: dict[int, PendingCollective] = {}
        """Collectives that have not finished, by number."""
        self._promised: list[_Promise] = []
        """A heap of the collectives that complete without a wait; the one that is due first is on top."""
        self._number = 0
        self._thread: threading.Thread | None = None

    def describe(self) -> str:
        """E.g. "late completion of asynchronous collectives on every rank"."""
        return f"late completion of asynchronous collectives on {self._ranks_phrase()}"

    def issue(self, collective: Collective) -> Work | None:
        """Hold the collective back if that is possible, else pass it on. Returns the work for its caller."""
        outputs = collective.traffic.outputs
        if in_engine() and any(is_poisoned(output) for output in outputs if output.device.type == "cpu"):
            self._strike(Provocation.NEW)
        if not self._can_be_late(collective):
            return self._pass_on(collective)
        with self._lock:
            pending = self._keep_back(collective)
            work = LateWork(pending, self._finish, self._start_all, self._promise)
            # No code waits for a Work that was dropped, but a backend completes it all the same.
            weakref.finalize(work, self._drop, pending.number).atexit = False
        return work

    def _can_be_late(self, collective: Collective) -> bool:
        traffic = collective.traffic
        tensors = (*traffic.inputs, *traffic.outputs)
        synchronous = any(
            getattr(value, "asyncOp", True) is False for value in (*collective.args, *collective.kwargs.values())
        )
        return (
            collective.record.name in _METHODS
            and traffic.reduce_op in _REDUCTIONS
            and not synchronous
            and all(map(_is_plain, tensors))
            and self._strikes_here()
            and in_engine()
        )

    def _keep_back(self, collective: Collective) -> PendingCollective:
        inputs, outputs = collective.traffic.inputs, collective.traffic.outputs
        in_place = {id(tensor) for tensor in inputs} & {id(tensor) for tensor in outputs}
        # An in-place collective cannot both keep its input for later and poison it, so a random number decides.
        reads_late = self._lot.random() < 0.5 if in_place else not _share_memory(inputs, outputs)
        self._number += 1
        pending = PendingCollective(collective, self._number, reads_late=reads_late)
        self._kept.append((time.monotonic(), pending))
        self._open[pending.number] = pending
        self._strike(Provocation.LATE)
        if any(output.numel() for output in outputs):
            self._strike(Provocation.POISONED)
        if reads_late:
            self._strike(Provocation.READ_LATE)
        self._run_thread()
        return pending

    def _pass_on(self, collective: Collective) -> Work | None:
        """Issue it now. The call may wait for other ranks, so what is held back must start first."""
        self._start_all()
        if collective.traffic.op is Op.BARRIER:
            # A barrier of gloo waits for all collectives that the group was given before.
            with self._lock:
                before = [each for each in self._open.values() if each.collective.group is collective.group]
            for pending in before:
                self._finish(pending, _NO_TIMEOUT)
        return collective.issue()

    def _start_all(self) -> None:
        with self._lock:
            waiting, self._kept = self._kept, []
            for _, pending in waiting:
                pending.start()

    def _finish(self, pending: PendingCollective, timeout: timedelta) -> None:
        """Wait for the backend, then deliver."""
        self._start_all()
        try:
            pending.wait_for_backend(timeout)
        except BaseException:
            with self._lock:
                self._open.pop(pending.number, None)
            raise
        with self._lock:
            if not pending.finished:
                pending.finish()
                self._open.pop(pending.number, None)
                if any(number < pending.number for number in self._open):
                    self._strike(Provocation.OVERTAKEN)

    def _drop(self, number: int) -> None:
        """Called when the Work is garbage: unless a future completes the collective, the thread does after a while."""
        with self._changed:
            pending = self._open.get(number)
            if pending is not None and not any(each is pending for _, _, each, _ in self._promised):
                heapq.heappush(self._promised, (time.monotonic() + _KEPT_BACK_S, number, pending, None))

    def _promise(self, pending: PendingCollective) -> torch.futures.Future[Any]:
        def complete(_: torch.futures.Future[Any]) -> list[Tensor]:
            self._finish(pending, _NO_TIMEOUT)
            return list(pending.outputs)

        trigger: torch.futures.Future[Any] = torch.futures.Future()
        with self._changed:
            due = time.monotonic() + self._lot.uniform(0, _FUTURE_S)
            heapq.heappush(self._promised, (due, pending.number, pending, trigger))
            self._changed.notify()
        # An exception of the callback is an error of this future in C++ too; one of `set_exception` is a value there.
        return trigger.then(complete)

    # The thread.

    def _run_thread(self) -> None:
        if self._thread is None:
            self._thread = threading.Thread(target=self._work_off, name="late collectives", daemon=True)
            self._thread.start()

    def _work_off(self) -> None:
        """Complete futures when they are due, and start what was held back for long."""
        while (due := self._next_due()) is not None:
            self._start_all()
            for _, _, pending, trigger in due:
                if trigger is not None:
                    trigger.set_result(None)
                else:
                    # No code waits for it.
                    with contextlib.suppress(Exception):
                        self._finish(pending, _NO_TIMEOUT)

    def _next_due(self) -> list[_Promise] | None:
        """Sleep until there is something to do. Returns what is to complete, or None at the end."""
        with self._changed:
            while self._installed or self._promised:
                now = time.monotonic()
                ready = []
                while self._promised and (self._promised[0][0] <= now or not self._installed):
                    ready.append(heapq.heappop(self._promised))
                if ready or (self._kept and self._kept[0][0] + _KEPT_BACK_S <= now):
                    return ready
                times = [due for due, *_ in self._promised[:1]]
                times += [issued + _KEPT_BACK_S for issued, _ in self._kept[:1]]
                self._changed.wait(max(0.0, min(times) - now) if times else _KEPT_BACK_S)
        return None

    def _attach(self) -> None:
        super()._attach()
        log().issuer = self.issue

    def _detach(self) -> None:
        # New collectives go to the backend directly from here on; the thread ends when it has completed the old ones.
        log().issuer = Collective.issue
        self._start_all()
        with self._changed:
            self._changed.notify()
        if self._thread is not None:
            self._thread.join()
            self._thread = None
        super()._detach()

    def _strike(self, provocation: Provocation) -> None:
        self._fired += 1
        self._count(provocation)


def _is_plain(tensor: Tensor) -> bool:
    """True if gloo takes the tensor as it is."""
    return (
        tensor.device.type == "cpu"
        and tensor.layout is torch.strided
        and tensor.is_contiguous()
        and tensor.dtype in _DTYPES
        and is_there(tensor)
    )


def _share_memory(inputs: tuple[Tensor, ...], outputs: tuple[Tensor, ...]) -> bool:
    """True if an input and an output may overlap."""
    storages = {tensor.untyped_storage().data_ptr() for tensor in outputs if tensor.numel()}
    return any(tensor.numel() and tensor.untyped_storage().data_ptr() in storages for tensor in inputs)
