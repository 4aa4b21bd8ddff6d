"""
The controller's side of a case: notice what each rank does, let the ranks go together, end those that do not.

There is no polling. The controller sleeps on the ranks' pipes and sentinels until one is ready, or until the next
deadline.

A case passes through three phases. While some rank has not *spoken* (sent its report, or ended), the controller
waits. The first failure starts two clocks: after `settle_s` the ranks that failed are let go, so that gloo tells
their peers, and after `grace_s` more the peers that still wait are asked for their stacks and ended. When all have
spoken, every rank gets its goodbye and has `shutdown_s` to end. Whatever lives at the case's deadline is killed.

Ranks that still issue collectives at their deadline are slow, not stuck: on a machine that is busy with something else
they get more time, and the case too, as long as some rank gets on in each quarter of the deadline, up to MOST_TIMES of
it.
"""

from __future__ import annotations

import json
import multiprocessing.connection
import os
import pickle
import signal
import time
from collections.abc import Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path

from fsdp_conformance.harness.deadlines import Deadlines, remaining
from fsdp_conformance.harness.order import RankFiles
from fsdp_conformance.harness.processes.forkserver import WarmProcess
from fsdp_conformance.harness.processes.mailbox import Mailbox
from fsdp_conformance.harness.processes.stacks import (
    collect_stacks,
    last_collectives,
    output_tail,
    readable,
    send_signal,
)
from fsdp_conformance.harness.torchrun.worker import CaseMeeting
from fsdp_conformance.outcome import RankError, RankExit, RankReport, rank_report_from_json

#: Between SIGTERM and SIGKILL: engines may remove files of their own.
TERM_TIMEOUT_S = 0.5
#: Between SIGKILL and giving up: a process in an uninterruptible wait of the kernel does not end.
KILL_TIMEOUT_S = 5.0
#: Ranks that get on may take their deadline this many times: who issues collectives for ever is stuck as well.
MOST_TIMES = 8
#: Part of the deadline in which a rank that is late has to get on.
_LOOK = 0.25


@dataclass(slots=True)
class Seat:
    """One rank as the controller sees it."""

    rank: int
    process: WarmProcess
    mailbox: Mailbox
    files: RankFiles
    report: RankReport | None = None
    end: RankExit | None = None
    """Set when the process has ended."""
    idle: bool = False
    """True for a reused rank that is ready for the next case."""
    released: bool = False
    """True once it was told goodbye."""
    stack: str | None = None
    signalled: bool = False
    """True once the controller has told the process to end."""
    mute: bool = False
    """True once the rank is past its deadline: its words do not count any more."""

    @property
    def pid(self) -> int:
        """Of the rank's process, which also is its process group."""
        return int(self.process.pid or 0)

    @property
    def sentinel(self) -> int:
        """Ready when the process has ended."""
        return int(self.process.sentinel)

    @property
    def stack_file(self) -> Path:
        """Where the rank writes its stacks."""
        return Path(self.files.stack)

    @property
    def spoken(self) -> bool:
        """True once nothing more is to be expected of this rank."""
        return self.report is not None or self.end is not None

    @property
    def failed(self) -> bool:
        """True if the rank left its body early, so that its peers may wait for it in vain."""
        if self.report is None:
            return self.end is not None
        return bool(self.report.error or self.report.not_run or self.report.inconclusive)

    def reports(self) -> list[RankReport | None]:
        """What the ranks of this seat said: of the one rank."""
        return [self.report]

    def exits(self, end: RankExit) -> list[RankExit]:
        """How the ranks of this seat ended, from how the process did."""
        return [end]

    def accept(self, message: bytes) -> None:
        """Take in one message of the rank."""
        if self.mute:
            return
        if message[:1] != b"{":
            # Torch's own protocol, from a test that overrides run_test: the traceback as a pickled string.
            self.report = _report_of_text(self.rank, str(pickle.loads(message)))  # noqa: S301 - our own rank sent it
            return
        data = json.loads(message)
        if "report" in data:
            self.report = rank_report_from_json(data["report"])
        elif "idle" in data:
            self.idle = True


class Supervisor:
    """Watches the ranks of one case until all have ended, or are idle if they are to be kept."""

    def __init__(
        self, seats: Sequence[Seat], deadlines: Deadlines, *, keep: bool = False, meeting: CaseMeeting | None = None
    ) -> None:
        self._meeting = meeting
        """With the workers that watch the other ranks, if these are not ours."""
        self.seats = list(seats)
        self.deadlines = deadlines
        self.keep = keep
        self.began = time.monotonic()
        self._granted_s = 0.0
        """What ranks that got on have been given beyond their deadline."""
        self._seen: list[str] = []

    def run(self) -> None:
        """Return when the case is over. An exception (Ctrl-C) kills every rank first."""
        try:
            self._await_reports()
            if self._meeting is not None:
                self._await_peers(self._meeting)
            self._farewell()
        except BaseException:
            self.kill()
            raise

    def reports(self) -> list[RankReport | None]:
        """What each rank said, in the order of ranks."""
        return [report for seat in self.seats for report in seat.reports()]

    def exits(self) -> list[RankExit]:
        """How each rank ended, in the order of ranks, with what it left in its files."""
        return [end for seat in self.seats for end in seat.exits(self._exit_of(seat))]

    def kill(self) -> None:
        """End every rank that lives, at once."""
        living = [seat for seat in self.seats if seat.end is None]
        for seat in living:
            seat.signalled = True
            send_signal(seat.pid, signal.SIGKILL)
        self._await_ends(living, KILL_TIMEOUT_S)

    @property
    def _case_deadline(self) -> float:
        return self.began + self.deadlines.case_s + self._granted_s

    @property
    def _rank_deadline(self) -> float:
        return self.began + self.deadlines.rank_s + self._granted_s

    @property
    def last_word(self) -> float:
        """When every worker of the case has come to its end, by time.monotonic()."""
        return self._case_deadline + self.deadlines.shutdown_s

    def _await_reports(self) -> None:
        """Until every rank has spoken, or a deadline has passed and those that have not are ended."""
        settled = given_up = float("inf")
        while waiting := [seat for seat in self.seats if not seat.spoken]:
            now = time.monotonic()
            if settled == float("inf") and any(seat.failed for seat in self.seats):
                settled = now + self.deadlines.settle_s
                given_up = settled + self.deadlines.grace_s
            if now >= settled:
                self._release([seat for seat in self.seats if seat.failed])
            if now >= given_up or (now >= self._rank_deadline and not self._grant(waiting)):
                self._end(waiting)
                return
            self._wait(min(moment for moment in (self._rank_deadline, settled, given_up) if moment > now))

    def _await_peers(self, meeting: CaseMeeting) -> None:
        """Until the ranks of the other workers have spoken, too."""
        if any(seat.failed for seat in self.seats):
            # As between ranks of one worker: its peers hear of it from the transport.
            time.sleep(self.deadlines.settle_s)
            self._release(self.seats)
        meeting.meet("spoken", self._case_deadline)

    def _grant(self, waiting: Sequence[Seat]) -> bool:
        """More time for ranks that are late, if one of them has got on since the last look."""
        seen = ["".join(last_collectives(Path(seat.files.collectives))[-1:]) for seat in waiting]
        gets_on, self._seen = seen != self._seen, seen
        if not gets_on or self._granted_s >= (MOST_TIMES - 1) * self.deadlines.rank_s:
            return False
        self._granted_s += _LOOK * self.deadlines.rank_s
        return True

    def _farewell(self) -> None:
        """Let every rank go, and end those that do not."""
        self._release(self.seats)
        deadline = min(self._case_deadline, time.monotonic() + self.deadlines.shutdown_s)
        while present := [seat for seat in self.seats if seat.end is None and not (self.keep and seat.idle)]:
            if time.monotonic() >= deadline:
                self._end(present)
                return
            self._wait(deadline)

    def _release(self, seats: Sequence[Seat]) -> None:
        for seat in seats:
            if not seat.released and seat.end is None:
                seat.released = True
                seat.mailbox.send({"goodbye": True})

    def _end(self, seats: Sequence[Seat]) -> None:
        """Collect the stacks of these ranks, then end them by pid: SIGTERM, then SIGKILL."""
        for seat in seats:
            seat.signalled = True
            # What a rank says from here on, the signal for its stack has made it say: it interrupts system calls.
            seat.mute = not seat.spoken
        stacks = collect_stacks(
            {seat.rank: seat for seat in seats},
            timeout_s=min(self.deadlines.stack_s, remaining(self._case_deadline)),
        )
        for seat in seats:
            seat.stack = stacks[seat.rank]
            send_signal(seat.pid, signal.SIGTERM)
        self._await_ends(seats, TERM_TIMEOUT_S)
        living = [seat for seat in seats if seat.end is None]
        for seat in living:
            send_signal(seat.pid, signal.SIGKILL)
        self._await_ends(living, KILL_TIMEOUT_S)

    def _await_ends(self, seats: Sequence[Seat], timeout_s: float) -> None:
        deadline = time.monotonic() + timeout_s
        while any(seat.end is None for seat in seats) and time.monotonic() < deadline:
            self._wait(deadline)

    def _wait(self, until: float) -> None:
        """Take in what the ranks do, waiting for something at most until that moment."""
        living = [seat for seat in self.seats if seat.end is None]
        sources: dict[Connection | int, Seat] = {seat.sentinel: seat for seat in living}
        sources.update({seat.mailbox.connection: seat for seat in living if not seat.mailbox.closed})
        ready = multiprocessing.connection.wait(list(sources), remaining(until))
        for source in ready:
            if isinstance(source, Connection):
                for message in sources[source].mailbox.receive():
                    sources[source].accept(message)
        for source in ready:
            if isinstance(source, int):
                self._note_end(sources[source])

    def _note_end(self, seat: Seat) -> None:
        for message in seat.mailbox.drain():
            seat.accept(message)
        seat.end = RankExit(
            rank=seat.rank,
            pid=seat.pid,
            exitcode=seat.process.exitcode,
            time=time.monotonic(),
            reported=seat.report is not None,
            ended_by_controller=seat.signalled,
        )
        try:
            # What the rank has started (workers of a data loader or a compiler) is in its process group.
            os.killpg(seat.pid, signal.SIGKILL)
        except (ProcessLookupError, PermissionError):
            return

    def _exit_of(self, seat: Seat) -> RankExit:
        end = seat.end or RankExit(
            rank=seat.rank,
            pid=seat.pid,
            exitcode=None,
            time=time.monotonic(),
            reported=seat.report is not None,
            ended_by_controller=seat.signalled,
        )
        # A fatal signal leaves a stack that nobody asked for.
        end.stack = seat.stack or readable(output_tail(seat.stack_file)) or None
        end.last_collectives = last_collectives(Path(seat.files.collectives))
        end.output = output_tail(Path(seat.files.output))
        return end


def _report_of_text(rank: int, text: str) -> RankReport:
    """The report of a rank that sent a traceback and nothing else."""
    last = text.strip().rsplit("\n", 1)[-1]
    kind, _, message = last.partition(": ")
    error = RankError(kind=kind, message=message, traceback=text, blame="implementation", time=time.monotonic())
    return RankReport(rank=rank, error=error)
