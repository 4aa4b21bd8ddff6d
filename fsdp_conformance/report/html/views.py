"""A run, arranged in the order in which people read it: the verdict, what is wrong, then everything else."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from fsdp_conformance import contract
from fsdp_conformance.contract import CHAPTERS, Requirement
from fsdp_conformance.diagnosis.grouping import Group, grouped
from fsdp_conformance.outcome.records import CaseRecord
from fsdp_conformance.report.baseline import Changes
from fsdp_conformance.report.certificate import Certificate
from fsdp_conformance.report.expectations import Judged
from fsdp_conformance.report.html import pictures
from fsdp_conformance.report.html.pictures import Memory, Strip
from fsdp_conformance.report.run_content import RunFile
from fsdp_conformance.report.terminal import (
    Field,
    basis,
    duration,
    group_mark,
    harm_line,
    headline,
    record_fields,
    verdict_words,
)
from fsdp_conformance.verdict import ACCUSING, Verdict, worst

#: The findings of a case that are listed; the run file has all.
_FINDINGS_LISTED = 40

#: Problems that are shown with pictures and stacks, so that the page of a hopeless run can still be opened.
_ILLUSTRATED = 20

#: Verdicts of cases that were not judged, with a reason each.
_NOT_RUN = (Verdict.UNSUPPORTED, Verdict.NOT_RUN_ENV, Verdict.DISABLED, Verdict.INCONCLUSIVE)


@dataclass(frozen=True, kw_only=True, slots=True)
class Problem:
    """Cases that failed in the same way, shown by one of them."""

    title: str
    verdict: Verdict
    severity: str
    """The harm in words; empty if it does not accuse the engine."""
    mark: str
    """The standing of its cases in the list of known failures."""
    is_known: bool
    """True if the list announces all of them."""
    case: str
    fields: tuple[Field, ...]
    cases: tuple[str, ...]
    """All of them."""
    findings: tuple[str, ...]
    """The findings of the case that is shown, a sentence each."""
    num_findings: int
    differences: Strip | None
    collectives: Strip | None
    schedule: Strip | None
    stacks: tuple[tuple[str, str], ...]
    """Where the ranks were, if a deadline ended them."""


@dataclass(frozen=True, kw_only=True, slots=True)
class CaseLine:
    """One case in the list of its requirement."""

    id: str
    verdict: Verdict
    reason: str
    time: str


@dataclass(frozen=True, kw_only=True, slots=True)
class RequirementLine:
    """One requirement with the cases that are named after it."""

    id: str
    name: str
    level: str
    verdict: Verdict | None
    """The worst verdict of its cases; None if it has none in this run."""
    counts: tuple[tuple[Verdict, int], ...]
    cases: tuple[CaseLine, ...]


@dataclass(frozen=True, kw_only=True, slots=True)
class Chapter:
    """The requirements of a chapter."""

    letter: str
    name: str
    requirements: tuple[RequirementLine, ...]


@dataclass(frozen=True, kw_only=True, slots=True)
class View:
    """Everything that the page shows."""

    engine: str
    words: str
    """The verdict."""
    tone: str
    """good, bad or open: what the first glance should see."""
    facts: tuple[str, ...]
    counts: tuple[tuple[Verdict, int], ...]
    reasons: tuple[str, ...]
    """Why there is no certificate."""
    basis: tuple[str, ...]
    problems: tuple[Problem, ...]
    harm: str
    """How many cases show which harm."""
    surprises: tuple[str, ...]
    """How the run differs from the list of known failures."""
    chapters: tuple[Chapter, ...]
    not_run: tuple[tuple[Verdict, str, tuple[str, ...]], ...]
    """Verdict, reason, cases."""
    memory: tuple[Memory, ...]
    changes: Changes | None
    baseline: str
    chain: str
    """The hash of the run file's last line."""
    executed: int
    expected: int


def view(
    run: RunFile, certificate: Certificate, judged: Judged, *, changes: Changes | None = None, baseline: str = ""
) -> View:
    """The content of this run's page; `changes` are those since the run that `baseline` names."""
    implementation: Mapping[str, Any] = run.header.get("implementation") or {}
    engine = " ".join(str(implementation.get(key) or "") for key in ("name", "version")).strip()
    return View(
        engine=engine or "an unknown implementation",
        words=verdict_words(certificate),
        tone=_tone(certificate),
        facts=_facts(run, certificate),
        counts=_counts(run.records),
        reasons=certificate.reasons,
        basis=tuple(" ".join(line.split()) for line in basis(certificate)),
        problems=tuple(
            _problem(group, judged, run=run.path, illustrated=number < _ILLUSTRATED)
            for number, group in enumerate(grouped(run.records))
        ),
        harm=harm_line(run.records),
        surprises=tuple(surprise.sentence() for surprise in judged.surprises),
        chapters=_chapters(run.records),
        not_run=_not_run(run.records),
        memory=tuple(pictures.memory(run.records)),
        changes=changes,
        baseline=baseline,
        chain=run.chain,
        executed=certificate.executed,
        expected=certificate.expected,
    )


def _tone(certificate: Certificate) -> str:
    if certificate.certified:
        return "good"
    return "bad" if not ACCUSING.isdisjoint(certificate.counts) else "open"


def _facts(run: RunFile, certificate: Certificate) -> tuple[str, ...]:
    environment: Mapping[str, Any] = run.header.get("environment") or {}
    facts = [certificate.profile, f"suite {run.header.get('suite', '?')}"]
    facts += [f"{key} {environment[key]}" for key in ("torch", "python", "device") if environment.get(key)]
    facts.append(str(run.header.get("started") or "").replace("T", " "))
    facts.append(duration(run.seconds) if run.footer else f"ended early, after {duration(run.seconds)} of cases")
    return tuple(fact for fact in facts if fact)


def _counts(records: Iterable[CaseRecord]) -> tuple[tuple[Verdict, int], ...]:
    """How many cases have each verdict that occurs, from best to worst."""
    counts = Counter(record.verdict for record in records)
    return tuple((verdict, counts[verdict]) for verdict in Verdict if counts[verdict])


def _problem(group: Group, judged: Judged, *, run: str, illustrated: bool) -> Problem:
    record = group.first
    sentences = [finding.sentence() for finding in record.findings]
    return Problem(
        title=headline(record),
        verdict=record.verdict,
        severity=group.severity or "",
        mark=group_mark(group, judged),
        is_known=all(map(judged.is_known, group.cases)),
        case=record.case,
        fields=tuple(record_fields(record, run=run)),
        cases=tuple(one.case for one in group.cases),
        findings=tuple(sentences[:_FINDINGS_LISTED]) if illustrated else (),
        num_findings=len(sentences),
        differences=pictures.differences(record.findings) if illustrated else None,
        collectives=pictures.last_collectives(record.exits) if illustrated else None,
        schedule=pictures.schedule(record.schedule) if illustrated else None,
        stacks=tuple((f"rank {end.rank}", end.stack) for end in record.exits if end.stack and illustrated),
    )


def _chapters(records: Sequence[CaseRecord]) -> tuple[Chapter, ...]:
    """The whole contract: also requirements for which nothing ran."""
    by_requirement: dict[str, list[CaseRecord]] = {}
    for record in records:
        by_requirement.setdefault(record.requirements[0], []).append(record)
    requirements = contract.load().requirements
    chapters: dict[str, list[RequirementLine]] = {}
    for requirement in requirements.values():
        chapters.setdefault(requirement.chapter, []).append(
            _requirement(requirement, by_requirement.pop(requirement.id, []))
        )
    return tuple(
        Chapter(letter=letter, name=CHAPTERS.get(letter, "?"), requirements=tuple(chapters[letter]))
        for letter in sorted(chapters, key=list(CHAPTERS).index)
    )


def _requirement(requirement: Requirement, records: Sequence[CaseRecord]) -> RequirementLine:
    return RequirementLine(
        id=requirement.id,
        name=requirement.name,
        level=requirement.level.word,
        verdict=worst(record.verdict for record in records) if records else None,
        counts=_counts(records),
        cases=tuple(
            CaseLine(id=record.case, verdict=record.verdict, reason=record.reason, time=duration(record.seconds))
            for record in sorted(records, key=lambda record: record.case)
        ),
    )


def _not_run(records: Iterable[CaseRecord]) -> tuple[tuple[Verdict, str, tuple[str, ...]], ...]:
    """Cases that were not judged, folded by the reason; the reasons with the most cases come first."""
    folded: dict[tuple[Verdict, str], list[str]] = {}
    for record in records:
        if record.verdict in _NOT_RUN:
            folded.setdefault((record.verdict, record.reason), []).append(record.case)
    ordered = sorted(folded.items(), key=lambda item: (-len(item[1]), item[0]))
    return tuple((verdict, reason, tuple(sorted(cases))) for (verdict, reason), cases in ordered)
