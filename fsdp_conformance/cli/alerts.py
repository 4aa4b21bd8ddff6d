"""
The findings of `sanitize` as code-scanning alerts (SARIF 2.1.0) and as annotations of a GitHub workflow.

An alert is placed at the line that needs the change: the later access of a race, the call of a collective. The other
line is a related location. Files outside the working directory have no place in the repository, so the alert then has
none either.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol

from fsdp_conformance import __version__
from fsdp_conformance.cli.sanitize_report import ScriptReport
from fsdp_conformance.history.hazard import HazardKind
from fsdp_conformance.report.formats import sarif as formats
from fsdp_conformance.simulator.disagreement import DisagreementKind
from fsdp_conformance.simulator.hazard import Hazard, Site

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
    """What happens there, and the line; the one to change comes first."""


def alerts_of(report: ScriptReport) -> list[Alert]:
    """The findings of a run, as they are printed."""
    alerts = [_of_hazard(one.hazard) for one in report.hazards]
    for folded in report.disagreements:
        found = folded.found
        lines = [(party.words, party.place) for party in found.parties]
        alerts.append(
            Alert(
                rule=found.kind,
                sentence=found.sentence(),
                text=found.explain(),
                lines=tuple((words, place) for words, place in lines if place is not None),
            )
        )
    return alerts


def sarif(alerts: Sequence[Alert], report: ScriptReport) -> str:
    """The SARIF file."""
    rules = sorted({alert.rule for alert in alerts})
    return formats.document(
        version=__version__,
        rules=[{"id": rule, "shortDescription": {"text": RULES[rule]}} for rule in rules],
        results=[_result(alert) for alert in alerts],
        properties={"verdict": report.verdict(), "script": report.order.target},
    )


def workflow_commands(alerts: Sequence[Alert]) -> Iterator[str]:
    """Workflow commands that make GitHub show each finding at its line."""
    for alert in alerts:
        place = next(iter(_places(alert)), None)
        where = f" file={_escaped(place[1], is_property=True)},line={place[2]}," if place is not None else " "
        yield f"::error{where}title={_escaped(alert.rule, is_property=True)}::{_escaped(alert.text)}"


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


def _result(alert: Alert) -> dict[str, Any]:
    places = _places(alert)
    result: dict[str, Any] = {
        "ruleId": alert.rule,
        "level": "error",
        "message": {"text": alert.text},
        "partialFingerprints": formats.fingerprint(
            # Without line numbers and sizes: an alert stays the same when lines are added above it.
            [alert.rule, *(f"{file} {what.partition('(')[0]}" for what, file, _ in places)]
            if places
            else [alert.rule, alert.sentence]
        ),
    }
    if places:
        result["locations"] = [formats.location(places[0][1], places[0][2])]
    if len(places) > 1:
        result["relatedLocations"] = [formats.location(file, line, what) for what, file, line in places[1:]]
    return result


def _places(alert: Alert) -> list[tuple[str, str, int]]:
    """What happens, file and line, for the lines in the working directory."""
    found = ((what, formats.relative(line.file), line.line) for what, line in alert.lines)
    return [(what, file, line) for what, file, line in found if file is not None]


def _escaped(text: str, *, is_property: bool = False) -> str:
    """Text in a workflow command."""
    for character, code in (("%", "%25"), ("\r", "%0D"), ("\n", "%0A")):
        text = text.replace(character, code)
    return text.replace(":", "%3A").replace(",", "%2C") if is_property else text
