"""
Failures that belong together: one defect of an engine fails dozens of cases, and people read it once.

Cases belong together if the engine raised at the same line, or if the same cause is named for them, whatever
requirements they are about. The rest goes by the check that failed.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass

from fsdp_conformance.diagnosis.headline import ENDS, GRADIENTS, RAISED, causes_in, headline_of
from fsdp_conformance.diagnosis.severity import Severity, rank_of, severity_of, worst_of
from fsdp_conformance.outcome.records import CaseRecord
from fsdp_conformance.stack import engine_frames, frames_of_traceback
from fsdp_conformance.verdict import QUIET, Verdict

#: A cause that explains so many cases, and half of all failures, may be behind the failures that name no cause, too.
_MANY = 3


@dataclass(frozen=True, slots=True)
class Group:
    """Cases that failed in the same way: the one to read, and the others."""

    first: CaseRecord
    others: tuple[CaseRecord, ...]
    has_cause: bool = False
    """True if they share a line of the engine or a named cause."""

    @property
    def cases(self) -> tuple[CaseRecord, ...]:
        """All of them, the one to read first."""
        return (self.first, *self.others)

    @property
    def severity(self) -> Severity | None:
        """The worst harm that one of them shows; None if none accuses the engine."""
        return worst_of(map(severity_of, self.cases))


def grouped(records: Iterable[CaseRecord]) -> list[Group]:
    """
    The problems, each once: those that harm most come first, and of these the ones with the most cases.

    A case whose gradients differ represents its group, because everything else follows from them; of those the one that
    names the fewest causes, with the smallest world.
    """
    failed = [record for record in records if record.verdict not in QUIET]
    alike: dict[tuple[object, ...], list[CaseRecord]] = {}
    named: list[CaseRecord] = []
    for record in failed:
        site = _raised_at(record)
        if site is not None:
            alike.setdefault(("raised", *site), []).append(record)
        elif record.verdict is Verdict.FAIL and _causes(record):
            named.append(record)
        else:
            alike.setdefault(_signature(record), []).append(record)
    groups = [_group(members, has_cause=key[0] == "raised") for key, members in alike.items()]
    groups += [_group(members, has_cause=True) for members in _by_cause(named)]
    return sorted(groups, key=lambda group: (rank_of(group.severity), -len(group.others), group.first.case))


def may_follow(groups: list[Group]) -> list[Group]:
    """
    The groups without a cause that a common one may explain: one that has many cases, and at least half of all.

    Nothing proves it, so they stay failures. They are worth a look when the common cause is gone.
    """
    total = sum(len(group.cases) for group in groups)
    largest = max((len(group.cases) for group in groups if group.has_cause), default=0)
    if largest < _MANY or 2 * largest < total:
        return []
    return [group for group in groups if not group.has_cause and _follows_from_something(group.first)]


def _follows_from_something(record: CaseRecord) -> bool:
    """True if it is about values that training has computed: no rank died, and the engine had begun to train."""
    finding = headline_of(record)
    return (
        record.verdict is Verdict.FAIL and finding is not None and finding.check not in ENDS and finding.phase != "init"
    )


def requirement_of(record: CaseRecord) -> str:
    """The id of the requirement that was violated; without a finding, the one that the case is named after."""
    finding = headline_of(record)
    return finding.requirement if finding is not None else record.requirements[0]


def _by_cause(records: Iterable[CaseRecord]) -> Iterable[list[CaseRecord]]:
    """The cause that most cases can have takes them all; then the next one. Each case is in one list."""
    left = list(records)
    while left:
        counts = Counter(cause for record in left for cause in set(_causes(record)))
        cause = min(counts, key=lambda name: (-counts[name], name))
        yield [record for record in left if cause in _causes(record)]
        left = [record for record in left if cause not in _causes(record)]


def _group(members: list[CaseRecord], *, has_cause: bool) -> Group:
    first, *others = sorted(members, key=_readability)
    return Group(first, tuple(others), has_cause)


def _readability(record: CaseRecord) -> tuple[object, ...]:
    finding = headline_of(record)
    is_of_gradients = finding is not None and finding.check == GRADIENTS
    return not is_of_gradients, len(_causes(record)), record.world_size, record.case


def _causes(record: CaseRecord) -> tuple[str, ...]:
    finding = headline_of(record)
    # What is likely of a rank that raised says who raised, and not why.
    return causes_in(finding.likely) if finding is not None and finding.check not in ENDS else ()


def _raised_at(record: CaseRecord) -> tuple[object, ...] | None:
    """The line of the engine that raised, if one did, with how the case ended."""
    frames = engine_frames(frames_of_traceback(record.traceback)) if record.verdict is not Verdict.ERROR_SUITE else []
    return (record.verdict, frames[0].file, frames[0].line) if frames else None


def _signature(record: CaseRecord) -> tuple[object, ...]:
    finding = headline_of(record)
    if finding is None:
        return record.verdict, record.requirements[0], record.reason
    if finding.check == RAISED:
        return record.verdict, finding.check, re.sub(r"\d+", "", finding.message)
    # Without the figures, which differ from one world size to the next.
    described = (finding.likely or finding.phase or "").partition(":")[0]
    cause = next(iter(causes_in(finding.likely)), described)
    return record.verdict, finding.requirement, finding.check, cause
