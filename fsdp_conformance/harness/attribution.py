"""
Who failed first, and who only noticed: the ways a rank can end, read from its report and its exit.

When one rank fails, the others usually say more than it does: "Connection closed by peer", with a long trace. Those
are folded as consequences. Standard library only, so that a judge that never imports torch can ask.
"""

from __future__ import annotations

import signal
from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum

from fsdp_conformance.judge.backend_errors import is_lost_peer, is_timeout
from fsdp_conformance.outcome import RankError, RankExit, RankReport

#: First words of `RankExit.stack` for a rank that a signal had stopped.
STOPPED = "stopped (state T in /proc/PID/stat)"


class Ending(StrEnum):
    """How one rank ended."""

    FINISHED = "finished"
    """Its body ran to the end and its report is in."""
    LEFT_OUT = "left out"
    """Its body ended early on purpose: a skip, a missing environment, references that disagree."""
    RAISED = "raised"
    """Its body raised, for a reason of its own."""
    LOST_PEER = "lost a peer"
    """Its body raised because another rank was gone."""
    TIMED_OUT = "timed out"
    """A collective passed its deadline: a peer did not take part."""
    DIED = "died"
    """A signal ended the process before its report."""
    EXITED = "exited"
    """The process ended with an exit code, 0 included, before its report."""
    STUCK = "stuck"
    """It had not reported when the controller ended it."""
    STOPPED = "stopped"
    """As STUCK, and a signal had stopped it."""


#: Endings that explain the others, whenever they were noticed.
_CAUSES = frozenset({Ending.RAISED, Ending.DIED, Ending.EXITED})

#: Endings without a cause of their own kind: ranks that waited for somebody.
_WAITING = frozenset({Ending.TIMED_OUT, Ending.LOST_PEER})


@dataclass(frozen=True, kw_only=True, slots=True)
class RankEnding:
    """One rank's ending, with the sentence that says it."""

    rank: int
    ending: Ending
    time: float
    """time.monotonic() of the failure, or of the end."""
    sentence: str


@dataclass(frozen=True, kw_only=True, slots=True)
class Attribution:
    """The first failure of a case and what followed from it."""

    endings: tuple[RankEnding, ...]
    """One per rank, in the order of ranks."""
    first: RankEnding | None
    """None: no rank failed."""
    is_hang: bool
    """No rank failed by itself; at least one did not come to a collective, or did not report in time."""
    consequences: tuple[str, ...]
    """What is left to say of the other ranks."""
    notes: tuple[str, ...]
    """Ends after the report: seen, and no failure of the case."""

    @property
    def headline(self) -> str:
        """The first failure in one sentence; empty if there is none."""
        return self.first.sentence if self.first is not None else ""


def attribute(reports: Sequence[RankReport | None], exits: Sequence[RankExit]) -> Attribution:
    """
    Name the first rank to fail.

    A rank that raised for a reason of its own, or whose process ended before its report, is the cause whatever the
    clock says: a peer notices a dead rank sooner than the controller. Among causes the earliest counts. Without any
    cause the case hung, and the first is a rank that took no part: one that was stuck, rather than those that waited
    for it.
    """
    endings = tuple(ending_of(report, end) for report, end in zip(reports, exits, strict=True))
    causes = [item for item in endings if item.ending in _CAUSES]
    absent = [item for item in endings if item.ending in (Ending.STOPPED, Ending.STUCK)]
    waiting = [item for item in endings if item.ending in _WAITING]
    is_hang = not causes and bool(absent or waiting)
    first = None
    if causes:
        first = min(causes, key=lambda item: item.time)
    elif absent:
        first = min(absent, key=lambda item: (item.ending is not Ending.STOPPED, item.time, item.rank))
    elif waiting:
        first = min(waiting, key=lambda item: (item.ending is not Ending.TIMED_OUT, item.time))
    return Attribution(
        endings=endings,
        first=first,
        is_hang=is_hang,
        consequences=tuple(
            item.sentence
            for item in endings
            if first is not None and item is not first and item.ending is not Ending.FINISHED
        ),
        notes=tuple(note for report, end in zip(reports, exits, strict=True) if (note := shutdown_note(report, end))),
    )


def ending_of(report: RankReport | None, end: RankExit) -> RankEnding:
    """How one rank ended."""

    def ending(kind: Ending, sentence: str, time: float = end.time) -> RankEnding:
        return RankEnding(rank=end.rank, ending=kind, time=time, sentence=f"rank {end.rank} {sentence}")

    if report is not None and report.error is not None:
        error = report.error
        kind = kind_of_error(error)
        words = {Ending.TIMED_OUT: "timed out in a collective: ", Ending.LOST_PEER: "lost a peer: "}.get(
            kind, "raised "
        )
        return ending(kind, words + first_line(error), error.time)
    if report is not None:
        reason = report.not_run or report.inconclusive
        if reason:
            return ending(Ending.LEFT_OUT, f"left out: {reason}")
        return ending(Ending.FINISHED, "finished")
    if end.ended_by_controller:
        if end.stack is not None and end.stack.startswith(STOPPED):
            return ending(Ending.STOPPED, "was stopped by a signal and never reported")
        return ending(Ending.STUCK, "had not reported when it was ended")
    if end.exitcode is not None and end.exitcode < 0:
        return ending(Ending.DIED, f"was ended by {signal_name(-end.exitcode)} before its report")
    return ending(Ending.EXITED, f"ended before its report, with exit code {end.exitcode}")


def kind_of_error(error: RankError) -> Ending:
    """RAISED, LOST_PEER or TIMED_OUT, from the class and the text of an exception."""
    if is_timeout(error.kind, error.message):
        return Ending.TIMED_OUT
    return Ending.LOST_PEER if is_lost_peer(error.kind, error.message) else Ending.RAISED


def shutdown_note(report: RankReport | None, end: RankExit) -> str | None:
    """What happened to a rank after its report was in, if that was not a plain end."""
    if report is None or report.error is not None:
        return None
    if end.ended_by_controller:
        return f"rank {end.rank} did not end by itself after its report was in"
    if end.exitcode is not None and end.exitcode < 0:
        return f"rank {end.rank} was ended by {signal_name(-end.exitcode)} at shutdown, after its report was in"
    if end.exitcode and not (report.not_run or report.inconclusive):
        return f"rank {end.rank} ended with exit code {end.exitcode} at shutdown, after its report was in"
    return None


def first_line(error: RankError) -> str:
    """Class and first line of an exception."""
    line = error.message.strip().split("\n", 1)[0]
    return f"{error.kind.rsplit('.', 1)[-1]}: {line}" if line else error.kind.rsplit(".", 1)[-1]


def signal_name(number: int) -> str:
    """SIGKILL for 9."""
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"
