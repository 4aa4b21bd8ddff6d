"""Where the simulated accelerator stands among the devices of this machine: what a run must know before its cases."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable

from fsdp_conformance.case import Case
from fsdp_conformance.config import SIMULATED, RunSettings
from fsdp_conformance.errors import EnvironmentUnavailable
from fsdp_conformance.harness import devices
from fsdp_conformance.judge import Place, gate
from fsdp_conformance.simulator import build


@functools.cache
def build_problem() -> str:
    """
    Why the simulated accelerator cannot be built, or "" once it is there: the first call may wait for a compiler.

    Asked once per process, so that a compiler that fails is not tried again by every case.
    """
    try:
        build.require()
    except EnvironmentUnavailable as error:
        return str(error)
    return ""


def place_of(device_type: str) -> Place:
    """What a type of device offers on this machine. Compiles nothing."""
    present, num_ranks = devices.present_environments(device_type)
    problem = ""
    if device_type == SIMULATED:
        tried = build_problem.cache_info().currsize > 0
        problem = build_problem() if tried else build.unavailable() or ""
    return Place(device=device_type, present=frozenset() if problem else present, num_ranks=num_ranks, problem=problem)


def places(settings: RunSettings) -> dict[str, Place]:
    """The places that cases of a run can be sent to."""
    found = {settings.device: place_of(settings.device)}
    if settings.simulator:
        found.setdefault(SIMULATED, place_of(SIMULATED))
    return found


def prepare(
    cases: Iterable[Case],
    settings: RunSettings,
    declared: Callable[[str], frozenset[str]],
    *,
    say: Callable[[str], object] = print,
) -> None:
    """Compile the simulated accelerator if one of the cases will run on it, and `say` so: it takes a while."""
    here = places(settings)
    gated = (gate(case, declared=declared, settings=settings, places=here) for case in cases)
    if any(item.record is None and item.device == SIMULATED for item in gated) and not build.is_built():
        say("building the simulated accelerator, first use ...")
        problem = build_problem()
        say(f"it cannot be built: {problem}" if problem else "built")
