"""
What a command must know before it starts anything: the implementation and the machine, as a child process sees them.

The child imports torch and the adapter's module, so that an engine that prints, patches or dies while it is imported
does so there. It answers each question with a line in a file, which shows how far it came if it dies.
"""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from fsdp_conformance.adapters.registry import AdapterDescription, description_from_answer
from fsdp_conformance.cli.processes import run_family
from fsdp_conformance.contract.gate import Place
from fsdp_conformance.errors import AdapterNotFound, EnvironmentUnavailable
from fsdp_conformance.plan import SIMULATED
from fsdp_conformance.run_settings import RunSettings

#: Importing torch and an engine takes seconds; with a cold disk, or a compiler started at import, a minute or two.
TIMEOUT_S = 300.0

#: How much of the child's output is quoted if it dies.
_QUOTED = 1500


@dataclass(frozen=True, kw_only=True, slots=True)
class Machine:
    """What this machine offers for ranks on one type of device."""

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
    """Whether it has been compiled for this version of torch."""
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
    return Place(device=device, present=frozenset(), problem="not looked at")


@dataclass(frozen=True, kw_only=True, slots=True)
class Survey:
    """The answers."""

    machine: Machine
    description: AdapterDescription


def survey(device: str, implementation: str, *, timeout_s: float = TIMEOUT_S) -> Survey:
    """
    Ask a child process about the machine and the implementation.

    Raises AdapterNotFound or AdapterError if the implementation cannot be used, and EnvironmentUnavailable if torch
    cannot be used.
    """
    with Inquiry(device, implementation, timeout_s=timeout_s) as inquiry:
        command = [sys.executable, "-m", "fsdp_conformance.cli.surveyor", *inquiry.words()]
        try:
            done = run_family(command, timeout_s=timeout_s)
            ending, output = done.returncode, done.stdout + done.stderr
        except subprocess.TimeoutExpired as expired:
            ending, output = None, (expired.output or b"") + (expired.stderr or b"")
        return inquiry.answer(ending, output)


class Inquiry:
    """The questions, and files for the answers. Use as a context manager: afterwards the files are gone."""

    def __init__(self, device: str, implementation: str, *, timeout_s: float) -> None:
        self.device, self.implementation, self.timeout_s = device, implementation, timeout_s
        self._directory = tempfile.TemporaryDirectory(prefix="fsdp-conformance-", ignore_cleanup_errors=True)
        self._answers = Path(self._directory.name) / "answers.jsonl"
        self.output = Path(self._directory.name) / "output"
        """Where a process that has no pipe writes what it prints."""

    def __enter__(self) -> Inquiry:
        return self

    def __exit__(self, *exc: object) -> None:
        self._directory.cleanup()

    def words(self) -> list[str]:
        """The arguments of `surveyor.main`."""
        return [str(self._answers), self.device, self.implementation]

    def answer(self, ending: int | None, output: bytes) -> Survey:
        """
        What the process has answered, which ended with this status (None: it was killed at its deadline).

        Raises what `survey` raises.
        """
        said: dict[str, Any] = {}
        if self._answers.exists():
            for line in self._answers.read_text(encoding="utf-8").splitlines():
                said.update(json.loads(line))
        ended = f"did not answer within {self.timeout_s:.0f} s" if ending is None else _ending(ending)
        tail = output[-_QUOTED:].decode(errors="replace").rstrip()
        if "machine" not in said:
            raise EnvironmentUnavailable(
                f"the process that inspects this machine {ended} without an answer [{sys.executable}]. "
                f"Can it import torch? Its output ends with:\n{tail}"
            )
        if "implementation" not in said:
            raise AdapterNotFound(
                f"the process that imports the implementation {self.implementation!r} {ended} without describing it. "
                f"Import its module by hand to see why. Its output ends with:\n{tail}"
            )
        return Survey(
            machine=Machine.from_json(said["machine"]),
            description=description_from_answer(said["implementation"]),
        )


def _ending(code: int) -> str:
    if code >= 0:
        return f"ended with status {code}"
    try:
        return f"died of {signal.Signals(-code).name}"
    except ValueError:
        return f"died of signal {-code}"
