"""
The findings of `sanitize` as alerts for code hosts: a rule, the argument, and the lines.

An alert is placed at the line that needs the change: the later access of a race, the call of a collective. The other
line is a related location.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Protocol

from fsdp_conformance.simulator.checker.hazard import Hazard, HazardKind, Site
from fsdp_conformance.simulator.collectives.disagreement import DisagreementKind
from fsdp_conformance.simulator.sanitize.report import ScriptReport

#: What each rule is about, in a sentence for the list of rules.
RULES: Mapping[str, str] = {
    HazardKind.READ_AFTER_WRITE: "Memory is read without waiting for the operation that writes it.",
    HazardKind.WRITE_AFTER_READ: "Memory is overwritten without waiting for an operation that reads it.",
    HazardKind.WRITE_AFTER_WRITE: "Memory is overwritten without waiting for an operation that writes it.",
    HazardKind.REUSE_IN_FLIGHT: "Memory is freed, and reused, while an operation on another stream still uses it.",
    HazardKind.HOST_WRITE_IN_FLIGHT: "The host overwrites pinned memory that a copy still reads or writes.",
    HazardKind.HOST_READ_IN_FLIGHT: "The host reads pinned memory before the copy into it is done.",
    HazardKind.UNINITIALIZED_READ: "A value that nothing has written reaches a collective, the host or a branch.",
    DisagreementKind.DIFFERENT: "The ranks of a group call different collectives.",
    DisagreementKind.ORDER: "Two ranks use two communicators in different orders.",
    DisagreementKind.BOTH_SEND: "Two ranks send to each other before they receive.",
    DisagreementKind.DEVICE_DEADLOCK: "The devices of ranks wait for each other, in calls that differ in order.",
    DisagreementKind.TAGS: "A send and the receive that it meets have different tags.",
    DisagreementKind.ONE_DEVICE: "Two ranks of a group use the same device.",
    DisagreementKind.DEADLOCK: "Ranks wait for each other in collectives that the others have not called.",
    DisagreementKind.MISSING: "A rank ends without a collective that another rank has called.",
}


class _Line(Protocol):
    """A line of code."""

    @property
    def file(self) -> str: ...
    @property
    def line(self) -> int: ...


@dataclass(frozen=True, kw_only=True, slots=True)
class Alert:
    """One finding."""

    rule: str
    sentence: str
    text: str
    """The whole argument."""
    lines: tuple[tuple[str, _Line], ...]
    """The operation and its line; the line to change comes first."""


def alerts_of(report: ScriptReport) -> list[Alert]:
    """The findings of a run, as they are printed."""
    alerts = [_of_hazard(one.hazard) for one in report.hazards]
    for folded in report.disagreements:
        disagreement = folded.disagreement
        lines = [(party.words, party.place) for party in disagreement.parties]
        alerts.append(
            Alert(
                rule=disagreement.kind,
                sentence=disagreement.sentence(),
                text=disagreement.explain(),
                lines=tuple((words, place) for words, place in lines if place is not None),
            )
        )
    return alerts


def _of_hazard(hazard: Hazard) -> Alert:
    lines: list[tuple[str, _Line]] = []
    sites: list[Site | None] = [hazard.now.site, hazard.then.site]
    if hazard.kind is HazardKind.REUSE_IN_FLIGHT:
        # The line to change is the one that frees the memory.
        sites.insert(0, hazard.freed)
    for site in sites:
        frame = site.innermost() if site is not None else None
        if site is not None and frame is not None:
            lines.append((site.op, frame))
    return Alert(
        rule=hazard.kind, sentence=hazard.sentence(), text=replace(hazard, count=1).explain(), lines=tuple(lines)
    )
