"""How ranks ended before their body was through, and which ending explains the others."""

from __future__ import annotations

import signal
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from enum import IntEnum

from fsdp_conformance.judge.backend_errors import is_lost_peer, is_timeout
from fsdp_conformance.outcome import RankError, RankExit, RankReport


class Kind(IntEnum):
    """How one rank ended. Up to DIED it is a cause; from STOPPED on a lower member explains a higher one."""

    REFUSED = 0
    RAISED = 1
    ADAPTER = 2
    SUITE = 3
    ENVIRONMENT = 4
    INCONCLUSIVE = 5
    DIED = 6
    """A signal or an exit code, without a report."""
    STOPPED = 7
    """As STUCK, because a signal had stopped it."""
    STUCK = 8
    """Ended by the controller, without a report."""
    TIMED_OUT = 9
    """A collective's own deadline passed."""
    LOST_PEER = 10
    """The transport says that another rank has gone."""


_BLAME = {
    "refusal": Kind.REFUSED,
    "implementation": Kind.RAISED,
    "adapter": Kind.ADAPTER,
    "suite": Kind.SUITE,
    "environment": Kind.ENVIRONMENT,
}


@dataclass(frozen=True, kw_only=True, slots=True)
class Ending:
    """What stopped one rank."""

    rank: int
    kind: Kind
    time: float
    sentence: str
    error: RankError | None = None


def endings_of(reports: Sequence[RankReport | None], exits: Sequence[RankExit]) -> list[Ending]:
    """The ranks that did not get through their body, causes first."""
    found = [_ending(report, end) for report, end in zip(reports, exits, strict=True)]
    return sorted((ending for ending in found if ending is not None), key=_order)


def headline_of(endings: Sequence[Ending], reports: Iterable[RankReport]) -> Ending | None:
    """
    The ending that decides, or None: there is none, or only consequences of a rank that left its body early on purpose.

    Such a rank stopped at its findings, or said that nothing can be told here; its peers wait for it in vain.
    """
    if not endings:
        return None
    reports = list(reports)
    silent = any(report.not_run is not None or report.inconclusive is not None for report in reports)
    found = any(report.findings for report in reports)
    # Findings alone do not end a rank's body, so they explain a peer that was lost, and not one that never came.
    explained = Kind.STOPPED if silent else Kind.LOST_PEER
    return None if (silent or found) and all(ending.kind >= explained for ending in endings) else endings[0]


def late_deaths(reports: Sequence[RankReport | None], exits: Sequence[RankExit]) -> list[str]:
    """Ranks that ended badly after their body was through: said, and never held against the implementation."""
    notes = []
    for report, end in zip(reports, exits, strict=True):
        if report is None or report.error is not None:
            continue
        if end.ended_by_controller:
            notes.append(f"rank {end.rank} had not shut down after its report was in, and was ended by the controller")
        # A rank that was left out leaves with a skip code.
        elif end.exitcode and report.not_run is None and report.inconclusive is None:
            notes.append(f"rank {end.rank} {_death(end.exitcode)} after its report was in, while it shut down")
    return notes


def ranks_in_words(ranks: Sequence[int]) -> str:
    """ "rank 1", or "ranks 0, 2"."""
    return f"rank {ranks[0]}" if len(ranks) == 1 else "ranks " + ", ".join(map(str, ranks))


def first_line(text: str) -> str:
    """The first line of an exception's message, cut where it is endless."""
    return text.strip().split("\n", 1)[0][:300]


def _order(ending: Ending) -> tuple[int, float, int]:
    """
    Sort key: what explains the others first, whatever the clock says, then by time.

    Time alone does not tell: a rank that is killed is noticed by its peer before its controller. An exception or a
    death explains every wait. Without one, a rank that never answered explains the time-outs of its peers.
    """
    return 0 if ending.kind <= Kind.DIED else int(ending.kind), ending.time, ending.rank


def _ending(report: RankReport | None, end: RankExit) -> Ending | None:
    if report is None:
        return _without_report(end)
    error = report.error
    if error is None or (report.findings and error.kind.endswith("RequirementFailed")):
        return None
    return Ending(
        rank=end.rank,
        kind=_kind(error),
        time=error.time,
        sentence=f"rank {end.rank} raised {error.kind.rsplit('.', 1)[-1]}: {first_line(error.message)}",
        error=error,
    )


def _without_report(end: RankExit) -> Ending:
    last = f"; its last collective: {end.last_collectives[-1]}" if end.last_collectives else ""
    if end.exitcode is not None and not end.ended_by_controller:
        kind, how = Kind.DIED, f"{_death(end.exitcode)} before its report was in"
    elif end.stack is not None and end.stack.startswith("stopped"):
        kind, how = Kind.STOPPED, "was stopped by a signal and never answered"
    else:
        kind, how = Kind.STUCK, "did not answer within its deadline and was ended"
    return Ending(rank=end.rank, kind=kind, time=end.time, sentence=f"rank {end.rank} {how}{last}")


def _kind(error: RankError) -> Kind:
    name = error.kind.rsplit(".", 1)[-1]
    if name == "ReferencesDisagree":
        return Kind.INCONCLUSIVE
    if is_timeout(error.kind, error.message):
        return Kind.TIMED_OUT
    if is_lost_peer(error.kind, error.message):
        return Kind.LOST_PEER
    # A blame that is not in the list is the suite's own slip.
    return _BLAME.get(error.blame, Kind.SUITE)


def _death(code: int) -> str:
    if code >= 0:
        return f"ended with exit code {code}"
    try:
        return f"died of {signal.Signals(-code).name}"
    except ValueError:
        return f"died of signal {-code}"
