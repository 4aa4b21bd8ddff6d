"""A process that was started while its parent had simulated GPUs. Its hazards are the parent's to judge."""

from __future__ import annotations

import functools
import os

from fsdp_conformance.simulated_cuda.settings import CudaSettings
from fsdp_conformance.simulator.on_import import when_imported

__all__ = ["prepare"]


def prepare() -> None:
    """Prepare this process, if the environment says so: torch will see the GPUs from the moment it is imported."""
    settings = CudaSettings.from_environment(os.environ)
    if settings is not None:
        when_imported("torch", functools.partial(_begin, settings))


def _begin(settings: CudaSettings) -> None:
    from fsdp_conformance.simulated_cuda import simulation

    begun = simulation.begin(
        settings.num_devices, checks=settings.checks, as_cuda=settings.as_cuda, options=settings.options
    )
    begun.report_to(settings).keep_looking()
