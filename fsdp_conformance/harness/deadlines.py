"""
The deadlines of a case, each inside the next, so that the innermost that can explain a hang is the first to speak.

A collective that passes its own deadline raises in the rank, with the line of the call. A rank that passes its
deadline is asked for its stack and ended. The case's deadline is the last: whatever lives is killed.
"""

from __future__ import annotations

import time
from dataclasses import dataclass

from fsdp_conformance.errors import ConfigError


@dataclass(frozen=True, kw_only=True, slots=True)
class Deadlines:
    """How long each part of a case may take, in seconds."""

    collective_s: float
    """One collective; handed to init_process_group."""
    rank_s: float
    """From the start of the ranks to the report of each."""
    case_s: float
    """Everything, with the collection of stacks and the end of the ranks."""
    settle_s: float = 0.25
    """After the first failure, before the failed rank is let go: its peers may have failures of their own to report."""
    grace_s: float = 3.0
    """After that, before peers that have not reported are ended. gloo notices a lost peer at once, NCCL does not."""
    stack_s: float = 2.0
    """To collect stacks from ranks that hang."""
    shutdown_s: float = 10.0
    """From the last report to the end of the processes."""

    def __post_init__(self) -> None:
        problems = [
            f"{name}={getattr(self, name)}, but should be positive"
            for name in ("collective_s", "rank_s", "case_s", "grace_s", "stack_s", "shutdown_s")
            if getattr(self, name) <= 0
        ]
        if self.settle_s < 0:
            problems.append(f"settle_s={self.settle_s}, but should not be negative")
        if self.collective_s >= self.rank_s:
            problems.append(
                f"collective_s={self.collective_s}, but should be less than rank_s={self.rank_s}: "
                "otherwise the rank is ended before the collective can say what it waited for"
            )
        if self.rank_s >= self.case_s:
            problems.append(
                f"rank_s={self.rank_s}, but should be less than case_s={self.case_s}: "
                "otherwise no time is left to collect stacks"
            )
        if problems:
            raise ConfigError(problems, where="Deadlines")

    @classmethod
    def nested(
        cls, case_s: float, *, rank_s: float | None = None, collective_s: float | None = None, scale: float = 1.0
    ) -> Deadlines:
        """
        The deadlines of a case that may take `case_s`.

        A rank gets 85 % of it and a collective 60 %, unless said otherwise. `scale` multiplies all, for slow machines
        and debuggers.
        """
        rank_s = 0.85 * case_s if rank_s is None else rank_s
        collective_s = min(0.6 * case_s, 0.75 * rank_s) if collective_s is None else collective_s
        default = cls(collective_s=collective_s, rank_s=rank_s, case_s=case_s)
        return cls(
            collective_s=collective_s * scale,
            rank_s=rank_s * scale,
            case_s=case_s * scale,
            settle_s=default.settle_s * scale,
            grace_s=default.grace_s * scale,
            stack_s=default.stack_s * scale,
            shutdown_s=default.shutdown_s * scale,
        )


def remaining(deadline: float) -> float:
    """Seconds until a moment of time.monotonic(), not less than 0."""
    return max(0.0, deadline - time.monotonic())
