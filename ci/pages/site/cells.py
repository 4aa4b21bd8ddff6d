"""The kinds of cells on the scoreboard: one function decides from an engine's results which one a cell has."""

from __future__ import annotations

from dataclasses import dataclass

from fsdp_conformance.diagnosis.severity import Severity
from fsdp_conformance.report.coverage import Seen


@dataclass(frozen=True, slots=True)
class Kind:
    """The look of a cell. `name` is the class that site.css has a colour for."""

    name: str
    mark: str
    words: str
    """For the legend and the filter."""

    @property
    def classes(self) -> str:
        """The name, and what a severity is one kind of."""
        return self.name if self not in SEVERITIES.values() else f"{FAIL.name} {self.name}"


PASS = Kind("pass", "✓", "all cases passed")
SOME = Kind("some", "✓", "some passed, none failed")
FAIL = Kind("fail", "✗", "cases failed, in any way")
DECLINED = Kind("declined", "-", "declined: not offered")
UNJUDGED = Kind("unjudged", "?", "not judged on that machine")
ABSENT = Kind("absent", "·", "not run, or changed since")

#: Failures of which the harm is known.
SEVERITIES = {severity: Kind(severity.value, FAIL.mark, severity.words) for severity in Severity}

KINDS = (*SEVERITIES.values(), FAIL, PASS, SOME, DECLINED, UNJUDGED, ABSENT)


def kind_of(seen: Seen) -> Kind:
    """The kind of a cell, by the worst that the engine's cases of the requirement have shown."""
    if seen.failed:
        return FAIL if seen.severity is None else SEVERITIES[seen.severity]
    if seen.passed:
        return SOME if seen.declined or seen.unjudged or seen.absent else PASS
    if seen.unjudged:
        return UNJUDGED
    if seen.declined and not seen.absent:
        return DECLINED
    return ABSENT


def total(seen: Seen) -> int:
    """All cases of the requirement."""
    return seen.passed + seen.failed + seen.declined + seen.unjudged + seen.absent


def label(seen: Seen) -> str:
    """The text of a cell: a mark, and the number of cases that it is about."""
    kind = kind_of(seen)
    count = seen.failed or (seen.passed if kind in (PASS, SOME) else "")
    return f"{kind.mark}{count}"


def sentence(seen: Seen) -> str:
    """All counts of a cell in words."""
    counts = {
        "failed": seen.failed,
        "passed": seen.passed,
        "declined": seen.declined,
        "not judged": seen.unjudged,
        "not run": seen.absent,
    }
    harm = [seen.severity.words] if seen.severity is not None else []
    return ", ".join([*(f"{count} {word}" for word, count in counts.items() if count), *harm]) or "no cases"
