"""
How each rank of a case ended, and which of them failed first.

When one rank fails, its peers usually have more to say than it does: "Connection closed by peer", with a long trace.
Those endings are consequences. Both the harness and the judge read the ends of ranks here. Standard library only.
"""

from __future__ import annotations

import re
import signal
from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum

from fsdp_conformance.outcome.records import RankError, RankExit, RankReport

#: `RankExit.stack` begins with this for a rank that a signal had stopped.
STOPPED = "stopped (state T in /proc/PID/stat)"

#: How much of an exception's first line is quoted.
_LINE_CHARACTERS = 300


class Ending(StrEnum):
    """How one rank ended. Failures are in the order in which they explain one another, causes first."""

    FINISHED = "finished"
    """The body ran to its end and the report arrived."""
    LEFT_OUT = "left out"
    """The body ended early on purpose: a skip, a missing environment, references that disagree."""
    FOUND = "found"
    """The body raised RequirementFailed; its findings are in the report."""
    RAISED = "raised"
    """The body raised, and not because of a lost peer."""
    DIED = "died"
    """A signal ended the process before it reported."""
    EXITED = "exited"
    """The process exited, with code 0 or another, before it reported."""
    SUITE_LATE = "suite late"
    """The suite's own work on it took longer than its deadline: the implementation is not to blame."""
    STOPPED = "stopped"
    """As STUCK, and the process had been stopped by a signal."""
    STUCK = "stuck"
    """It had not reported when the controller terminated it."""
    TIMED_OUT = "timed out"
    """A collective passed its deadline: a peer did not take part."""
    LOST_PEER = "lost a peer"
    """The body raised because another rank was gone."""


#: Endings that explain all others, whenever they were noticed: among these the earliest counts.
CAUSES = frozenset({Ending.FOUND, Ending.RAISED, Ending.DIED, Ending.EXITED})

#: Endings of ranks that waited for others, the best explanation first.
_WAITED = (Ending.SUITE_LATE, Ending.STOPPED, Ending.STUCK, Ending.TIMED_OUT, Ending.LOST_PEER)

#: The endings that are failures. A lower number explains a higher one; causes are equal.
_ORDER = {**dict.fromkeys(CAUSES, 0), **{ending: place for place, ending in enumerate(_WAITED, start=1)}}


@dataclass(frozen=True, kw_only=True, slots=True)
class RankEnding:
    """How one rank ended, in data and in words."""

    rank: int
    ending: Ending
    time: float
    """time.monotonic() of the failure, or of the end."""
    sentence: str
    error: RankError | None = None
    last_collective: str = ""
    """The last collective of a rank that did not report."""

    @property
    def full_sentence(self) -> str:
        """The sentence, with the last collective of a rank that did not report."""
        return self.sentence + (f"; its last collective: {self.last_collective}" if self.last_collective else "")


@dataclass(frozen=True, kw_only=True, slots=True)
class Attribution:
    """Which rank failed first, and what followed."""

    endings: tuple[RankEnding, ...]
    """One per rank, in rank order."""
    failures: tuple[RankEnding, ...]
    """The ranks that failed, the first failure first."""
    notes: tuple[str, ...]
    """Bad ends after the report arrived: worth a note, but not failures of the case."""

    @property
    def first(self) -> RankEnding | None:
        """The first failure; None if no rank failed."""
        return self.failures[0] if self.failures else None

    @property
    def is_hang(self) -> bool:
        """True if no rank failed by itself, and at least one missed a collective or its deadline."""
        return self.first is not None and self.first.ending not in CAUSES

    @property
    def headline(self) -> str:
        """The first failure in one sentence; empty if there is none."""
        return self.first.sentence if self.first is not None else ""

    @property
    def consequences(self) -> tuple[str, ...]:
        """One sentence for each other rank that did not finish; empty if no rank failed."""
        if self.first is None:
            return ()
        others = (item for item in self.endings if item is not self.first)
        return tuple(item.sentence for item in others if item.ending is not Ending.FINISHED)


def attribute(reports: Sequence[RankReport | None], exits: Sequence[RankExit]) -> Attribution:
    """
    Name the first rank to fail, from the report and the exit of each rank, in rank order.

    A rank that raised independently, or that ended before it reported, is the cause whatever the clock says:
    a peer notices a dead rank before the controller does. Among causes the earliest counts. Without one the case hung,
    and a rank that was stuck explains the ranks that waited for it.
    """
    ranks = list(zip(reports, exits, strict=True))
    endings = tuple(ending_of(report, end) for report, end in ranks)
    failures = [item for item in endings if item.ending in _ORDER]
    notes = (shutdown_note(report, end) for report, end in ranks)
    return Attribution(
        endings=endings,
        failures=tuple(sorted(failures, key=_order)),
        notes=tuple(note for note in notes if note is not None),
    )


def ending_of(report: RankReport | None, end: RankExit) -> RankEnding:
    """How one rank ended."""
    time, error, last = end.time, None, ""
    if end.suite_was_late and _has_no_cause(report, end):
        kind, sentence = Ending.SUITE_LATE, "did not finish the suite's own work (not the implementation's) in time"
    elif report is None:
        kind, sentence = _end_without_report(end)
        last = end.last_collectives[-1] if end.last_collectives else ""
    elif report.error is not None:
        error, time = report.error, report.error.time
        kind = kind_of_error(error)
        if report.findings and class_of(error) == "RequirementFailed":
            kind = Ending.FOUND
        verb = {Ending.TIMED_OUT: "timed out in a collective:", Ending.LOST_PEER: "lost a peer:"}.get(kind, "raised")
        line = first_line(error.message)
        sentence = f"{verb} {class_of(error)}" + (f": {line}" if line else "")
    elif reason := report.not_run or report.inconclusive:
        kind, sentence = Ending.LEFT_OUT, f"stopped early: {reason}"
    else:
        kind, sentence = Ending.FINISHED, "finished"
    return RankEnding(
        rank=end.rank, ending=kind, time=time, sentence=f"rank {end.rank} {sentence}", error=error, last_collective=last
    )


def _has_no_cause(report: RankReport | None, end: RankExit) -> bool:
    """True if the rank neither died nor raised independently."""
    if report is None:
        return end.exitcode is None or end.ended_by_controller
    return report.error is None or kind_of_error(report.error) is not Ending.RAISED


def shutdown_note(report: RankReport | None, end: RankExit) -> str | None:
    """The problem that a rank had when it shut down after its report, or None."""
    if report is None or report.error is not None:
        return None
    if end.ended_by_controller:
        return f"rank {end.rank} did not shut down after it had reported and was terminated"
    # A rank that was left out exits with a skip code.
    was_left_out = report.not_run is not None or report.inconclusive is not None
    if end.exitcode is None or (end.exitcode >= 0 if was_left_out else end.exitcode == 0):
        return None
    return f"rank {end.rank} {_exit_phrase(end.exitcode)} at shutdown, after it had reported"


def kind_of_error(error: RankError) -> Ending:
    """RAISED, LOST_PEER or TIMED_OUT, from the class and the message of an exception."""
    if class_of(error) not in _BACKEND_CLASSES:
        return Ending.RAISED
    if _TIMED_OUT.search(error.message):
        return Ending.TIMED_OUT
    return Ending.LOST_PEER if _LOST_PEER.search(error.message) else Ending.RAISED


def ranks_in_words(ranks: Sequence[int]) -> str:
    """ "rank 1", or "ranks 0, 2"."""
    return f"rank {ranks[0]}" if len(ranks) == 1 else "ranks " + ", ".join(map(str, ranks))


def first_line(text: str) -> str:
    """The first line of an exception's message, cut if it is very long."""
    return text.strip().partition("\n")[0][:_LINE_CHARACTERS]


def class_of(error: RankError) -> str:
    """The name of an exception's class, without its module."""
    return error.kind.rpartition(".")[2]


def _order(item: RankEnding) -> tuple[int, float, int]:
    """Sort key of failures: causes by time, then the ranks that waited, by how much their ending explains."""
    return _ORDER[item.ending], item.time, item.rank


def _end_without_report(end: RankExit) -> tuple[Ending, str]:
    if end.exitcode is not None and not end.ended_by_controller:
        kind = Ending.DIED if end.exitcode < 0 else Ending.EXITED
        if end.exitcode == -signal.SIGABRT and _WATCHDOG.search(end.output):
            # The rank that did not come is the one to look at.
            return Ending.TIMED_OUT, "was aborted by NCCL's watchdog, whose collective had passed its deadline"
        return kind, f"{_exit_phrase(end.exitcode)} before it reported"
    if end.stack is not None and end.stack.startswith(STOPPED):
        return Ending.STOPPED, "was stopped by a signal and never reported"
    return Ending.STUCK, "did not report in time and was terminated"


def _exit_phrase(code: int) -> str:
    if code >= 0:
        return f"exited with code {code}"
    try:
        return f"was killed by {signal.Signals(-code).name}"
    except ValueError:
        return f"was killed by signal {-code}"


# --- what backends say ---
#
# Backends raise RuntimeError and its subclasses for everything, so only the message tells a rank that lost a peer from
# one that failed by itself.

#: Only these classes come from a backend: a ValueError about a broken pipe is the rank's own.
_BACKEND_CLASSES = frozenset(
    {"RuntimeError", "DistError", "DistBackendError", "DistNetworkError", "DistStoreError", "RankTimedOut"}
)

#: A peer is gone: messages of gloo's TCP transport, NCCL, torch's stores and simulated ranks.
_LOST_PEER = re.compile(
    r"connection (was )?(closed|reset|refused)|closed by peer|reset by peer|broken pipe|remote process exited"
    r"|ncclRemoteError|communicator was aborted|recvValue failed|sendBytes failed|connection was likely closed",
    re.IGNORECASE,
)

#: What the watchdog of NCCL leaves in the output of a rank that it aborts because a collective takes too long.
_WATCHDOG = re.compile(r"watchdog caught collective operation timeout", re.IGNORECASE)

#: A peer did not come.
_TIMED_OUT = re.compile(
    r"timed out waiting|application timeout caused pair closure|timed out connecting|wait timeout after"
    r"|timeout waiting for key|timed out after \d+|caught collective operation timeout|socket timeout"
    r"|monitoredBarrier.*(timeout|within|in \d+ ms)|no rank can go on|mismatch in collective",
    re.IGNORECASE | re.DOTALL,
)
