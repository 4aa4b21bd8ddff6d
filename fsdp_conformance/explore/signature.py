"""
Signatures that tell failures apart: the requirement, the check and its likely cause, or where the engine raised.

Numbers, names of parameters and ranks are left out, because they belong to the example and not to the defect.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field, replace

from fsdp_conformance.diagnosis.headline import ENDS, causes_in, headline_of, is_explained
from fsdp_conformance.explore.pool import Outcome
from fsdp_conformance.outcome.records import Finding
from fsdp_conformance.stack import engine_frames, frames_of_traceback

_DETAILS = re.compile(r"'[^']*'|\"[^\"]*\"|-?\d[\d.e+-]*|\([^)]*\)|\[[^\]]*\]")


@dataclass(frozen=True, slots=True)
class Signature:
    """One way to fail."""

    verdict: str
    requirement: str
    check: str
    about: str
    """The likely cause of a difference; of an exception, its text without details and the engine's frame."""
    is_explained: bool = field(default=True, compare=False)
    """False if nothing is known but where the values differ: `about` is the phase, if anything."""

    def is_shown_by(self, other: Signature) -> bool:
        """True if a plainer scenario fails in this way. It may show a cause that is not seen among many values."""
        return self == (other if self.is_explained else replace(other, about=self.about))

    def is_shown_in(self, outcome: Outcome) -> bool:
        """
        True if a plainer scenario fails in this way, whatever its report begins with.

        Fewer values can let a better oracle see the same defect: without an optimizer in backward, the wrong gradient
        comes before the wrong parameter.
        """
        record = outcome.record
        if record is None or not outcome.failed:
            return False
        verdict = record.verdict.value
        findings = (_of_finding(verdict, finding) for finding in record.findings if finding.check not in ENDS)
        return any(self.is_shown_by(other) for other in (signature_of(outcome), *findings))

    def __str__(self) -> str:
        about = f", {self.about}" if self.about else ""
        return f"{self.verdict} {self.requirement} ({self.check}{about})"


def signature_of(outcome: Outcome) -> Signature:
    """The signature of an outcome that failed."""
    record = outcome.record
    assert record is not None, "what failed has a record"
    finding = headline_of(record)
    if finding is None:
        return Signature(record.verdict.value, record.requirements[0], "", _bare(record.reason))
    if finding.check in ENDS:
        frames = engine_frames(frames_of_traceback(record.traceback))
        # Lines move with every change of the engine, functions seldom do.
        place = f"in {frames[0].function} of {frames[0].name}" if frames else ""
        text = _bare(finding.message.split(" raised ", 1)[-1]) if record.traceback else ""
        return Signature(record.verdict.value, finding.requirement, finding.check, " ".join([text, place]).strip())
    return _of_finding(record.verdict.value, finding)


def _of_finding(verdict: str, finding: Finding) -> Signature:
    cause = next(iter(causes_in(finding.likely)), "")
    about = cause or finding.phase or ""
    return Signature(verdict, finding.requirement, finding.check, about, is_explained=is_explained(finding))


def _bare(text: str) -> str:
    return " ".join(_DETAILS.sub("...", text.partition(";")[0]).split())[:120]
