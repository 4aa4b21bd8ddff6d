"""A run next to an earlier one, its baseline: which failures are new, which are gone, and what is no longer judged."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass

from fsdp_conformance.outcome.records import CaseRecord
from fsdp_conformance.report.expectations import SILENT, UNREMARKABLE, what_happened
from fsdp_conformance.report.run_content import RunFile
from fsdp_conformance.verdict import Verdict

#: Verdicts of cases that were not judged: declined, or left out.
_UNJUDGED = SILENT | {Verdict.UNSUPPORTED}


@dataclass(frozen=True, kw_only=True, slots=True)
class Changes:
    """How a run differs from its baseline. Each entry is a sentence that begins with a case id."""

    new: tuple[str, ...]
    """Failures that the baseline does not have, or has with another verdict."""
    fixed: tuple[str, ...]
    """Failures of the baseline that pass now."""
    unchanged: tuple[str, ...]
    """Failures that both have, with the same verdict."""
    missing: tuple[str, ...]
    """Cases that the baseline judged and that this run was asked for, but did not judge."""

    @property
    def worse(self) -> bool:
        """True if a case fails that did not, or is no longer judged."""
        return bool(self.new or self.missing)

    def lines(self) -> list[str]:
        """The changes for people, what needs attention first; unchanged failures are only counted."""
        kinds = {"new": self.new, "fixed": self.fixed, "unchanged": self.unchanged, "missing": self.missing}
        listed = [f"{kind:<9}{sentence}" for kind in ("new", "missing", "fixed") for sentence in kinds[kind]]
        return [*listed, ", ".join(f"{len(sentences)} {kind}" for kind, sentences in kinds.items())]


def changes(run: RunFile, baseline: RunFile, *, selected: Collection[str]) -> Changes:
    """The changes since the baseline. `selected`: the cases that the run was asked for."""
    before = {record.case: record for record in baseline.records}
    now = {record.case: record for record in run.records}
    new, fixed, unchanged = [], [], []
    for case, record in now.items():
        old = before.get(case)
        if _failed(record):
            if old is not None and old.verdict is record.verdict:
                unchanged.append(f"{case}: {record.verdict}")
            else:
                was = f", {old.verdict} before" if old is not None else ""
                new.append(f"{case}: {record.verdict}{was}: {what_happened(record)}")
        elif old is not None and _failed(old) and record.verdict is Verdict.PASS:
            fixed.append(f"{case}: {old.verdict} before")
    missing = [
        f"{case}: {old.verdict} before, {now[case].verdict if case in now else 'without a verdict'} now"
        for case, old in before.items()
        if old.verdict not in _UNJUDGED and _is_missing(case, now, selected)
    ]
    return Changes(new=tuple(new), fixed=tuple(fixed), unchanged=tuple(unchanged), missing=tuple(missing))


def _failed(record: CaseRecord) -> bool:
    return record.verdict not in UNREMARKABLE


def _is_missing(case: str, now: dict[str, CaseRecord], selected: Collection[str]) -> bool:
    return now[case].verdict in _UNJUDGED - {Verdict.DISABLED} if case in now else case in selected
