"""What an oracle hands back: findings, how much it looked at, and the figures that it judged by."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from fsdp_conformance.errors import NothingCompared
from fsdp_conformance.outcome import CheckCount, Finding, RankReport


@dataclass(kw_only=True, slots=True)
class CheckResult:
    """One oracle's answer about one rank's history."""

    check: str
    """The oracle's name, e.g. "gradient parity"."""
    requirement: str
    """The requirement that it speaks for."""
    findings: list[Finding] = field(default_factory=list)
    """First divergence first. Empty: what was compared held."""
    count: CheckCount = field(default_factory=CheckCount)
    measurements: dict[str, Any] = field(default_factory=dict)
    """JSON-ready figures for the report: noise floors, bounds, bytes."""
    notes: list[str] = field(default_factory=list)
    inconclusive: str | None = None
    """Why nothing can be said, where the references leave too wide a bound."""

    def into(self, report: RankReport) -> None:
        """
        Add everything to a rank's report: counts of one check add up, a note is said once, measurements go under the
        check's name. An inconclusive result counts only if nothing was found.

        Raises NothingCompared where the oracle compared nothing, found nothing and gave no reason: an empty comparison
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
        """Note that `elements` values were looked at."""
        self.count.comparisons += comparisons
        self.count.elements += elements

    def demand_comparisons(self, where: str) -> CheckResult:
        """Itself, or NothingCompared: an oracle that looked at nothing proves nothing."""
        if self.count.comparisons == 0:
            raise NothingCompared(f"comparisons=0, but should be at least 1 [{self.check}, {where}]")
        return self


class Tally:
    """Collects one oracle's comparisons on one rank; `result()` is what it hands back."""

    def __init__(self, check: str, requirement: str, *, rank: int) -> None:
        self.check = check
        self.requirement = requirement
        self.rank = rank
        self.findings: list[Finding] = []
        self.count = CheckCount()

    def expect(self, holds: bool, message: str, *, elements: int = 1, **where: Any) -> None:
        """Count one comparison of `elements` things; a finding unless it holds, with `where` as its other fields."""
        self.count.comparisons += 1
        self.count.elements += elements
        if not holds:
            fields: dict[str, Any] = {"requirement": self.requirement, "rank": self.rank, **where}
            self.findings.append(Finding(check=self.check, message=message, **fields))

    def result(self, *, measurements: dict[str, Any] | None = None, notes: Sequence[str] = ()) -> CheckResult:
        """Everything collected so far."""
        return CheckResult(
            check=self.check,
            requirement=self.requirement,
            findings=self.findings,
            count=self.count,
            measurements=measurements or {},
            notes=list(notes),
        )
