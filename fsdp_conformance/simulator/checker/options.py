"""
The options of the race checker and the device that a script's ranks and the processes they start have in common.

Standard library only: every Python process that a script starts reads this.
"""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["CheckerOptions"]


@dataclass(frozen=True, kw_only=True, slots=True)
class CheckerOptions:
    """The options of `sanitize` that hold in each process."""

    mode: str = "record"
    """The reaction to a hazard: `checker.Mode`."""
    reuse: str = "exact"
    """Which memory the checker lets new tensors share: `checker.Reuse`."""
    waits: str = "all"
    """Which waits of the host order streams: `checker.Waits`."""
    ordering_only: bool = False
    """Leave out kernels that only compute numbers: `ordering`."""
    memory: int | None = None
    """The memory of each device in bytes; None for no limit."""

    def apply(self) -> None:
        """Set all of it in this process. The device must be active."""
        from fsdp_conformance.simulator import checker
        from fsdp_conformance.simulator.checker import ordering
        from fsdp_conformance.simulator.device import memory

        checker.set_mode(self.mode)
        checker.set_reuse(self.reuse)
        checker.set_waits(self.waits)
        checker.set_uninitialized(True)
        ordering.set_ordering_only(self.ordering_only)
        if self.memory is not None:
            memory.set_memory_limit(self.memory)
