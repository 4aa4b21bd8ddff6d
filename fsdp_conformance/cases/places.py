"""The devices of this machine that cases can run on, and the simulated accelerator if it can be built."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable

from fsdp_conformance.contract.case import Case
from fsdp_conformance.contract.gate import Place, gate
from fsdp_conformance.errors import EnvironmentUnavailable
from fsdp_conformance.harness import devices
from fsdp_conformance.plan import SIMULATED
from fsdp_conformance.run_settings import RunSettings
from fsdp_conformance.simulator.device import build


@functools.cache
def build_problem() -> str:
    """
    The reason why the simulated accelerator cannot be built, or "" if it is built. The first call may compile it.

    Cached for the process, so that not every case tries a failing compiler again.
    """
    try:
        build.require()
    except EnvironmentUnavailable as error:
        return str(error)
    return ""


def place_of(device_type: str) -> Place:
    """The environments that a device type offers on this machine. Compiles nothing."""
    present, num_ranks = devices.present_environments(device_type)
    problem = ""
    if device_type == SIMULATED:
        tried = build_problem.cache_info().currsize > 0
        problem = build_problem() if tried else build.unavailable() or ""
    return Place(device=device_type, present=frozenset() if problem else present, num_ranks=num_ranks, problem=problem)


def places(settings: RunSettings) -> dict[str, Place]:
    """The places where the cases of a run can run."""
    by_device = {settings.device: place_of(settings.device)}
    if settings.simulator:
        by_device.setdefault(SIMULATED, place_of(SIMULATED))
    return by_device


def prepare(
    cases: Iterable[Case],
    settings: RunSettings,
    declared: Callable[[str], frozenset[str]],
    *,
    say: Callable[[str], object] = print,
) -> None:
    """Compile the simulated accelerator if one of the cases will run on it, and announce it: it takes a while."""
    available = places(settings)
    gated = (gate(case, declared=declared, settings=settings, places=available) for case in cases)
    if any(item.record is None and item.device == SIMULATED for item in gated) and not build.is_built():
        say("building the simulated accelerator, first use ...")
        problem = build_problem()
        say(f"it cannot be built: {problem}" if problem else "built")
