"""The selected cases of a profile, and which of them would run."""

from __future__ import annotations

from collections.abc import Sequence

from fsdp_conformance.capability import CAPABILITIES
from fsdp_conformance.cli import messages
from fsdp_conformance.cli.survey import Machine, Survey
from fsdp_conformance.contract import selection
from fsdp_conformance.contract.case import Case
from fsdp_conformance.contract.gate import Gated, gate
from fsdp_conformance.contract.profile import SUITES, Profile
from fsdp_conformance.errors import EnvironmentUnavailable
from fsdp_conformance.run_settings import SHAREABLE, RunSettings


def cases_of(profile: Profile) -> list[Case]:
    """The profile's cases, without what only the suites know: axes, kills and deadlines."""
    return [entry.case() for entry in profile.entries]


def selected(profile: Profile, settings: RunSettings, suites: str | None = None) -> list[Case]:
    """The cases that the settings select. Raises UsageError if there are none, or if a criterion is mistyped."""
    return [entry.case() for entry in selection.selected(profile, settings, suites=suites or SUITES)]


def foreseen(cases: Sequence[Case], settings: RunSettings, survey: Survey) -> list[Gated]:
    """For each case its device, and its record if it would not run."""
    places = survey.machine.places()
    return [gate(case, declared=survey.description.declared, settings=settings, places=places) for case in cases]


def foreseen_here(cases: Sequence[Case], machine: Machine, *, shared: bool = False) -> list[Gated]:
    """The same for an implementation that declares every capability; with `shared`, where ranks share devices."""
    settings, places = RunSettings(device=machine.device, share_devices=shared), machine.places()
    return [
        gate(case, declared=lambda device: frozenset(CAPABILITIES), settings=settings, places=places) for case in cases
    ]


def check_device(machine: Machine) -> None:
    """Raise EnvironmentUnavailable if there is no device of the type, no compiler for it, or no backend."""
    if machine.num_ranks == 0:
        raise EnvironmentUnavailable(
            f"no device of type {machine.device!r} was found [torch {machine.torch}]. "
            "Use another --device; `fsdp-conformance doctor` shows what this machine has."
        )
    if not machine.backend:
        raise EnvironmentUnavailable(machine.problem)


def check_machine(machine: Machine, chosen: Sequence[Case], settings: RunSettings) -> None:
    """Raise EnvironmentUnavailable if there is no device or backend, or too few devices for a world size."""
    check_device(machine)
    if machine.num_ranks is None or settings.share_devices:
        return
    present = f"found {messages.plural(machine.num_ranks, 'device')} of type {machine.device!r}"
    too_large = [size for size in settings.world_sizes if size > machine.num_ranks]
    if too_large:
        raise EnvironmentUnavailable(
            f"--world-size {too_large[0]} needs {too_large[0]} devices, one for each rank, but {present}. "
            f"Choose a smaller world size, {_instead(machine)}."
        )
    smallest = min(case.world_size for case in chosen)
    if smallest > machine.num_ranks:
        raise EnvironmentUnavailable(
            f"every selected case needs at least {smallest} devices, one for each rank, but {present}. "
            f"Use {_instead(machine)}."
        )


def _instead(machine: Machine) -> str:
    """Suggestions for a machine with too few devices."""
    sharing = "--share-devices (no certificate), " if machine.device in SHAREABLE else ""
    return f"{sharing}or --device cpu" if sharing else "--device cpu"
