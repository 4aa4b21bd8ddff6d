"""A run as Markdown, for the summary page of a nightly job."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from typing import Any

from fsdp_conformance.contract import CHAPTERS
from fsdp_conformance.diagnosis.grouping import grouped
from fsdp_conformance.outcome.records import CaseRecord
from fsdp_conformance.report.certificate import Certificate
from fsdp_conformance.report.marked import Markdown, in_html, marked, row
from fsdp_conformance.report.run_content import RunFile
from fsdp_conformance.report.terminal import (
    SIGNS,
    basis,
    duration,
    headline,
    render_record,
    verdict_words,
)
from fsdp_conformance.verdict import Verdict

#: Number of groups of failures that are shown; GitHub limits a summary to a megabyte.
_SHOWN = 20


def summary(run: RunFile, certificate: Certificate) -> str:
    """The summary of one run."""
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
    if run.records:
        lines += [*_table(run.records), ""]
    lines += [marked("- {}", text) for text in (*certificate.reasons, *basis(certificate))]
    groups = grouped(run.records)
    if groups:
        lines += ["", f"**What is wrong** ({len(groups)})", ""]
    for group in groups[:_SHOWN]:
        count = 1 + len(group.others)
        heading = f"{headline(group.first)} ({count} case{'s' if count > 1 else ''})"
        lines += [
            f"<details><summary>{in_html(heading)}</summary>",
            "",
            "```text",
            render_record(group.first, others=group.others).replace("```", "'''"),
            "```",
            "",
            "</details>",
            "",
        ]
    if len(groups) > _SHOWN:
        lines.append(f"... and {len(groups) - _SHOWN} more; see the run file.")
    lines += ["", "This shows the presence, not the absence, of defects."]
    return "\n".join(lines) + "\n"


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
