"""For engines that run only where each rank is a process, and for those that run on the CPU only."""

from __future__ import annotations

from fsdp_conformance.config import Plan
from fsdp_conformance.errors import EnvironmentUnavailable, Unsupported
from fsdp_conformance.harness.simulated_ranks import scheduler as rank_scheduler


def refuse_all_but_processes_on_cpu(plan: Plan, engine: str, *, because: str) -> None:
    """Raise Unsupported for a plan with another device, and EnvironmentUnavailable on simulated ranks."""
    if plan.device != "cpu":
        raise Unsupported("init_before", f"the adapter supports {engine} on the CPU only, not on {plan.device}")
    refuse_simulated_ranks(engine, because=because)


def refuse_simulated_ranks(engine: str, *, because: str) -> None:
    """Raise EnvironmentUnavailable on simulated ranks."""
    if rank_scheduler.current() is not None:
        raise EnvironmentUnavailable(f"{engine} cannot be judged on simulated ranks: {because}. Use --ranks processes")
