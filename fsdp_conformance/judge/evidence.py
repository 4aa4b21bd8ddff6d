"""
The part of the ranks' reports that a record keeps, and whether its verdict follows from that.

A run file can be edited, so a verdict in favour of an implementation is derived again from the record's evidence, by
the function that derived it in the run. Verdicts against it need no proof: adding them gains nothing. The exception is
the failure of a recommendation: it counts as a remark, so it is in the implementation's favour.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence

from fsdp_conformance.contract.case import Case
from fsdp_conformance.contract.gate import declined_flags, device_for, is_refereed, ranks_of
from fsdp_conformance.contract.minimum import Minimum, minimum_of
from fsdp_conformance.contract.requirement import Level, load
from fsdp_conformance.judge.verdicts import LOUD_REFUSAL, Observed, judge
from fsdp_conformance.outcome.endings import shutdown_note
from fsdp_conformance.outcome.records import DECLINED, INAPPLICABLE, UNDECLARED, CaseRecord, RankReport
from fsdp_conformance.run_settings import RANKS, SHARED_DEVICES, RunSettings
from fsdp_conformance.verdict import CERTIFIABLE, Verdict

#: The check of cases in which an engine may refuse, whether it does or not.
REFUSAL = "refusal"

#: The label of the digest that stands for all digests of a rank that every rank has.
COMMON = "common digests"


def keep_evidence(record: CaseRecord, reports: Sequence[RankReport | None]) -> CaseRecord:
    """The record with the reports of its ranks, if they show something in favour of the implementation."""
    if record.verdict in CERTIFIABLE or is_excused(record):
        arrived = [report for report in reports if report is not None]
        # Which digests differ is a part of a failure.
        digests = [set(report.digests) for report in arrived if record.verdict is not Verdict.FAIL]
        shared = set.intersection(*digests) if digests else set()
        # Whether a fault could strike follows from what every rank issued.
        needs_schedule = any(report.unmet for report in arrived)
        record.evidence = [_reduced(report, shared, with_schedule=needs_schedule) for report in arrived]
    return record


def is_excused(record: CaseRecord) -> bool:
    """
    True if a failure shows no more than that a recommendation is not followed.

    The case must be one of a recommendation: a case of a mandatory requirement has other things to show. Its findings
    must name recommendations that it binds.
    """
    requirements = load().requirements
    levels = {name: requirements[name].level for name in record.requirements if name in requirements}
    violated_requirements = {finding.requirement for finding in record.findings}
    return (
        record.verdict is Verdict.FAIL
        and bool(violated_requirements)
        and levels.get(record.requirements[0]) is Level.SHOULD
        and all(levels.get(name) is Level.SHOULD for name in violated_requirements)
    )


def contradictions(
    record: CaseRecord, case: Case, *, declared: Callable[[str], frozenset[str]], settings: RunSettings
) -> list[str]:
    """
    Return the reasons why a record's verdict does not follow from the rest of it; empty if it does, or need not.

    `declared` returns the implementation's flags on a type of device, and `settings` are those of the run.
    """
    if not (record.verdict in CERTIFIABLE or is_excused(record)) or settings.stress_seed is not None:
        # A rank that was made to fail has no report, and a stress run certifies nothing.
        return []
    problems: list[str] = []
    # Only a PASS must be without consequences: where ranks refuse, others lose a peer.
    number = len(record.findings) + (len(record.consequences) if record.verdict is Verdict.PASS else 0)
    if number and record.verdict in CERTIFIABLE:
        problems.append(f"{record.verdict} with {number} finding{'s' if number > 1 else ''}")
    device = device_for(case, settings)
    if record.evidence:
        problems += _of_processes(record, settings)
        problems += _of_ranks(record, case, device, declared)
        if is_refereed(case, settings, device) is not record.refereed and not settings.reuse_ranks:
            problems.append(
                "it was judged by its own ranks, although it has a referee"
                if not record.refereed
                else "it was judged by a referee, although its ranks judge by themselves"
            )
        return problems
    if record.verdict in (Verdict.PASS, Verdict.FAIL):
        problems.append(f"{record.verdict} without the reports of its ranks")
    elif record.verdict is Verdict.UNSUPPORTED:
        missing = declined_flags(case, declared=declared, device=device)
        if not missing:
            problems.append("UNSUPPORTED, but every flag that the case needs is declared")
        elif record.measurements.get(UNDECLARED) != missing:
            problems.append(f"declined for another reason than that {', '.join(missing)} is not declared")
        if INAPPLICABLE in record.measurements:
            problems.append("it does not apply, but no rank has seen that")
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
    rejudged = judge(
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
    if rejudged.verdict is not record.verdict:
        problems.append(f"stated {record.verdict}, but its evidence yields {rejudged.verdict}: {rejudged.reason}")
    elif record.verdict is Verdict.FAIL and _sentences(rejudged) != _sentences(record):
        problems.append("its findings are not those of its ranks")
    for name in (UNDECLARED, INAPPLICABLE):
        stated, derived = record.measurements.get(name, []), rejudged.measurements.get(name, [])
        if stated != derived:
            problems.append(f"stated that {_listed(stated)} is {name}, but its evidence yields {_listed(derived)}")
    unplanned_faults = sorted({fault for report in record.evidence for fault in report.unmet} - set(case.faults))
    if unplanned_faults:
        problems.append(f"a fault never struck that the case does not have: {'; '.join(unplanned_faults)}")
    for name in ("comparisons", "elements"):
        stated, counted = getattr(record, name), getattr(rejudged, name)
        if stated != counted:
            problems.append(f"stated {stated} {name}, but its ranks made {counted}")
    if record.verdict is rejudged.verdict is Verdict.PASS:
        problems += _of_comparisons(record, case)
    return problems


def shutdown_problems(record: CaseRecord) -> list[str]:
    """
    Return a note for each rank that ended badly after it had reported, if the case passed.

    The reason is unknown, and it may be the implementation: enough for a note, too little for a certificate.
    """
    if record.verdict is not Verdict.PASS:
        return []
    by_rank = {report.rank: report for report in record.evidence}
    notes = (shutdown_note(by_rank.get(end.rank), end) for end in record.exits)
    return [note for note in notes if note is not None]


def _of_processes(record: CaseRecord, settings: RunSettings) -> list[str]:
    """Contradictions between a record's ranks and the kind of ranks of the run."""
    problems = []
    ranks = ranks_of(settings)
    if record.ranks != ranks:
        problems.append(f"its ranks were {record.ranks}, but those of the run {ranks}")
    silent = [end.rank for end in record.exits if not end.reported]
    if silent and record.verdict is Verdict.PASS:
        problems.append(f"PASS, but no report of rank {_listed(silent)} had arrived")
    settings_of_run = {"seed": settings.seed, "num_threads": settings.num_threads}
    for name, value in settings_of_run.items():
        if record.environment.get(name, value) != value:
            problems.append(f"its {name} was {record.environment[name]!r}, but that of the run {value}")
    if record.environment.get("start") == "reused" and not settings.reuse_ranks:
        problems.append("its ranks had run other cases, but those of the run are fresh")
    if ranks in (RANKS[0], SHARED_DEVICES):
        pids = [end.pid for end in record.exits]
        if any(pid is None or pid <= 1 for pid in pids):
            problems.append(f"its ranks had the process ids {_listed(pids)}, which no ranks have")
        elif len(set(pids)) < len(pids):
            problems.append(f"its ranks had the process ids {_listed(pids)}, but each is a process of its own")
    return problems


def _of_comparisons(record: CaseRecord, case: Case) -> list[str]:
    """Problems of a record with fewer checks than the suite's own runs of the case, as the contract has them."""
    if not record.elements:
        return ["no rank compared an element of anything"]
    minimum: Minimum | None = minimum_of(case)
    if minimum is None or minimum.device != record.device:
        return []
    if DECLINED in record.measurements and case.requirements[0] == LOUD_REFUSAL:
        # A combination may be refused; then the only thing to see is that all ranks refuse it.
        return []
    problems = []
    # Which other checks a case makes depends on whether the engine refuses.
    checks = {REFUSAL: minimum.checks[REFUSAL]} if REFUSAL in minimum.checks else minimum.checks
    for name, ranks in checks.items():
        counts = [count for report in record.evidence if (count := report.checks.get(name)) is not None]
        counts = [count for count in counts if count.comparisons > 0]
        if len(counts) < ranks:
            problems.append(f"{len(counts)} ranks made the check {name!r}, which {ranks} ranks must make")
        elif not any(count.elements for count in counts):
            problems.append(f"the check {name!r} compared no element")
    return problems


def _sentences(record: CaseRecord) -> list[str]:
    return [finding.sentence() for finding in record.findings]


def _listed(values: Sequence[object]) -> str:
    return ", ".join(map(str, values)) or "nothing"


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
        digest_requirements={} if shared else report.digest_requirements,
        error=report.error,
        not_run=report.not_run,
        inconclusive=report.inconclusive,
    )
