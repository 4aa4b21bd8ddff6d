"""Which cases of a profile were asked for, and what can be said of each before anything is started."""

from __future__ import annotations

from collections.abc import Sequence

from fsdp_conformance.capability import CAPABILITIES
from fsdp_conformance.case import Case
from fsdp_conformance.cli import messages
from fsdp_conformance.cli.survey import Machine, Survey
from fsdp_conformance.config import RunSettings
from fsdp_conformance.contract.profile import Profile
from fsdp_conformance.errors import EnvironmentUnavailable, UsageError
from fsdp_conformance.judge import Gated, gate


def cases_of(profile: Profile) -> list[Case]:
    """
    The profile's cases, as far as a profile knows them: without their axes, kills and deadlines. Imports no suite.
    """
    return [entry.case() for entry in profile.entries]


def selected(profile: Profile, settings: RunSettings) -> list[Case]:
    """
    The cases that the settings ask for.

    Raises UsageError for an id or a world size that no case has, or if nothing is left.
    """
    entries = profile.selected(settings.cases, settings.world_sizes)
    if not entries:
        sizes = sorted({entry.world_size for entry in profile.selected(settings.cases, ())})
        if not sizes:
            raise UsageError(f"the profile {profile.name} has no case")
        raise UsageError(
            f"--world-size {', '.join(map(str, settings.world_sizes))}, but should be one of "
            f"{', '.join(map(str, sizes))}: other world sizes has nothing that --case names"
        )
    return [entry.case() for entry in entries]


def foreseen(cases: Sequence[Case], settings: RunSettings, found: Survey) -> list[Gated]:
    """For each case its device, and the record that it will have without being started if it would not run."""
    places = found.machine.places()
    return [gate(case, declared=found.description.declared, settings=settings, places=places) for case in cases]


def foreseen_here(cases: Sequence[Case], machine: Machine) -> list[Gated]:
    """The same for an implementation that declares everything."""
    settings, places = RunSettings(device=machine.device), machine.places()
    return [
        gate(case, declared=lambda device: frozenset(CAPABILITIES), settings=settings, places=places) for case in cases
    ]


def check_device(machine: Machine) -> None:
    """Raises EnvironmentUnavailable if there is no device of the type, no compiler for it, or no backend."""
    if machine.num_ranks == 0:
        raise EnvironmentUnavailable(
            f"0 devices of type {machine.device!r} are present, but should be at least 1 [torch {machine.torch}]. "
            "Use another --device; `fsdp-conformance doctor` shows what is there."
        )
    if not machine.backend:
        raise EnvironmentUnavailable(machine.problem)


def check_machine(machine: Machine, chosen: Sequence[Case], settings: RunSettings) -> None:
    """Raises EnvironmentUnavailable for want of a device or a backend, or if a world size does not fit."""
    check_device(machine)
    if machine.num_ranks is None:
        return
    there = f"{messages.plural(machine.num_ranks, 'device')} of type {machine.device!r}"
    too_large = [size for size in settings.world_sizes if size > machine.num_ranks]
    if too_large:
        raise EnvironmentUnavailable(
            f"--world-size {too_large[0]}, but {there} present, and each rank needs its own. "
            "Choose a smaller world size, or --device cpu."
        )
    smallest = min(case.world_size for case in chosen)
    if smallest > machine.num_ranks:
        raise EnvironmentUnavailable(
            f"{there} present, but should be at least {smallest}: every case that was asked for needs as many ranks, "
            "each with a device of its own. Use --device cpu."
        )
