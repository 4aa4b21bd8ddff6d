"""The result of an oracle: its findings, how much it compared, and the figures it judged by."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from fsdp_conformance.errors import NothingCompared
from fsdp_conformance.history.transfer import carry
from fsdp_conformance.outcome.records import CheckCount, Finding, RankReport


def comparison(what: str, *, expected: object, got: object, details: str = "") -> str:
    """The line of every finding: "gradient: expected 1, got 0; 45 of 65 elements differ"."""
    return f"{what}: expected {expected}, got {got}" + (f"; {details}" if details else "")


@carry
@dataclass(kw_only=True, slots=True)
class CheckResult:
    """One oracle's answer about one rank's history."""

    check: str
    """The oracle's name, e.g. "gradient parity"."""
    requirement: str
    """The requirement that it checks."""
    findings: list[Finding] = field(default_factory=list)
    """First divergence first. Empty if every comparison held."""
    count: CheckCount = field(default_factory=CheckCount)
    measurements: dict[str, Any] = field(default_factory=dict)
    """JSON-ready figures for the report: noise floors, bounds, bytes."""
    notes: list[str] = field(default_factory=list)
    inconclusive: str | None = None
    """The reason why no judgement is possible: the references leave too wide a bound. None if it is."""

    def into(self, report: RankReport) -> None:
        """
        Add everything to a rank's report: counts of one check add up, each note appears once, measurements are filed
        under the check's name. An inconclusive result matters only if there are no findings.

        Raises NothingCompared if the oracle compared nothing, found nothing and gave no reason: an empty comparison
        passes for any implementation.
        """
        if not self.findings and self.inconclusive is None:
            self.demand_comparisons(f"rank {report.rank}")
        report.findings += self.findings
        total = report.checks.setdefault(self.check, CheckCount())
        total.comparisons += self.count.comparisons
        total.elements += self.count.elements
        report.notes += [note for note in self.notes if note not in report.notes]
        if self.measurements:
            report.measurements[self.check] = self.measurements
        if self.inconclusive is not None and report.inconclusive is None:
            report.inconclusive = self.inconclusive

    def counted(self, elements: int, comparisons: int = 1) -> None:
        """Record that `elements` values were compared."""
        self.count.comparisons += comparisons
        self.count.elements += elements

    def demand_comparisons(self, where: str) -> CheckResult:
        """Return itself. Raises NothingCompared if nothing was compared, because that proves nothing."""
        if self.count.comparisons == 0:
            raise NothingCompared(f"comparisons: expected at least 1, got 0 [{self.check}, {where}]")
        return self


class Tally:
    """Collects one oracle's comparisons on one rank; `result()` returns them."""

    def __init__(self, check: str, requirement: str, *, rank: int) -> None:
        self.check = check
        self.requirement = requirement
        self.rank = rank
        self.findings: list[Finding] = []
        self.count = CheckCount()

    def expect(self, holds: bool, message: str, *, elements: int = 1, **where: Any) -> None:
        """Count one comparison of `elements` things, and add a finding with the fields `where` if it does not hold."""
        self.count.comparisons += 1
        self.count.elements += elements
        if not holds:
            fields: dict[str, Any] = {"requirement": self.requirement, "rank": self.rank, **where}
            self.findings.append(Finding(check=self.check, message=message, **fields))

    def compare(
        self, holds: bool, what: str, *, expected: object, got: object, details: str = "", **where: Any
    ) -> None:
        """`expect` for two values, which go into the message and into the finding."""
        message = comparison(what, expected=expected, got=got, details=details)
        self.expect(holds, message, got=str(got), expected=str(expected), **where)

    def result(self, *, measurements: dict[str, Any] | None = None, notes: Sequence[str] = ()) -> CheckResult:
        """The result with everything that was collected so far."""
        return CheckResult(
            check=self.check,
            requirement=self.requirement,
            findings=self.findings,
            count=self.count,
            measurements=measurements or {},
            notes=list(notes),
        )
