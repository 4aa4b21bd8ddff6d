"""
The survey: what the machine has and what the implementation declares. A command needs both before it starts anything.

A child process imports torch and the adapter's module, so that an engine that prints, patches or dies while it is
imported does so there.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

from fsdp_conformance import codec
from fsdp_conformance.adapters.registry import AdapterDescription
from fsdp_conformance.cli.child import answers
from fsdp_conformance.contract.gate import Place
from fsdp_conformance.errors import AdapterNotFound, EnvironmentUnavailable
from fsdp_conformance.plan import SIMULATED
from fsdp_conformance.run_settings import RunSettings

#: Importing torch and an engine takes seconds; with a cold disk, or a compiler started at import, a minute or two.
TIMEOUT_S = 300.0


@dataclass(frozen=True, kw_only=True, slots=True)
class Machine:
    """The devices, backends and other means of this machine, for ranks on one type of device."""

    torch: str
    device: str
    backend: str
    """Empty if there is none."""
    problem: str
    """Why there is no backend."""
    present: frozenset[str]
    """Members of `case.ENVIRONMENTS`."""
    num_devices: int
    """For the CPU: cores."""
    num_ranks: int | None
    """How many ranks of a case fit on the devices; None for any number."""
    simulated: Place = field(default_factory=lambda: _unknown(SIMULATED))
    """The simulated accelerator, on which a CPU run executes the cases that need one."""
    simulator_built: bool = False
    """True if it has been compiled for this version of torch."""
    auto_slots: int = 1
    """How many cases may use a device at the same time with `--slots-per-device auto`."""

    def places(self) -> dict[str, Place]:
        """Where cases can run, for `contract.gate`."""
        here = Place(device=self.device, present=self.present, num_ranks=self.num_ranks, problem=self.problem)
        return {SIMULATED: self.simulated, self.device: here}

    def backend_of(self, settings: RunSettings) -> str:
        """The backends of a case's process group, as `harness.recording.process_group.backends_of` has them."""
        if self.device == "cpu" or (self.device == SIMULATED and not settings.backend):
            return self.backend
        if settings.backend or settings.share_devices:
            return settings.backend or "gloo"
        return f"cpu:gloo,{self.device}:{self.backend}"

    def to_json(self) -> dict[str, Any]:
        """A JSON-ready mapping; `from_json` is its inverse."""
        simulated = {**asdict(self.simulated), "present": sorted(self.simulated.present)}
        return {**asdict(self), "present": sorted(self.present), "simulated": simulated}

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> Machine:
        """The inverse of `to_json`."""
        simulated = Place(**{**data["simulated"], "present": frozenset(data["simulated"]["present"])})
        return cls(**{**data, "present": frozenset(data["present"]), "simulated": simulated})


def _unknown(device: str) -> Place:
    return Place(device=device, present=frozenset(), problem="not surveyed")


@dataclass(frozen=True, kw_only=True, slots=True)
class Survey:
    """The machine and the implementation."""

    machine: Machine
    description: AdapterDescription


def survey(device: str, implementation: str, *, fork: bool = False, timeout_s: float = TIMEOUT_S) -> Survey:
    """
    Survey the machine and the implementation in a child process, or in a fork of this one if it has imported torch.

    Raises AdapterNotFound or AdapterError if the implementation cannot be used, and EnvironmentUnavailable if torch
    cannot be used.
    """
    with answers("survey", fork=fork, timeout_s=timeout_s, device=device, implementation=implementation) as replies:
        return survey_from(replies, implementation)


def survey_from(replies: Iterable[dict[str, Any]], implementation: str) -> Survey:
    """The survey that the answers of the job make. Raises what `survey` raises."""
    by_kind = {answer.pop("what"): answer for answer in replies}
    if died := by_kind.get("died"):
        if "machine" not in by_kind:
            raise EnvironmentUnavailable(
                f"the process that inspects this machine {died['how']} without an answer [{sys.executable}]. "
                f"Can it import torch? Its output ends with:\n{died['output'].rstrip()}"
            )
        raise AdapterNotFound(
            f"the process that imports the implementation {implementation!r} {died['how']} without describing it. "
            f"Import its module by hand to see why. Its output ends with:\n{died['output'].rstrip()}"
        )
    return Survey(
        machine=Machine.from_json(by_kind["machine"]),
        description=codec.typed(AdapterDescription, by_kind["implementation"]),
    )
