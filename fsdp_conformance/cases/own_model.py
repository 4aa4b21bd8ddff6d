"""
The user's own model (--workload) in the controller: what it has, and its problems, found in a separate process.

The user's code runs there, in every rank and in the referee; the controller never imports it.
"""

from __future__ import annotations

import functools
from dataclasses import replace
from typing import Any

import torch

from fsdp_conformance import codec
from fsdp_conformance.errors import ConfigError
from fsdp_conformance.harness.probe import run_in_child
from fsdp_conformance.references.fitness import fitness_of
from fsdp_conformance.run_settings import RunSettings
from fsdp_conformance.workload.loading import OPTION

#: Seconds for some trainings of a small model.
_TIMEOUT_S = 300.0


def with_properties(settings: RunSettings) -> RunSettings:
    """
    The settings with what the model of --workload has, if there is one and it has not been examined.

    Raises ConfigError with every problem of the workload.
    """
    if not settings.workload or settings.workload_has:
        return settings
    return replace(settings, workload_has=_properties(settings.workload))


@functools.lru_cache(maxsize=16)
def _properties(spec: str) -> tuple[str, ...]:
    answer = run_in_child(examined, spec, timeout_s=_TIMEOUT_S)
    if answer["problems"]:
        raise ConfigError(answer["problems"], where=f"{OPTION} {spec}")
    return tuple(answer["has"])


def examined(spec: str) -> dict[str, Any]:
    """The fitness of a workload as JSON: the function that the separate process runs."""
    torch.set_num_threads(1)
    fitness: dict[str, Any] = codec.plain(fitness_of(spec))
    return fitness
