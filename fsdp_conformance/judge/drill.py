"""
The verdict on a case in which a rank was made to fail: is the failure reported as what it is, and does every rank end?

Four things must hold, whatever the case would have found:

    the rank      the first failure is that of the rank that was made to fail
    the cause     it ended in the way it was made to: by this exception, exit code or signal
    the peers     each ended by itself, within the deadline of its collectives
    nothing left  no process of the case lives on

Standard library only.
"""

from __future__ import annotations

from collections.abc import Sequence

from fsdp_conformance.contract.gate import decided
from fsdp_conformance.outcome.endings import Ending, RankEnding, attribute
from fsdp_conformance.outcome.records import CaseRecord, Finding, RankExit, RankReport
from fsdp_conformance.stress import EXIT_CODE, STRUCK, SWALLOWED, Failure
from fsdp_conformance.verdict import Verdict

#: The requirement that other ranks end in bounded time, and that exceptions arrive unchanged.
REQUIREMENT = "R160"
CHECK = "injected failure"

#: How a rank that was made to fail ends, and a part of the sentence that describes it.
_EXPECTED = {
    Failure.RAISE: (Ending.RAISED, "stress: told to raise"),
    Failure.COLLECTIVE: (Ending.RAISED, "stress: the backend failed"),
    Failure.EXIT: (Ending.EXITED, f"exited with code {EXIT_CODE} before"),
    Failure.KILL: (Ending.DIED, "was killed by SIGKILL before"),
    Failure.STOP: (Ending.STOPPED, "was stopped by a signal"),
}


def drilled(
    record: CaseRecord,
    failure: Failure,
    *,
    rank: int,
    where: str,
    reports: Sequence[RankReport | None],
    exits: Sequence[RankExit],
    alive: Sequence[int],
) -> CaseRecord:
    """
    Return `record` with the verdict on the failure in place of the verdict on the case.

    `rank` was made to fail at `where`, and `alive` are the ranks whose processes are still there. If `where` is empty,
    the failure never struck, and the verdict on the case stands.
    """
    record.measurements[STRUCK] = where
    if not where:
        record.notes.append(f"stress failure {failure} never struck: rank {rank} issues too few collectives")
        return record
    if any(report is not None and SWALLOWED in report.measurements for report in reports):
        return decided(
            record, Verdict.DISABLED, "the case expects exceptions, and took the injected one for one of them"
        )
    attribution = attribute(reports, exits)
    problems = [
        *_of_first(attribution.first, failure, rank),
        *_of_peers(attribution.endings, rank),
        *_of_processes(alive),
    ]
    record.findings = [
        Finding(requirement=REQUIREMENT, check=CHECK, message=text, rank=about, detail=attribution.headline or None)
        for about, text in problems
    ]
    record.comparisons, record.elements = 4, 0
    record.consequences = []
    record.traceback = "" if not problems else record.traceback
    record.notes.append(f"stress failure {failure} struck rank {rank} before {where}")
    if problems:
        return decided(record, Verdict.FAIL, record.findings[0].sentence())
    return decided(record, Verdict.PASS, "")


def _of_first(first: RankEnding | None, failure: Failure, rank: int) -> list[tuple[int, str]]:
    """Problems with the first failure: it must be that of the rank that was made to fail, in the way it was made to."""
    if first is None:
        return [(rank, f"failure ({failure}): expected rank {rank} to fail, got no failure")]
    ending, phrase = _EXPECTED[failure]
    expected = f"rank {rank} {ending}: {phrase!r}"
    if first.rank != rank or first.ending is not ending or phrase not in first.sentence:
        return [(first.rank, f"first failure ({failure}): expected {expected}, got {first.sentence}")]
    return []


def _of_peers(endings: Sequence[RankEnding], rank: int) -> list[tuple[int, str]]:
    """Peers finish, or say that they lost one; they must not have to be ended, nor fail in a way of their own."""
    allowed = {Ending.FINISHED, Ending.FOUND, Ending.LEFT_OUT, Ending.LOST_PEER, Ending.TIMED_OUT, Ending.RAISED}
    return [
        (item.rank, f"peer: expected it to end by itself after rank {rank} had failed, got {item.sentence}")
        for item in endings
        if item.rank != rank and item.ending not in allowed
    ]


def _of_processes(alive: Sequence[int]) -> list[tuple[int, str]]:
    return [(rank, f"process: expected it to be gone after the case, got rank {rank} alive") for rank in alive]
