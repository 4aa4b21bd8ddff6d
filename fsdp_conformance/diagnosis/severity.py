"""
How much a failure harms the users of an engine: from training that is wrong without a sign, to a broken promise that
changes no number.

The severity follows from how the case ended, from the check that failed and from the requirement that it belongs to. It
is never stored: every report derives it from the record, and so does `verify`.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from enum import StrEnum

from fsdp_conformance import contract
from fsdp_conformance.contract import Requirement
from fsdp_conformance.diagnosis.headline import RACES, RAISED
from fsdp_conformance.errors import UsageError
from fsdp_conformance.outcome.records import CaseRecord, Finding
from fsdp_conformance.verdict import Verdict


class Severity(StrEnum):
    """Kinds of harm, the worst first. The values are what `--fail-on` takes."""

    SILENT = "silent"
    STATE = "state"
    HANG = "hang"
    RAISES = "raises"
    WASTE = "waste"
    PROMISE = "promise"

    @property
    def words(self) -> str:
        """The harm in words that follow "the engine"."""
        return _WORDS[self]


_WORDS: Mapping[Severity, str] = {
    Severity.SILENT: "trains silently wrong",
    Severity.STATE: "loses or corrupts state",
    Severity.HANG: "hangs",
    Severity.RAISES: "raises or crashes where it should work",
    Severity.WASTE: "wastes memory or traffic",
    Severity.PROMISE: "breaks a promise, but no number is wrong",
}

#: Checks of how a rank ended, and what that means for training.
_OF_END = {RAISED: Severity.RAISES, "process end": Severity.RAISES, "deadline": Severity.HANG}

#: Ranks whose collectives differ wait for each other, on most backends without an end.
SCHEDULES = "schedule equality"

#: The engine took what it should have refused. If its numbers are wrong as well, other findings say so.
_NOT_REFUSED = "refusal"
#: It trained with something that it does not declare, and the numbers are wrong.
_NOT_DECLARED = "loud refusal"

#: Observations of what is held and sent, and not of values.
_COST = frozenset({"COMM", "MEM", "ST", "ORDER"})

#: The capabilities of requirements that are about state which outlives the training.
_STATE_FLAGS = frozenset({"full_state_dict", "sharded_state_dict", "optim_state_dict", "checkpoint", "reshard_load"})
_STATE_CHAPTER = "U"
_STATE_PHASE = "checkpoint"
#: The end of the names of checks that compare one with the right one, tensor by tensor.
_STATE_DICT = "state dict"


def severity_of(record: CaseRecord) -> Severity | None:
    """The worst harm that a record shows; None if it does not accuse the engine."""
    if record.verdict is Verdict.HANG:
        return Severity.HANG
    if record.verdict is Verdict.CRASH:
        return Severity.RAISES
    if record.verdict is not Verdict.FAIL:
        return None
    return worst_of(map(severity_of_finding, record.findings)) or Severity.PROMISE


def severity_of_finding(finding: Finding) -> Severity:
    """The harm of what one finding says."""
    if finding.check in _OF_END:
        return _OF_END[finding.check]
    if finding.check == _NOT_REFUSED:
        return Severity.PROMISE
    if finding.check == _NOT_DECLARED:
        return Severity.SILENT
    if finding.check == SCHEDULES:
        return Severity.HANG
    requirement = contract.load().requirements.get(finding.requirement)
    is_about_state = finding.phase == _STATE_PHASE or (requirement is not None and _concerns_state(requirement))
    if finding.check == RACES or _compares_values(finding, requirement):
        return Severity.STATE if is_about_state else Severity.SILENT
    if requirement is not None and not _COST.isdisjoint(requirement.observation):
        return Severity.WASTE
    return Severity.STATE if is_about_state else Severity.PROMISE


def rank_of(severity: Severity | None) -> int:
    """The place of a severity in a list that begins with the worst; None comes last."""
    return len(Severity) if severity is None else list(Severity).index(severity)


def worst_of(severities: Iterable[Severity | None]) -> Severity | None:
    """The worst of them; None if there is none."""
    return min(severities, key=rank_of, default=None)


def count_by_severity(records: Iterable[CaseRecord]) -> dict[Severity, int]:
    """How many cases show each kind of harm as their worst; the worst kind first, without those that none shows."""
    counted = Counter(severity_of(record) for record in records)
    return {severity: counted[severity] for severity in Severity if counted[severity]}


def severities_in(text: str) -> frozenset[Severity]:
    """The severities that a list such as "silent,state" names. Raises UsageError for an unknown one, or for none."""
    names = [name.strip() for name in text.split(",")]
    unknown = [name for name in names if name not in list(Severity)]
    if unknown:
        raise UsageError(f"severities must be among {', '.join(Severity)}, separated by commas, got {text!r}")
    return frozenset(map(Severity, names))


def _compares_values(finding: Finding, requirement: Requirement | None) -> bool:
    """True if numbers of the training were compared, and differ."""
    if finding.bound is not None or finding.differing is not None or finding.check.endswith(_STATE_DICT):
        return True
    return requirement is not None and set(requirement.observation) == {"FULL"}


def _concerns_state(requirement: Requirement) -> bool:
    return requirement.chapter == _STATE_CHAPTER or not _STATE_FLAGS.isdisjoint(requirement.flags)
