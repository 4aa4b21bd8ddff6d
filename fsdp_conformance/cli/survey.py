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
from fsdp_conformance.config import SIMULATED
from fsdp_conformance.errors import AdapterNotFound, EnvironmentUnavailable
from fsdp_conformance.judge import Place

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
    """How many ranks fit on the devices; None for any number."""
    simulated: Place = field(default_factory=lambda: _unknown(SIMULATED))
    """The simulated accelerator, on which a CPU run executes the cases that need one."""
    simulator_built: bool = False
    """Whether it has been compiled for this version of torch."""

    def places(self) -> dict[str, Place]:
        """Where cases can run, for `judge.gate`."""
        here = Place(device=self.device, present=self.present, num_ranks=self.num_ranks, problem=self.problem)
        return {SIMULATED: self.simulated, self.device: here}

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
    with tempfile.TemporaryDirectory(prefix="fsdp-conformance-", ignore_cleanup_errors=True) as directory:
        answers = Path(directory) / "answers.jsonl"
        command = [sys.executable, "-m", "fsdp_conformance.cli.surveyor", str(answers), device, implementation]
        try:
            done = run_family(command, timeout_s=timeout_s)
            ending, output = _ending(done.returncode), done.stdout + done.stderr
        except subprocess.TimeoutExpired as expired:
            ending = f"did not answer within {timeout_s:.0f} s"
            output = (expired.output or b"") + (expired.stderr or b"")
        said = _read(answers)
    tail = output[-_QUOTED:].decode(errors="replace").rstrip()
    if "machine" not in said:
        raise EnvironmentUnavailable(
            f"the process that inspects this machine {ending} without an answer [{sys.executable}]. "
            f"Can it import torch? Its output ends with:\n{tail}"
        )
    if "implementation" not in said:
        raise AdapterNotFound(
            f"the process that imports the implementation {implementation!r} {ending} without describing it. "
            f"Import its module by hand to see why. Its output ends with:\n{tail}"
        )
    return Survey(
        machine=Machine.from_json(said["machine"]),
        description=description_from_answer(said["implementation"]),
    )


def _read(answers: Path) -> dict[str, Any]:
    said: dict[str, Any] = {}
    if answers.exists():
        for line in answers.read_text(encoding="utf-8").splitlines():
            said.update(json.loads(line))
    return said


def _ending(code: int) -> str:
    if code >= 0:
        return f"ended with status {code}"
    try:
        return f"died of {signal.Signals(-code).name}"
    except ValueError:
        return f"died of signal {-code}"
