"""
The nested deadlines of a case: the innermost one that can explain a hang expires first.

A collective that passes its deadline raises in the rank, with the line of the call. A rank that passes its deadline is
asked for its stack and terminated. At the case's deadline, whatever lives is killed.

These are the deadlines of the code under test. The suite's own work on a rank (references, comparisons, analysis) stops
them and has its own deadline, `suite_s`: see `harness.accounting`.
"""

from __future__ import annotations

import time
from dataclasses import dataclass, replace

from fsdp_conformance.errors import ConfigError

_DAY_S = 86400.0


@dataclass(frozen=True, kw_only=True, slots=True)
class Deadlines:
    """How long each part of a case may take, in seconds."""

    collective_s: float
    """One collective; passed to init_process_group, but not for NCCL (`order.CaseOrder.collective_timeout_s`)."""
    rank_s: float
    """From the start of the ranks to the report of each, without the suite's own work."""
    case_s: float
    """Everything but the suite's own work, including the collection of stacks and the end of the ranks."""
    suite_s: float = 120.0
    """The suite's own work."""
    settle_s: float = 0.25
    """From the first failure to the release of the failed rank: its peers may have their own failures to report."""
    grace_s: float = 3.0
    """After that, until peers that have not reported are terminated: NCCL, unlike gloo, does not notice a lost peer."""
    stack_s: float = 2.0
    """For collecting the stacks of ranks that hang."""
    shutdown_s: float = 10.0
    """From the last report to the end of the processes."""

    def __post_init__(self) -> None:
        problems = [
            f"{name} must be positive, got {getattr(self, name)}"
            for name in ("collective_s", "rank_s", "case_s", "suite_s", "grace_s", "stack_s", "shutdown_s")
            if getattr(self, name) <= 0
        ]
        if self.settle_s < 0:
            problems.append(f"settle_s must not be negative, got {self.settle_s}")
        if self.collective_s >= self.rank_s:
            problems.append(
                f"collective_s must be less than rank_s={self.rank_s}, got {self.collective_s}: "
                "otherwise the rank is terminated before the collective can tell what it waited for"
            )
        if self.rank_s >= self.case_s:
            problems.append(
                f"rank_s must be less than case_s={self.case_s}, got {self.rank_s}: "
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

        By default a rank gets 85 % of it, a collective 60 %, and the suite's own work twice as much. `scale` multiplies
        all deadlines, for slow machines and debuggers.
        """
        rank_s = 0.85 * case_s if rank_s is None else rank_s
        collective_s = min(0.6 * case_s, 0.75 * rank_s) if collective_s is None else collective_s
        default = cls(collective_s=collective_s, rank_s=rank_s, case_s=case_s, suite_s=2 * case_s)
        return cls(
            collective_s=collective_s * scale,
            rank_s=rank_s * scale,
            case_s=case_s * scale,
            suite_s=default.suite_s * scale,
            settle_s=default.settle_s * scale,
            grace_s=default.grace_s * scale,
            stack_s=default.stack_s * scale,
            shutdown_s=default.shutdown_s * scale,
        )

    def without_hurry(self) -> Deadlines:
        """Deadlines for a case that is debugged: a day and more for what may wait for a person."""
        return replace(self, collective_s=_DAY_S, rank_s=2 * _DAY_S, case_s=3 * _DAY_S, suite_s=2 * _DAY_S)


def remaining(deadline: float) -> float:
    """Seconds until a moment of time.monotonic(), at least 0."""
    return max(0.0, deadline - time.monotonic())
