"""The device of one rank of a case: bytes, allocations, and another device than its own."""

from __future__ import annotations

import gc
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist

from fsdp_conformance.adapters.structures import moved
from fsdp_conformance.cases.rank import CaseRank
from fsdp_conformance.checks.memory import Activations
from fsdp_conformance.driver.watch import watch_for
from fsdp_conformance.errors import EnvironmentUnavailable, SuiteError
from fsdp_conformance.harness.devices import device_count, use_device
from fsdp_conformance.plan import SIMULATED
from fsdp_conformance.workload.definition import Batch, BatchKey, Workload

#: How often memory is counted, and how many seconds apart: NCCL's watchdog, which wakes every 0.1 s, may yet free some.
_WATCHDOG_ROUNDS = 5
_WATCHDOG_PERIOD_S = 0.15


class CaseDevice:
    """
    The device that one rank of a case computes on.

    `has_engine` is False in a referee, whose ranks share the settings of one process and leave them as they are.
    """

    def __init__(self, here: CaseRank, *, has_engine: bool = True) -> None:
        self._here = here
        self._has_engine = has_engine

    def allocated_bytes(self) -> int:
        """Bytes allocated on this rank's accelerator now."""
        return watch_for(self._here.device).allocated_bytes()

    def allocated_bytes_without_backend(self, expected: int) -> int:
        """
        Bytes allocated on this rank's accelerator now, without those that the process group still holds. Collective.

        NCCL keeps the tensors of a collective whose Work was not waited for until the first collective after its
        watchdog has seen the end. DistributedDataParallel waits for futures instead, so the group holds its last
        buckets, which no engine can return. The wait for the watchdog ends at `expected` bytes.
        """
        module = torch.get_device_module(self._here.device_type)
        for _ in range(_WATCHDOG_ROUNDS):
            module.synchronize(self._here.device)
            flag = torch.tensor(float(self.allocated_bytes() > expected), device=self._here.device)
            dist.all_reduce(flag, op=dist.ReduceOp.MAX)
            more = flag.item()
            del flag
            if not more:
                break
            time.sleep(0 if self._here.device_type == SIMULATED else _WATCHDOG_PERIOD_S)
        return self.allocated_bytes()

    def activations(self, workload: Workload) -> Activations:
        """
        Bytes that one forward of the unwrapped model takes on this rank's device, beyond its parameters.

        Raises SuiteError if no allocator counts bytes there.
        """
        watch = watch_for(self._here.device)
        if not watch.counts_bytes:
            device = self._here.device
            raise SuiteError(f"no allocator counts bytes on {device}, so the case must ask for an accelerator")
        model = workload.build(self._here.rank).to(self._here.device)
        batch = self.placed(workload.batch(BatchKey(step=0, rank=self._here.rank, world_size=self._here.world_size)))
        watch.reset_peak()
        before = watch.allocated_bytes()
        loss = workload.loss(model(*batch.args, **batch.kwargs), batch)
        allocated, peak = watch.allocated_bytes() - before, watch.peak_bytes() - before
        del loss
        return Activations(kept=allocated, forward_peak=peak)

    def placed(self, batch: Batch) -> Batch:
        """The batch on this rank's device."""
        args, kwargs, target = (moved(part, self._here.device) for part in (batch.args, batch.kwargs, batch.target))
        return Batch(args=args, kwargs=kwargs, target=target)

    @contextmanager
    def another_device(self) -> Iterator[None]:
        """
        Make a device other than this rank's the current one.

        Raises EnvironmentUnavailable if this rank sees only one.
        """
        count = device_count(self._here.device.type)
        if count < 2:
            raise EnvironmentUnavailable(
                f"needs two devices of type {self._here.device.type} that each rank sees, got {count}"
            )
        if not self._has_engine:
            yield
            return
        use_device(torch.device(self._here.device.type, ((self._here.device.index or 0) + 1) % count))
        try:
            yield
        finally:
            use_device(self._here.device)

    @contextmanager
    def no_garbage_collection(self) -> Iterator[None]:
        """Disable garbage collection, so that memory is freed only when its last reference is dropped."""
        if not self._has_engine:
            yield
            return
        gc.collect()
        gc.disable()
        try:
            yield
        finally:
            gc.enable()

    @contextmanager
    def poisoned_allocations(self) -> Iterator[None]:
        """
        Fill memory that torch allocates without initialising with NaN.

        Uses torch's own mechanism: deterministic algorithms with `fill_uninitialized_memory`. Raises SuiteError if
        torch does not fill the memory.
        """
        if not self._has_engine:
            yield
            return
        deterministic = torch.are_deterministic_algorithms_enabled()
        warn_only = torch.is_deterministic_algorithms_warn_only_enabled()
        # The module replaces itself with an object that has this property, which type checkers do not see.
        memory: Any = torch.utils.deterministic
        filled = memory.fill_uninitialized_memory
        torch.use_deterministic_algorithms(True, warn_only=True)
        memory.fill_uninitialized_memory = True
        try:
            if not torch.empty(64).isnan().all():
                raise SuiteError("cannot poison padding: torch.empty is not filled with NaN")
            yield
        finally:
            memory.fill_uninitialized_memory = filled
            torch.use_deterministic_algorithms(deterministic, warn_only=warn_only)
