"""
Decides if a case kills a known-wrong implementation for the right reason. Standard library only.

A case that fails proves nothing by itself: its body may have raised before it compared anything. A kill is a finding

- for a requirement that the case binds: the one that it is named after, or one that names the mutant's defect, and
- made as the mutant says that its defect shows. For most of them, that is a comparison that does not hold. Where the
  defect is an exception, a hang or a crash, it is that ending; any other exception counts for nothing.
"""

from __future__ import annotations

import re

from fsdp_conformance.judge import ENDINGS, WRONGFUL_REFUSAL
from fsdp_conformance.mutants.mutant import Mutant, Symptom
from fsdp_conformance.outcome.records import CaseRecord, Finding
from fsdp_conformance.verdict import Verdict

#: The checks of `checks.streams`, and of `CaseChecks.refusal`.
_HAZARD, _REFUSAL = "stream safety", "refusal"

_ENDING = {Verdict.HANG: Symptom.HANG, Verdict.CRASH: Symptom.CRASH}

_RAISED = re.compile(r"rank \d+ raised (\w+)")


def reason(record: CaseRecord, mutant: Mutant) -> Finding | None:
    """The finding by which the case killed the mutant, or None if it did not."""
    about = {record.requirements[0], *set(mutant.requirements).intersection(record.requirements)}
    for finding in record.findings:
        if finding.requirement in about and _shows(finding, record.verdict, mutant):
            return finding
    return None


def survival(record: CaseRecord, mutant: Mutant) -> str:
    """Why the record is no kill: what was expected, and what was found instead."""
    raised = f" of {mutant.raises}" if mutant.raises else ""
    expected = f"a finding for {record.requirements[0]} or {', '.join(mutant.requirements)} that shows as "
    expected += " or ".join(mutant.shows) + raised
    seen = [
        f"{finding.sentence()} ({symptom(finding, record.verdict) or WRONGFUL_REFUSAL})" for finding in record.findings
    ]
    verdict = "; ".join(seen[:3]) or f"{record.verdict}" + (f" ({record.reason})" if record.reason else "")
    return f"{mutant.name} on {record.case}: expected {expected}, got {verdict}"


def symptom(finding: Finding, verdict: Verdict) -> Symptom | None:
    """How the defect showed in a finding; None for a refusal of what must be supported."""
    if finding.check in ENDINGS:
        return _ENDING.get(verdict, Symptom.RAISED)
    if finding.check == WRONGFUL_REFUSAL:
        return None
    return {_HAZARD: Symptom.HAZARD, _REFUSAL: Symptom.REFUSAL}.get(finding.check, Symptom.FINDING)


def _shows(finding: Finding, verdict: Verdict, mutant: Mutant) -> bool:
    seen = symptom(finding, verdict)
    if seen is Symptom.RAISED:
        raised = _RAISED.match(finding.message)
        return raised is not None and raised[1] == mutant.raises
    return seen in mutant.shows
