"""For engines that run only where each rank is a process, and for adapters that were never tried on a GPU."""

from __future__ import annotations

from fsdp_conformance.errors import EnvironmentUnavailable, Unsupported
from fsdp_conformance.harness.simulated_ranks import scheduler as rank_scheduler
from fsdp_conformance.plan import SIMULATED, Plan


def refuse_gpus_and_simulated_ranks(plan: Plan, engine: str, *, because: str) -> None:
    """Raise Unsupported for a plan on a GPU that is not simulated, and EnvironmentUnavailable on simulated ranks."""
    if plan.device not in ("cpu", SIMULATED):
        places = "on the CPU and on the simulated accelerator"
        raise Unsupported("init_before", f"the adapter supports {engine} {places}, not on {plan.device}")
    refuse_simulated_ranks(engine, because=because)


def refuse_simulated_ranks(engine: str, *, because: str) -> None:
    """Raise EnvironmentUnavailable on simulated ranks."""
    if rank_scheduler.current() is not None:
        raise EnvironmentUnavailable(f"{engine} cannot be judged on simulated ranks: {because}. Use --ranks processes")
