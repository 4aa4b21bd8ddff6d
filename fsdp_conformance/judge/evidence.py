"""
The part of the ranks' reports that a record keeps, and whether its verdict follows from that.

A run file can be edited, so a verdict that would do an implementation good is derived again from the record's evidence.
Verdicts against it need no proof: adding them gains nothing.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence

from fsdp_conformance.contract.case import Case
from fsdp_conformance.contract.gate import declined_flags, device_for
from fsdp_conformance.judge.verdicts import Observed, judge
from fsdp_conformance.outcome.endings import shutdown_note
from fsdp_conformance.outcome.records import CaseRecord, RankReport
from fsdp_conformance.run_settings import RunSettings
from fsdp_conformance.verdict import CERTIFIABLE, Verdict

#: The label of the digest that stands for all digests of a rank that every rank has.
COMMON = "common digests"


def keep_evidence(record: CaseRecord, reports: Sequence[RankReport | None]) -> CaseRecord:
    """The record with the reports of its ranks, if they show something in favour of the implementation."""
    if record.verdict in CERTIFIABLE:
        arrived = [report for report in reports if report is not None]
        shared = set.intersection(*(set(report.digests) for report in arrived)) if arrived else set()
        # Whether a fault could strike follows from what every rank issued.
        needs_schedule = any(report.unmet for report in arrived)
        record.evidence = [_reduced(report, shared, with_schedule=needs_schedule) for report in arrived]
    return record


def contradictions(
    record: CaseRecord, case: Case, *, declared: Callable[[str], frozenset[str]], settings: RunSettings
) -> list[str]:
    """
    Why the verdict of a record does not follow from the rest of it; empty if it does, or if it does not matter.

    `declared` returns the implementation's flags on a type of device, and `settings` are those of the run.
    """
    if record.verdict not in CERTIFIABLE or settings.stress_failure:
        # A rank that was made to fail has no report, and such a run certifies nothing.
        return []
    problems = []
    # Ranks that lose a peer are what a refusal leads to.
    number = len(record.findings) + (len(record.consequences) if record.verdict is Verdict.PASS else 0)
    if number:
        problems.append(f"{record.verdict} with {number} finding{'s' if number > 1 else ''}")
    device = device_for(case, settings)
    if record.evidence:
        return problems + _of_ranks(record, case, device, declared)
    if record.verdict is Verdict.PASS:
        problems.append("PASS without the reports of its ranks")
    elif record.verdict is Verdict.UNSUPPORTED:
        missing = declined_flags(case, declared=declared, device=device)
        if not missing:
            problems.append("UNSUPPORTED, but every flag that the case needs is declared")
    return problems


def _of_ranks(record: CaseRecord, case: Case, device: str, declared: Callable[[str], frozenset[str]]) -> list[str]:
    """Contradictions between a record and the reports of its ranks."""
    problems = []
    if record.device != device:
        problems.append(f"ran on {record.device}, but the run sends the case to {device}")
    missing = declined_flags(case, declared=declared, device=device)
    if missing:
        problems.append(f"{record.verdict} after it ran, but {', '.join(missing)} is not declared")
    by_rank = {report.rank: report for report in record.evidence}
    again = judge(
        case,
        Observed(
            reports=[by_rank.get(rank) for rank in range(case.world_size)],
            exits=record.exits,
            declared=declared(device),
        ),
        RunSettings(),
    )
    if len(by_rank) != len(record.evidence) or set(by_rank) - set(range(case.world_size)):
        problems.append(f"reports of ranks {sorted(report.rank for report in record.evidence)}")
    if again.verdict is not record.verdict:
        problems.append(f"stated {record.verdict}, but its evidence yields {again.verdict}: {again.reason}")
    for name in ("comparisons", "elements"):
        stated, counted = getattr(record, name), getattr(again, name)
        if stated != counted:
            problems.append(f"stated {stated} {name}, but its ranks made {counted}")
    if record.verdict is Verdict.PASS:
        # The reason is unknown, and it may be the implementation: enough for a note, too little for a certificate.
        notes = (shutdown_note(by_rank.get(end.rank), end) for end in record.exits)
        problems += [note for note in notes if note is not None]
    return problems


def _reduced(report: RankReport, shared: set[str], *, with_schedule: bool) -> RankReport:
    """The report without what the verdict does not depend on; digests that all ranks have become one."""
    digests = {label: digest for label, digest in report.digests.items() if label not in shared}
    if shared:
        lines = "\n".join(f"{label} {report.digests[label]}" for label in sorted(shared))
        digests[COMMON] = hashlib.sha256(lines.encode()).hexdigest()
    return RankReport(
        rank=report.rank,
        findings=report.findings,
        checks=report.checks,
        asked=report.asked,
        unobserved=report.unobserved,
        unmet=report.unmet,
        schedule=report.schedule if with_schedule else [],
        digests=digests,
        error=report.error,
        not_run=report.not_run,
        inconclusive=report.inconclusive,
    )
