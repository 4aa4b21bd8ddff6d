"""A process that was started while its parent had simulated GPUs. Its hazards are the parent's to judge."""

from __future__ import annotations

import functools
import os

from fsdp_conformance.simulator.import_hook import when_imported
from fsdp_conformance.simulator.simulated_cuda.settings import CudaSettings

__all__ = ["prepare"]


def prepare() -> None:
    """If the environment has settings for this process, make torch see the GPUs from the moment it is imported."""
    settings = CudaSettings.from_environment(os.environ)
    if settings is not None:
        when_imported("torch", functools.partial(_begin, settings))


def _begin(settings: CudaSettings) -> None:
    from fsdp_conformance.simulator.simulated_cuda import simulation

    begun = simulation.begin(
        settings.num_devices, checks=settings.checks, as_cuda=settings.as_cuda, options=settings.options
    )
    begun.report_to(settings).keep_looking()
