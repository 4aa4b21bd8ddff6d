"""The findings of all ranks as one list: the first divergence first, and equal findings of several ranks as one."""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from dataclasses import replace
from itertools import zip_longest

from fsdp_conformance.contract.case import Case
from fsdp_conformance.history.collective import POINT_TO_POINT
from fsdp_conformance.outcome.endings import ranks_in_words
from fsdp_conformance.outcome.records import Finding, RankReport

#: Findings kept in a record. The first divergence comes first, so the rest is repetition.
MAX_FINDINGS = 40

_STEP = re.compile(r"\bstep (\d+)\b")

#: The order of phases in a step. Findings without a step or such a phase (structure, bytes held) come first.
_PHASES = ("init", "forward", "backward", "reduce", "step", "reshard", "eval", "checkpoint")


def sorted_and_folded(
    reports: Sequence[RankReport], digests: Sequence[Finding], *, world_size: int
) -> tuple[list[Finding], int]:
    """
    The findings of all ranks, and how many were left out.

    Findings that differ only in the rank become one.
    """
    numbered = [(index, finding) for report in reports for index, finding in enumerate(report.findings)]
    numbered += [(0, finding) for finding in digests]
    ranks_by_finding: dict[Finding, list[int]] = {}
    for _, finding in sorted(numbered, key=lambda item: _place(*item)):
        ranks = ranks_by_finding.setdefault(replace(finding, rank=None), [])
        if finding.rank is not None and finding.rank not in ranks:
            ranks.append(finding.rank)
    folded = [_folded(finding, sorted(ranks), world_size) for finding, ranks in ranks_by_finding.items()]
    return folded[:MAX_FINDINGS], max(0, len(folded) - MAX_FINDINGS)


def digest_findings(case: Case, reports: Sequence[RankReport]) -> list[Finding]:
    """A finding for each digest that differs between the ranks that have it."""
    findings = []
    for label in dict.fromkeys(label for report in reports for label in report.digests):
        by_digest: dict[str, list[int]] = {}
        for report in reports:
            if label in report.digests:
                by_digest.setdefault(report.digests[label], []).append(report.rank)
        if len(by_digest) > 1:
            findings.append(_digest_finding(case, label, by_digest, reports))
    return findings


def _place(index: int, finding: Finding) -> tuple[float, int, int, int]:
    """Sort key: how early in the run the divergence appears."""
    phase = _PHASES.index(finding.phase) if finding.phase in _PHASES else len(_PHASES)
    step: float | None = finding.step
    if step is None:
        step = -math.inf if finding.phase in (None, "init") else math.inf
    return step, phase, index, finding.rank or 0


def _folded(finding: Finding, ranks: Sequence[int], world_size: int) -> Finding:
    if len(ranks) < 2:
        return replace(finding, rank=ranks[0] if ranks else None)
    who = "every rank" if len(ranks) == world_size else ranks_in_words(ranks)
    return replace(finding, rank=ranks[0], message=f"{finding.message} (the same on {who})")


def _digest_finding(case: Case, label: str, by_digest: dict[str, list[int]], reports: Sequence[RankReport]) -> Finding:
    # The largest group is assumed to be right; among equals, the one with the lowest rank.
    groups = sorted(by_digest.items(), key=lambda item: (-len(item[1]), item[1]))
    (right, agreeing), (wrong, differing) = groups[0], min(groups[1:], key=lambda item: item[1])
    name, step, fqn = _parse_label(label)
    sides = " | ".join(f"{ranks_in_words(ranks)} {digest[:12]}" for digest, ranks in groups)
    message, likely = f"{label} differs between ranks: {sides}", None
    difference = _first_unlike(reports, agreeing[0], differing[0]) if name == "schedule" else None
    if difference is not None:
        index, right, wrong = difference
        message = (
            f"collective {index} differs between ranks: expected {right or 'none'} as on {ranks_in_words(agreeing)}, "
            f"got {wrong or 'none'} on {ranks_in_words(differing)}"
        )
        likely = "ranks issue different collectives"
    elif name == "params":
        likely = f"ranks drift apart: {ranks_in_words(differing)} and {ranks_in_words(agreeing)} hold different values"
    return Finding(
        requirement=_digest_requirement(case, label, reports),
        check="schedule equality" if name == "schedule" else "equality over ranks",
        message=message,
        step=step,
        fqn=fqn,
        rank=differing[0],
        got=wrong[:80],
        expected=right[:80],
        bound=None if name == "schedule" else "bitwise",
        likely=likely,
    )


def _parse_label(label: str) -> tuple[str, int | None, str | None]:
    """("params", 2, "0.weight") of "params step 2 0.weight"."""
    name = label.partition(" ")[0]
    match = _STEP.search(label)
    rest = (label[match.end() :] if match else label[len(name) :]).strip()
    return name, int(match[1]) if match else None, rest or None


def _digest_requirement(case: Case, label: str, reports: Sequence[RankReport]) -> str:
    """The requirement of the longest prefix of `label` that has one; by default the case's own."""
    demands = {prefix: requirement for report in reports for prefix, requirement in report.digest_requirements.items()}
    prefixes = [prefix for prefix in demands if label.startswith(prefix)]
    return demands[max(prefixes, key=len)] if prefixes else case.requirements[0]


def _first_unlike(reports: Sequence[RankReport], right: int, wrong: int) -> tuple[int, str, str] | None:
    """The first collective, without sends and receives, in which two ranks differ: its index and both lines."""
    by_rank = {
        report.rank: [line for line in report.schedule if not POINT_TO_POINT & set(line.split())] for report in reports
    }
    for index, (expected, got) in enumerate(zip_longest(by_rank[right], by_rank[wrong], fillvalue="")):
        if expected != got:
            return index, expected, got
    return None
