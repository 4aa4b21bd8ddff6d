"""A run as Markdown, for the summary page of a nightly job."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from typing import Any

from fsdp_conformance.contract import CHAPTERS
from fsdp_conformance.diagnosis.grouping import Group, grouped
from fsdp_conformance.outcome.records import CaseRecord
from fsdp_conformance.report.certificate import Certificate
from fsdp_conformance.report.expectations import NO_LIST, Judged
from fsdp_conformance.report.marked import Markdown, in_html, marked, row
from fsdp_conformance.report.run_content import RunFile
from fsdp_conformance.report.terminal import (
    SIGNS,
    basis,
    duration,
    group_mark,
    harm_line,
    headline,
    record_fields,
    render_record,
    verdict_words,
)
from fsdp_conformance.verdict import Verdict

#: Number of groups of failures that are shown; GitHub limits a summary to a megabyte.
_SHOWN = 20


def summary(run: RunFile, certificate: Certificate, judged: Judged = NO_LIST) -> str:
    """The summary of one run. What matters most comes first: the worst problem, where it began, and why."""
    header = run.header
    implementation: Mapping[str, Any] = header.get("implementation") or {}
    environment: Mapping[str, Any] = header.get("environment") or {}
    name = " ".join(part for part in (implementation.get("name", "?"), implementation.get("version", "")) if part)
    sign = SIGNS[Verdict.PASS if certificate.certified else Verdict.FAIL]
    lines: list[str] = [marked("### {} {}: {}", sign, name, verdict_words(certificate)), ""]
    facts: list[str] = [certificate.profile, f"{certificate.executed} of {certificate.expected} cases"]
    facts += [f"{key} {environment[key]}" for key in ("torch", "device", "python") if environment.get(key)]
    facts.append(duration((run.footer or {}).get("seconds", 0.0)) if run.footer else Markdown("**aborted**"))
    lines += [" · ".join(marked("{}", fact) for fact in facts), ""]
    groups = grouped(run.records)
    # The first that is not known; a run in which all are known has nothing that is worse than them.
    worst = next((group for group in groups if not all(map(judged.is_known, group.cases))), None)
    if worst is not None:
        lines += [*_what_matters(worst, judged), ""]
    harm = harm_line(run.records)
    if harm:
        lines += [marked("{}", harm), ""]
    lines += [marked("- {}", surprise.sentence()) for surprise in judged.surprises]
    if run.records:
        lines += ["", *_table(run.records), ""]
    lines += [marked("- {}", text) for text in (*certificate.reasons, *basis(certificate))]
    if groups:
        lines += ["", f"**What is wrong** ({len(groups)})", ""]
    for group in groups[:_SHOWN]:
        heading = _heading(group, judged)
        lines += [
            f"<details><summary>{in_html(heading)}</summary>",
            "",
            "```text",
            render_record(group.first, others=group.others, run=run.path).replace("```", "'''"),
            "```",
            "",
            "</details>",
            "",
        ]
    if len(groups) > _SHOWN:
        lines.append(f"... and {len(groups) - _SHOWN} more; see the run file.")
    lines += ["", "This shows the presence, not the absence, of defects."]
    return "\n".join(lines) + "\n"


def _heading(group: Group, judged: Judged) -> str:
    """The headline, how many cases fail in this way, and what the list of known failures says of them."""
    count = len(group.cases)
    mark = group_mark(group, judged)
    return f"{headline(group.first)} ({count} case{'s' if count > 1 else ''}{f'; {mark}' if mark else ''})"


def _what_matters(group: Group, judged: Judged) -> list[Markdown]:
    """The headline and how much it harms, where it was first seen, and the likely cause or else where to look."""
    fields = {one.label: one.text for one in record_fields(group.first, group.others)}
    harm = f": {fields['harm']}" if "harm" in fields else ""
    where = [fields[label] for label in ("first", "seen", "reason") if label in fields]
    why = next((f"{label}: {fields[label]}" for label in ("likely", "look at", "repro") if label in fields), "")
    return [
        marked("> **{}{}**", _heading(group, judged), harm),
        *(marked("> <br>{}", text) for text in (*where, why) if text),
    ]


def _table(records: Iterable[CaseRecord]) -> list[str]:
    """A table with a row for each chapter and a column for each verdict that occurs."""
    by_chapter: dict[str, Counter[Verdict]] = {}
    for record in records:
        by_chapter.setdefault(record.chapter, Counter())[record.verdict] += 1
    columns = [verdict for verdict in Verdict if any(counts[verdict] for counts in by_chapter.values())]
    lines: list[str] = [row(["chapter", *columns]), "|---|" + "---:|" * len(columns)]
    for chapter in sorted(by_chapter, key=_chapter_order):
        cells = (str(by_chapter[chapter][verdict] or "") for verdict in columns)
        lines.append(row([f"{chapter}. {CHAPTERS.get(chapter, '?')}", *cells]))
    return lines


def _chapter_order(chapter: str) -> tuple[int, str]:
    order = list(CHAPTERS)
    return (order.index(chapter) if chapter in order else len(order)), chapter
