"""
Allocator statistics of a device, and the checker of the simulated one: what the loop needs besides tensors.

    watch_for(device)   a CPU that counts nothing, an accelerator that counts bytes, or the simulated one

On an accelerator, reading a tensor on the host waits for the device, and a wait orders everything issued before it: a
loop that reads losses between forward and backward hides races. On the simulated accelerator, reads inside
`suspended()` do not wait; on a real one, the loop reads at the end of a step.
"""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch

from fsdp_conformance.harness.warm_up import warm_up
from fsdp_conformance.history.hazard import HazardKind, HazardRecord
from fsdp_conformance.plan import SIMULATED
from fsdp_conformance.simulator.checker.hazard import Hazard


class Watch:
    """The CPU: counts and checks nothing."""

    counts_bytes = False
    checks_order = False
    """True if races are detected."""

    def suspended(self) -> AbstractContextManager[Any]:
        """A context in which this thread's accesses are not part of the test."""
        return nullcontext()

    def label(self, text: str) -> AbstractContextManager[Any]:
        """A context whose accesses are labelled with `text`."""
        return nullcontext()

    def synchronise(self) -> None:
        """Wait for the device."""

    def begin(self) -> None:
        """Discard everything recorded so far."""

    def hazards(self) -> list[HazardRecord]:
        """The races seen since `begin`."""
        return []

    def accesses(self) -> int:
        """Accesses checked since `begin`."""
        return 0

    def streams(self) -> int:
        """Streams of the device that were used since `begin`."""
        return 0

    def allocated_bytes(self) -> int:
        """Bytes allocated now."""
        return 0

    def peak_bytes(self) -> int:
        """The most bytes allocated at once since the last `reset_peak`."""
        return 0

    def reset_peak(self) -> None:
        """Restart the peak at the bytes allocated now."""

    def bytes_in_host(self) -> int:
        """Bytes of this process's host memory that are the device's."""
        return 0

    def free_unused(self) -> None:
        """Free host memory that the device keeps for later: it is not the engine's."""


class AcceleratorWatch(Watch):
    """An accelerator whose allocator counts bytes, like CUDA's."""

    counts_bytes = True

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.module: Any = torch.get_device_module(device.type)
        self.counts_bytes = all(
            hasattr(self.module, name)
            for name in ("memory_allocated", "max_memory_allocated", "reset_peak_memory_stats")
        )

    def begin(self) -> None:
        """Let the device's libraries allocate now what they would allocate in the first step, and keep."""
        warm_up(self.device)
        self.synchronise()

    def synchronise(self) -> None:
        self.module.synchronize(self.device)

    def allocated_bytes(self) -> int:
        return int(self.module.memory_allocated(self.device))

    def peak_bytes(self) -> int:
        return int(self.module.max_memory_allocated(self.device))

    def reset_peak(self) -> None:
        self.module.reset_peak_memory_stats(self.device)


class SimulatedWatch(AcceleratorWatch):
    """The simulated accelerator and its checker."""

    checks_order = True

    def __init__(self, device: torch.device) -> None:
        super().__init__(device)
        from fsdp_conformance.simulator import checker

        self._checker = checker
        self._accesses = 0
        self._submitted: dict[int, int] = {}

    def suspended(self) -> AbstractContextManager[Any]:
        return self._checker.suspended()

    def label(self, text: str) -> AbstractContextManager[Any]:
        return self._checker.label(text)

    def synchronise(self) -> None:
        """Does nothing: operations run when they are issued, and a wait would hide races."""

    def begin(self) -> None:
        # Ranks that are threads share a checker, but each has its own device.
        self._checker.clear(self.device.index)
        self._accesses = self._checker.accesses()
        self._submitted = self._checker.submitted(self.device.index)

    def bytes_in_host(self) -> int:
        return int(self.module.memory_reserved(self.device))

    def free_unused(self) -> None:
        from fsdp_conformance.simulator.device import memory

        memory.free_staging()

    def hazards(self) -> list[HazardRecord]:
        return [hazard_record(hazard) for hazard in self._checker.hazards(self.device.index)]

    def accesses(self) -> int:
        return self._checker.accesses() - self._accesses

    def streams(self) -> int:
        counts = self._checker.submitted(self.device.index)
        return sum(count > self._submitted.get(lane, 0) for lane, count in counts.items())


def hazard_record(hazard: Hazard) -> HazardRecord:
    """The form in which a run's history stores a hazard."""
    return HazardRecord(
        kind=HazardKind(hazard.kind),
        then_op=hazard.then.site.op,
        then_label=hazard.then.site.label,
        now_op=hazard.now.site.op,
        now_label=hazard.now.site.label,
        sentence=hazard.sentence(),
        text=hazard.explain(),
        count=hazard.count,
    )


def watch_for(device: torch.device) -> Watch:
    """The watch for a rank's device."""
    if device.type == "cpu":
        return Watch()
    return SimulatedWatch(device) if device.type == SIMULATED else AcceleratorWatch(device)
