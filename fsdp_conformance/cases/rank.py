"""One rank of a case: what the parts of the base class share, and who is to blame for an exception."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch

from fsdp_conformance.adapters.base import Adapter
from fsdp_conformance.contract.case import Case
from fsdp_conformance.harness import context, devices
from fsdp_conformance.harness.accounting import Part
from fsdp_conformance.outcome.records import RankReport
from fsdp_conformance.plan import SIMULATED, InitMode, Plan
from fsdp_conformance.workload.definition import Workload


@dataclass(kw_only=True, slots=True)
class CaseRank:
    """One rank of a case, while its body runs."""

    case: Case
    rank: int
    world_size: int
    """Number of ranks of the current world, which may be smaller than the case's (`CaseWorlds`)."""
    device_type: str
    local_rank: int
    """The number of the rank on this host, and of its device."""
    declared: frozenset[str]
    """The flags that the implementation declares on this type of device."""
    report: RankReport
    subjects: list[Adapter] = field(default_factory=list)
    """Adapters that are open."""
    steps_trained: int = 0
    """Optimizer steps since the last `refusal` began."""
    blame: str | None = None
    """The part whose code runs; None for the suite's own."""
    on_refusal: list[Callable[[], None]] = field(default_factory=list)
    """Called when an exception was taken as a refusal."""

    @property
    def device(self) -> torch.device:
        """The device that this rank computes on."""
        return devices.device_of(self.device_type, self.local_rank)

    @property
    def reference_device(self) -> str:
        """
        The device that references are trained on: this rank's kind, or the CPU for the simulated accelerator.

        The simulated operations are bitwise the CPU's, so such a reference is valid and independent of the simulation.
        """
        return "cpu" if self.device_type == SIMULATED else self.device_type

    def declares(self, flag: str) -> bool:
        """True if the implementation declares the capability."""
        return flag in self.declared

    def plan(self, /, workload: Workload, **changes: Any) -> Plan:
        """A plan for the workload on the case's device, with `changes`."""
        # A CPU model stays where it is; for other devices it is moved before wrapping, if the engine supports that.
        moves = self.device_type != "cpu" and self.declares("init_before")
        defaults: dict[str, Any] = {
            "device": self.device_type,
            "init_mode": InitMode.BEFORE if moves else InitMode.NEVER,
            "units": workload.units,
            "local_units": workload.local_units,
            "ignored": workload.ignored,
        }
        return Plan(**{**defaults, **changes})

    @contextmanager
    def blaming(self, part: str) -> Iterator[None]:
        """Blame exceptions inside the block, and its time, on a part: implementation, adapter or suite."""
        before, self.blame = self.blame, part
        with context.working(Part.SUITE if part == "suite" else Part.ENGINE):
            yield
        # Not after an exception: the error's description then needs to know the part.
        self.blame = before

    def note_refusal(self) -> None:
        """Note that an exception was taken as a refusal: no part is to blame."""
        self.blame = None
        for call in self.on_refusal:
            call()
