"""
The observations of this process and its children, merged: a hazard that several ranks have is one finding.

Standard library only, so that the process that prints the findings of others needs no torch.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from fsdp_conformance.simulator.checker.hazard import Access, Hazard, hazard_from_json
from fsdp_conformance.simulator.collectives.disagreement import Disagreement, disagreement_from_json
from fsdp_conformance.simulator.device import SIMULATED
from fsdp_conformance.simulator.suppressions import NO_SUPPRESSIONS, Suppressed, Suppressions

__all__ = ["Inbox", "MergedHazard", "Observations", "hazards_in_words", "saved_files"]

#: The devices' own name, before their number.
_DEVICE = re.compile(rf"\b{SIMULATED}:(?=\d)")


@dataclass(slots=True)
class MergedHazard:
    """One hazard, and who has it."""

    hazard: Hazard
    processes: list[str] = field(default_factory=list)
    """Names of child processes; empty if only this process has it."""
    count: int = 0

    def text(self) -> str:
        """The explanation: both accesses with the lines that issued them, the memory, and the missing wait."""
        lines = [_named(self.hazard.explain())]
        if self.processes:
            lines.append(f"  in {', '.join(self.processes)}")
        return "\n".join(lines)


@dataclass(slots=True)
class Observations:
    """The findings, and how much was checked."""

    findings: list[MergedHazard] = field(default_factory=list)
    accesses: int = 0
    notes: list[str] = field(default_factory=list)
    disagreements: dict[Hashable, Disagreement] = field(default_factory=dict)
    """Findings about the collectives of several processes that have stopped none of them, by their keys."""
    suppressed: list[Suppressed] = field(default_factory=list)
    """Those that are not reported."""

    def joined(self, later: Observations) -> Observations:
        """These observations joined with later ones."""
        by_key = {_key(one.hazard): one for one in self.findings}
        both = Observations(
            list(self.findings),
            self.accesses + later.accesses,
            list(self.notes),
            {**later.disagreements, **self.disagreements},
            list(dict.fromkeys([*self.suppressed, *later.suppressed])),
        )
        both.notes += [note for note in later.notes if note not in both.notes]
        for one in later.findings:
            same = by_key.get(_key(one.hazard))
            if same is None:
                both.findings.append(one)
            else:
                same.count += one.count
                same.processes += [name for name in one.processes if name not in same.processes]
        return both

    def texts(self) -> list[str]:
        """The explanation of each finding."""
        return [*(one.text() for one in self.findings), *(one.explain() for one in self.disagreements.values())]

    @property
    def hazards(self) -> tuple[Hazard, ...]:
        """One for each finding."""
        return tuple(one.hazard for one in self.findings)


class Inbox:
    """The files of child processes. A process that is still running writes its file again, with everything so far."""

    def __init__(self, directory: Path, suppressions: Suppressions = NO_SUPPRESSIONS) -> None:
        self._directory = directory
        self._suppressions = suppressions
        self._read: dict[str, _Read] = {}

    def collect(self, own: Mapping[str, Any]) -> Observations:
        """Merge what this process observed with what children have saved since the last call."""
        seen = [("", own), *sorted(self._news(), key=lambda one: (one[0], json.dumps(one[1], sort_keys=True)))]
        merged = Observations()
        by_key: dict[Hashable, MergedHazard] = {}
        suppressed: dict[Suppressed, None] = {}
        for process, one in seen:
            merged.accesses += one["accesses"]
            merged.notes += [note for note in one["notes"] if note not in merged.notes]
            for disagreement in map(disagreement_from_json, one["collectives"]["found"]):
                if lines := self._suppressions.of_disagreement(disagreement):
                    suppressed[Suppressed(disagreement.sentence(), lines)] = None
                else:
                    merged.disagreements.setdefault(disagreement.key, disagreement)
            for hazard in map(hazard_from_json, one["hazards"]):
                if lines := self._suppressions.of_hazard(hazard):
                    suppressed[Suppressed(_named(hazard.sentence()), lines)] = None
                    continue
                finding = by_key.setdefault(_key(hazard), MergedHazard(hazard))
                finding.count += hazard.count
                if process and process not in finding.processes:
                    finding.processes.append(process)
        merged.findings = list(by_key.values())
        merged.suppressed = list(suppressed)
        return merged

    def _news(self) -> Iterable[tuple[str, dict[str, Any]]]:
        """The name of each process that has saved something, and its new observations."""
        for path, one in saved_files(self._directory, self._is_new):
            before = self._read[path.name]
            hazards = {json.dumps({**hazard, "count": 0}, sort_keys=True): hazard for hazard in one["hazards"]}
            yield (
                one["process"],
                {
                    "hazards": [hazard for text, hazard in hazards.items() if text not in before.hazards],
                    "accesses": one["accesses"] - before.accesses,
                    "notes": one["notes"],
                    "collectives": {"found": one["collectives"]["found"][before.disagreements :]},
                },
            )
            before.hazards |= hazards.keys()
            before.disagreements = len(one["collectives"]["found"])
            before.accesses = one["accesses"]

    def _is_new(self, path: Path) -> bool:
        status = path.stat()
        before = self._read.setdefault(path.name, _Read())
        state, before.state = before.state, (status.st_mtime_ns, status.st_size)
        return state != before.state


@dataclass(slots=True)
class _Read:
    """The content of a file when it was last read."""

    state: tuple[int, int] = (0, 0)
    hazards: set[str] = field(default_factory=set)
    accesses: int = 0
    disagreements: int = 0


def saved_files(
    directory: Path, accepts: Callable[[Path], bool] = lambda _: True
) -> Iterator[tuple[Path, dict[str, Any]]]:
    """The files that processes have saved in a directory, of those that `wanted` selects, with their content."""
    for path in sorted(directory.glob("*.json")):
        if accepts(path):
            yield path, json.loads(path.read_text(encoding="utf-8"))


def hazards_in_words(hazards: Sequence[str]) -> str:
    """Hazards in a text for people, with how many there are."""
    number = "1 hazard" if len(hazards) == 1 else f"{len(hazards)} hazards"
    return "\n\n".join([f"{number} on the simulated accelerator", *hazards])


def _named(text: str) -> str:
    """The text with CUDA's name for the devices, by which the program knows them."""
    return _DEVICE.sub("cuda:", text)


def _key(hazard: Hazard) -> Hashable:
    """Hazards of one kind between the same two lines are one, whatever the devices, streams and sizes."""
    return hazard.kind, hazard.pinned, _line(hazard.then), _line(hazard.now)


def _line(access: Access) -> Hashable:
    frame = access.site.innermost()
    return access.stream.is_host, frame if frame is not None else (access.site.op, access.site.label)
