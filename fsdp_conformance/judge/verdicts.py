"""The verdict on a case that ran."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from fsdp_conformance import contract
from fsdp_conformance.capability import CAPABILITIES
from fsdp_conformance.contract.case import Case
from fsdp_conformance.contract.gate import decided, empty_record
from fsdp_conformance.diagnosis.headline import headline_of
from fsdp_conformance.judge.findings import digest_findings, sorted_and_folded
from fsdp_conformance.outcome.endings import (
    CAUSES,
    Attribution,
    Ending,
    RankEnding,
    attribute,
    class_of,
    first_line,
    kind_of_error,
    ranks_in_words,
)
from fsdp_conformance.outcome.mismatch import differing_calls
from fsdp_conformance.outcome.records import (
    ABSENT,
    INAPPLICABLE,
    UNDECLARED,
    CaseRecord,
    Finding,
    RankError,
    RankExit,
    RankReport,
)
from fsdp_conformance.run_settings import RunSettings
from fsdp_conformance.verdict import Verdict

#: The requirement that forbids training on silently, and hanging instead of refusing.
LOUD_REFUSAL = "R000"

_VERDICT = {
    Ending.LOST_PEER: Verdict.FAIL,
    Ending.DIED: Verdict.CRASH,
    Ending.EXITED: Verdict.CRASH,
    Ending.STOPPED: Verdict.HANG,
    Ending.STUCK: Verdict.HANG,
    Ending.TIMED_OUT: Verdict.HANG,
}

#: The verdict on a rank that raised, by who is to blame. Any other blame is a mistake of the suite.
_VERDICT_BY_BLAME = {
    "implementation": Verdict.FAIL,
    "adapter": Verdict.ERROR_ADAPTER,
    "environment": Verdict.NOT_RUN_ENV,
    "references": Verdict.INCONCLUSIVE,
}

#: Verdicts that accuse the implementation, with the check that the finding names.
_ACCUSATIONS = {Verdict.FAIL: "training", Verdict.HANG: "deadline", Verdict.CRASH: "process end"}

#: The checks of findings that no comparison made: how a rank ended, and an exception that refused what must work.
ENDINGS = frozenset(_ACCUSATIONS.values())
WRONGFUL_REFUSAL = "wrongful refusal"


@dataclass(frozen=True, kw_only=True, slots=True)
class Evidence:
    """The grounds of a verdict."""

    case: Case
    level: str | None
    """The primary requirement's level: M, C or S. None if it is not in the contract; then it counts as mandatory."""
    declared: frozenset[str]
    undeclared: Sequence[str]
    """Flags that the case asks for and the adapter does not declare."""
    reports: Sequence[RankReport]
    """The reports that arrived."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Observed:
    """How a case ran. `reports` and `exits` have one entry per rank, in rank order."""

    reports: Sequence[RankReport | None]
    """A report that never arrived is None."""
    exits: Sequence[RankExit]
    declared: frozenset[str] = frozenset()
    """The flags that the implementation declares on the device."""
    device: str = "cpu"
    """The type of device that the ranks used."""
    seconds: float = 0.0


def judge(case: Case, observed: Observed, settings: RunSettings, *, level: str | None = None) -> CaseRecord:
    """
    The record of a case that ran in a run with these settings.

    `level` is the primary requirement's (M, C or S), by default as the contract has it.
    """
    reports, exits, declared = observed.reports, observed.exits, observed.declared
    record = empty_record(case, settings, observed.device, seconds=observed.seconds)
    record.exits = list(exits)
    problem = _malformed(case, reports, exits)
    if problem:
        return decided(record, Verdict.ERROR_SUITE, problem)
    arrived = [report for report in reports if report is not None]
    evidence = Evidence(
        case=case,
        level=level or _level(case),
        declared=declared,
        undeclared=_undeclared(case, declared, arrived),
        reports=arrived,
    )
    attribution = attribute(reports, exits)
    failures = _failures(attribution)
    # A rank that failed has recorded only part of its digests.
    digests = digest_findings(case, arrived) if not failures else []
    record.findings, left_out = sorted_and_folded(arrived, digests, world_size=case.world_size)
    _collect(record, arrived)
    record.notes += attribution.notes
    if left_out:
        record.notes.append(f"{left_out} further findings were left out of this record")
    headline = _headline(failures, arrived)
    record.consequences = [failure.full_sentence for failure in failures if failure is not headline]
    if headline is None:
        _judge_reports(record, evidence)
    else:
        _judge_ending(record, evidence, headline)
    return record


def _failures(attribution: Attribution) -> list[RankEnding]:
    """The ranks that failed, without those that only stopped at their own findings."""
    return [failure for failure in attribution.failures if failure.ending is not Ending.FOUND]


def _headline(failures: Sequence[RankEnding], reports: Sequence[RankReport]) -> RankEnding | None:
    """
    The failure that decides the verdict.

    None if no rank failed, or if all that failed only waited for a rank that ended early on purpose: it stopped at its
    findings, was skipped, or could not be judged.
    """
    if not failures:
        return None
    if any(report.not_run is not None or report.inconclusive is not None for report in reports):
        is_explained = all(failure.ending not in CAUSES for failure in failures)
    else:
        # Findings alone do not end a body, so they explain a lost peer, but not a rank that never came.
        has_findings = any(report.findings for report in reports)
        is_explained = has_findings and all(failure.ending is Ending.LOST_PEER for failure in failures)
    return None if is_explained else failures[0]


def _malformed(case: Case, reports: Sequence[RankReport | None], exits: Sequence[RankExit]) -> str:
    """The reason why the evidence cannot belong to the case, or ""."""
    size = case.world_size
    if len(reports) != size or len(exits) != size:
        return f"expected {size} reports and {size} exits, got {len(reports)} and {len(exits)} [{case.id}]"
    senders = [report.rank if report is not None else index for index, report in enumerate(reports)]
    ended = [end.rank for end in exits]
    if senders != list(range(size)) or ended != senders:
        return f"evidence must be in rank order, got reports of ranks {senders} and exits of ranks {ended} [{case.id}]"
    return ""


def _level(case: Case) -> str | None:
    """The primary requirement's level; None if it is not in the contract."""
    requirement = contract.load().requirements.get(case.requirements[0])
    return requirement.level.value if requirement is not None else None


def _undeclared(case: Case, declared: frozenset[str], reports: Sequence[RankReport]) -> list[str]:
    flags = dict.fromkeys(case.needs)
    for report in reports:
        flags.update(dict.fromkeys(report.asked))
    return [flag for flag in flags if flag not in declared]


def _collect(record: CaseRecord, reports: Sequence[RankReport]) -> None:
    """Copy into the record what it keeps whatever the verdict."""
    for report in reports:
        record.comparisons += sum(count.comparisons for count in report.checks.values())
        record.elements += sum(count.elements for count in report.checks.values())
        record.notes += [note for note in report.notes if note not in record.notes]
        record.training_seconds = max(record.training_seconds, report.seconds.get("training", 0.0))
    record.measurements = _per_rank({report.rank: report.measurements for report in reports})
    if reports:
        record.environment = reports[0].environment
        record.schedule = reports[0].schedule if reports[0].rank == 0 else []


def _per_rank(by_rank: Mapping[int, Mapping[str, Any]]) -> dict[str, Any]:
    """The figures by name: one value where all ranks agree, otherwise a dict with one per rank."""
    merged: dict[str, Any] = {}
    for key in dict.fromkeys(key for figures in by_rank.values() for key in figures):
        values = {f"rank {rank}": figures[key] for rank, figures in by_rank.items() if key in figures}
        first = next(iter(values.values()))
        agreed = len(values) == len(by_rank) and all(value == first for value in values.values())
        merged[key] = first if agreed else values
    return merged


def _judge_ending(record: CaseRecord, evidence: Evidence, headline: RankEnding) -> None:
    """The verdict on a case in which at least one rank failed."""
    error = headline.error
    verdict = _VERDICT.get(headline.ending, Verdict.ERROR_SUITE)
    if error is not None:
        record.traceback = error.traceback
    if error is not None and headline.ending is Ending.RAISED:
        blame = _blame(error)
        if blame in ("refusal", "implementation") and evidence.undeclared and record.findings:
            # It trained to wrong numbers before it raised.
            _judge_reports(record, evidence)
            return
        if blame == "refusal" or (blame == "implementation" and evidence.undeclared):
            _judge_refusal(record, evidence, headline.rank, error)
            return
        if blame == "environment":
            record.measurements[ABSENT] = [error.capability or "unnamed"]
        verdict = _VERDICT_BY_BLAME.get(blame, Verdict.ERROR_SUITE)
    decided(record, verdict, headline.full_sentence)
    if error is not None and len(error.problems) > 1:
        record.reason = f"rank {headline.rank}: " + "; ".join(error.problems)
    if record.verdict in _ACCUSATIONS:
        record.findings.insert(0, _ending_finding(record, evidence, headline))


def _blame(error: RankError) -> str:
    """The part that is to blame for an exception. If the references disagree, it is "references"."""
    return "references" if class_of(error) == "ReferencesDisagree" and error.blame == "suite" else error.blame


def _ending_finding(record: CaseRecord, evidence: Evidence, headline: RankEnding) -> Finding:
    """The ending as a finding: against R000 if a refusal was due, otherwise against the case's own requirement."""
    last = {end.rank: end.last_collectives[-1] if end.last_collectives else None for end in record.exits}
    likely = _who_raised(evidence, headline)
    if record.verdict is Verdict.HANG and len(set(last.values())) > 1:
        ranks = " | ".join(f"rank {rank} {line or 'none'}" for rank, line in last.items())
        likely = differing_calls(record.exits) or f"ranks issue different collectives; the last of each: {ranks}"
    if record.verdict is Verdict.CRASH:
        likely = differing_calls(record.exits) or likely
    message = headline.full_sentence
    if evidence.undeclared:
        flags = ", ".join(evidence.undeclared)
        message += f"; {flags} is not declared, so every rank should have refused it by an exception"
    return Finding(
        requirement=LOUD_REFUSAL if evidence.undeclared else evidence.case.requirements[0],
        check=_ACCUSATIONS[record.verdict],
        message=message,
        rank=headline.rank,
        call=last[headline.rank],
        likely=likely,
        detail=headline.error.message if headline.error is not None and headline.ending is Ending.TIMED_OUT else None,
    )


def _who_raised(evidence: Evidence, headline: RankEnding) -> str | None:
    """
    A phrase that says which ranks raised, or None.

    If every rank raises the same exception, the cause is the configuration or the step.
    """
    errors = {report.rank: report.error for report in evidence.reports if report.error is not None}
    raised = {rank: error for rank, error in errors.items() if kind_of_error(error) is Ending.RAISED}
    size = evidence.case.world_size
    if headline.error is None or size == 1:
        return None
    if len(raised) == size:
        is_same = len({(error.kind, first_line(error.message)) for error in raised.values()}) == 1
        return "every rank raised: the same exception" if is_same else "every rank raised: not all the same exception"
    if list(raised) == [headline.rank]:
        return f"only rank {headline.rank} raised: the others lost it as a peer, or had gone on"
    return None


def _judge_refusal(record: CaseRecord, evidence: Evidence, rank: int, error: RankError) -> None:
    """A refusal is right if the case asks for a flag that is not declared, and if every rank refuses."""
    text, flag = first_line(error.message), error.capability
    trained = [report.rank for report in evidence.reports if report.error is None]
    is_optional = flag is not None and flag in CAPABILITIES and flag not in evidence.declared
    requirement = evidence.case.requirements[0]
    if trained:
        requirement = LOUD_REFUSAL
        message = f"rank {rank} refused ({text}), but {ranks_in_words(trained)} went on training: all ranks must refuse"
    elif (evidence.undeclared and (flag is None or flag in evidence.undeclared)) or (
        evidence.level == "C" and is_optional
    ):
        names = [flag] if flag is not None else list(evidence.undeclared)
        record.measurements[UNDECLARED] = names
        decided(record, Verdict.UNSUPPORTED, f"{', '.join(names)} is not declared and was refused: {text}")
        return
    elif flag is not None and flag in evidence.declared:
        message = f"refused although {flag} is declared: {text}"
    elif flag is not None:
        message = f"refused although the case does not ask for {flag}: {text}"
    else:
        message = f"refused although everything the case asks for is declared or mandatory: {text}"
    record.findings.insert(0, Finding(requirement=requirement, check=WRONGFUL_REFUSAL, message=message, rank=rank))
    decided(record, Verdict.FAIL, message)


def _judge_reports(record: CaseRecord, evidence: Evidence) -> None:
    """The verdict on a case in which no rank failed, from the reports."""
    inconclusive = [report for report in evidence.reports if report.inconclusive is not None]
    if inconclusive:
        if record.findings:
            record.notes.append(f"{len(record.findings)} findings were kept, but the references behind them disagree")
        decided(record, Verdict.INCONCLUSIVE, f"rank {inconclusive[0].rank}: {inconclusive[0].inconclusive}")
    elif (headline := headline_of(record)) is not None:
        if evidence.undeclared:
            headline = _silent(headline, evidence.undeclared)
            record.findings.insert(0, headline)
        decided(record, Verdict.FAIL, headline.sentence())
    elif any(report.not_run is not None for report in evidence.reports):
        _judge_not_run(record, evidence.reports)
    elif any(report.unmet for report in evidence.reports):
        _judge_unmet(record, evidence.reports)
    elif unobserved := list(dict.fromkeys(flag for report in evidence.reports for flag in report.unobserved)):
        record.measurements[UNDECLARED] = unobserved
        decided(record, Verdict.UNSUPPORTED, _why_not_observed(evidence.case.requirements[0], unobserved))
    elif empty := _compared_nothing(evidence.reports):
        decided(record, Verdict.ERROR_SUITE, empty)
    else:
        record.notes += [f"under-declared: {flag}" for flag in evidence.undeclared]
        decided(record, Verdict.PASS, "")


def _why_not_observed(requirement: str, unobserved: Sequence[str]) -> str:
    """The reason for UNSUPPORTED: capabilities that are not declared, and combinations that the adapter avoids."""
    flags = [name for name in unobserved if name in CAPABILITIES]
    avoided = [name for name in unobserved if name not in CAPABILITIES]
    reasons = []
    if flags:
        verb = "are" if len(flags) > 1 else "is"
        reasons.append(f"{requirement} cannot be judged: {', '.join(flags)} {verb} not declared")
    if avoided:
        reasons.append(f"judged without what the adapter avoids: {', '.join(avoided)}")
    return "; ".join(reasons)


def _judge_not_run(record: CaseRecord, reports: Sequence[RankReport]) -> None:
    absent = [report for report in reports if report.not_run is not None]
    ran = [report.rank for report in reports if report.not_run is None and report.error is None]
    if ran:
        absence = f"rank {absent[0].rank} did not ({absent[0].not_run})"
        decided(record, Verdict.ERROR_SUITE, f"ranks disagree on whether to run: {absence}, {ranks_in_words(ran)} did")
        return
    # A certificate accepts only what the manifest names: a rank that names nothing is not excused.
    record.measurements.setdefault(ABSENT, ["unnamed"])
    decided(record, Verdict.NOT_RUN_ENV, absent[0].not_run or "no reason given")


def _judge_unmet(record: CaseRecord, reports: Sequence[RankReport]) -> None:
    """
    The verdict where a fault had no collective to strike, and everything else held: the case does not apply.

    Whether the engine issues such collectives is read from the schedules of all ranks. If one has them, the plan of
    faults is wrong.
    """
    for report in reports:
        for fault, ops in report.unmet.items():
            matching_lines = [
                (other.rank, line) for other in reports for line in other.schedule if _is_one_of(line, ops)
            ]
            if matching_lines:
                rank, line = matching_lines[0]
                reason = f"{fault} never struck, although rank {rank} issues {line}"
                decided(record, Verdict.ERROR_SUITE, reason)
                return
    faults = dict.fromkeys(fault for report in reports for fault in report.unmet)
    missing = dict.fromkeys(" or ".join(ops) for report in reports for ops in report.unmet.values())
    record.measurements[INAPPLICABLE] = list(faults)
    issued = f"the engine issues no {', and no '.join(missing)} in training"
    decided(record, Verdict.UNSUPPORTED, f"{issued}, so the case does not apply: {'; '.join(faults)} never struck")


def _is_one_of(line: str, ops: Sequence[str]) -> bool:
    """True if a line of a schedule is a collective of training of one of these kinds."""
    phase, _, rest = line.partition(" ")
    return phase != "setup" and rest.partition(" ")[0] in ops


def _compared_nothing(reports: Sequence[RankReport]) -> str:
    """A sentence that names a rank or a check that compared nothing, or ""."""
    for report in reports:
        if not sum(count.comparisons for count in report.checks.values()):
            return f"rank {report.rank} made no comparison"
    for name in dict.fromkeys(name for report in reports for name in report.checks):
        if not any(report.checks[name].comparisons for report in reports if name in report.checks):
            return f"check {name!r} made no comparison on any rank"
    return ""


def _silent(first: Finding, undeclared: Sequence[str]) -> Finding:
    """The finding that an undeclared flag was neither refused nor handled correctly."""
    flags = ", ".join(undeclared)
    message = f"{flags} is neither declared nor refused, and training gave wrong results: {first.message}"
    return replace(first, requirement=LOUD_REFUSAL, check="loud refusal", message=message)
