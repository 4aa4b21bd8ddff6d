"""
The controller's side of a case: watch the ranks, release them together, terminate those that hang.

There is no polling. The controller sleeps on the ranks' pipes and sentinels until one is ready, or until the next
deadline.

A case has three phases. The controller waits until every rank has *spoken* (sent its report, or ended). The first
failure starts two clocks: after `settle_s` the failed ranks are released, so that gloo tells their peers, and after
another `grace_s` the peers that still wait are asked for their stacks and terminated. When all have spoken, every rank
gets its goodbye and has `shutdown_s` to end. Whatever lives at the case's deadline is killed.

Ranks that still issue collectives at their deadline are slow, not stuck: the machine may be busy with something else.
They get more time, and so does the case, as long as some rank makes progress in each quarter of the deadline, up to
MOST_TIMES the deadline.

The deadlines stand still while the suite does its own work in the ranks, which has its own deadline: see
`harness.accounting`.
"""

from __future__ import annotations

import io
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
from typing import Any

from fsdp_conformance.harness.accounting import Clock, Part, owner_of_time
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
from fsdp_conformance.outcome.records import RankError, RankExit, RankReport, rank_report_from_json

#: Between SIGTERM and SIGKILL: engines may want to remove their files.
TERM_TIMEOUT_S = 0.5
#: Between SIGKILL and giving up: a process in an uninterruptible system call does not end.
KILL_TIMEOUT_S = 5.0
#: Ranks that make progress may take their deadline this many times; a rank that issues collectives forever is stuck
#: too.
MOST_TIMES = 8
#: The part of the deadline in which a late rank has to make progress.
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
    """True once it was sent its goodbye."""
    stack: str | None = None
    signalled: bool = False
    """True once the controller has told the process to end."""
    mute: bool = False
    """True once the rank is past its deadline: its messages are ignored."""
    unreadable: RankError | None = None
    """The error of a rank that has sent what cannot be read. A report that says no other one later has it, too."""
    at_prompt: bool = False
    """True while a debugger in the rank waits for a person: no rank is terminated meanwhile."""
    part: Part = Part.ENGINE
    """Whose code the rank runs."""
    part_since: float = 0.0
    """The seconds of the suite's own work in the case when the rank turned to this part."""
    late: frozenset[int] = frozenset()
    """The ranks on this seat that have kept the case waiting with the suite's own work."""

    @property
    def pid(self) -> int:
        """The pid of the rank's process, and the id of its process group."""
        return int(self.process.pid or 0)

    @property
    def sentinel(self) -> int:
        """Ready when the process has ended."""
        return int(self.process.sentinel)

    @property
    def stack_file(self) -> Path:
        """The file with the rank's stacks."""
        return Path(self.files.stack)

    @property
    def spoken(self) -> bool:
        """True once the rank has reported or ended."""
        return self.report is not None or self.end is not None

    @property
    def failed(self) -> bool:
        """True if the rank's body ended early, so that its peers may wait for it forever."""
        if self.report is None:
            return self.end is not None
        return bool(self.report.error or self.report.not_run or self.report.inconclusive)

    @property
    def parts(self) -> list[Part]:
        """Whose code the ranks on this seat run that have not reported."""
        return [] if self.spoken else [self.part]

    def blame_suite(self) -> None:
        """Note that the ranks that work for the suite have kept the case waiting."""
        if self.part is not Part.ENGINE:
            self.late = frozenset({self.rank})

    def reports(self) -> list[RankReport | None]:
        """The reports of the ranks on this seat: here of one rank."""
        return [self.report]

    def exits(self, end: RankExit) -> list[RankExit]:
        """The ends of the ranks on this seat, from the end of the process."""
        return [end]

    def accept(self, message: bytes) -> None:
        """Handle one message of the rank."""
        if self.mute:
            return
        if message[:1] != b"{":
            # Torch's own protocol, from a test that overrides run_test: the traceback as a pickled string.
            self.report = report_of_text(self.rank, _pickled_text(message))
            return
        data = json.loads(message)
        if "report" in data:
            report = rank_report_from_json(data["report"])
            if report.rank != self.rank:
                raise ValueError(f"rank {self.rank} has sent the report of rank {report.rank}")
            report.error = report.error or self.unreadable
            self.report = report
        elif "part" in data:
            self.part = Part(data["part"])
        elif "prompt" in data:
            self.at_prompt = bool(data["prompt"])
        elif "idle" in data:
            self.idle = True

    def fail(self, text: str) -> None:
        """Take a traceback as the rank's report, for something that cannot be read."""
        self.report = report_of_text(self.rank, text)
        self.unreadable = self.report.error


class Supervisor:
    """Watches the ranks of one case until all have ended, or are idle if they are to be kept."""

    def __init__(
        self, seats: Sequence[Seat], deadlines: Deadlines, *, keep: bool = False, meeting: CaseMeeting | None = None
    ) -> None:
        self._meeting = meeting
        """Under torchrun: the meeting with the workers that watch the other ranks."""
        self.seats = list(seats)
        self.deadlines = deadlines
        self.keep = keep
        self.began = time.monotonic()
        self._clock = Clock(self.began)
        self._granted_s = 0.0
        """The time that ranks got beyond their deadline because they made progress."""
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
        """The report of each rank, in rank order."""
        return [report for seat in self.seats for report in seat.reports()]

    def exits(self) -> list[RankExit]:
        """How each rank ended, in rank order, with what it left in its files."""
        return [end for seat in self.seats for end in seat.exits(self._exit_of(seat))]

    def kill(self) -> None:
        """Kill every rank that lives."""
        living = [seat for seat in self.seats if seat.end is None]
        for seat in living:
            seat.signalled = True
            send_signal(seat.pid, signal.SIGKILL)
        self._await_ends(living, KILL_TIMEOUT_S)

    @property
    def _case_deadline(self) -> float:
        # The ranks of other workers may still be in the suite's own work.
        suite_s = self._clock.suite_s if self._meeting is None else self.deadlines.suite_s
        return self.began + self.deadlines.case_s + self._granted_s + suite_s

    @property
    def last_word(self) -> float:
        """When every worker must be done with the case, by time.monotonic()."""
        return self._case_deadline + self.deadlines.shutdown_s

    def _await_reports(self) -> None:
        """Wait until every rank has spoken; at a deadline terminate those that have not."""
        settled = given_up = float("inf")
        while waiting := [seat for seat in self.seats if not seat.spoken]:
            now = self._read_clock()
            if settled == float("inf") and any(seat.failed for seat in self.seats):
                settled = now + self.deadlines.settle_s
                given_up = settled + self.deadlines.grace_s
            if now >= settled:
                self._release([seat for seat in self.seats if seat.failed])
            busy = Part.SUITE in self._parts() or any(seat.at_prompt for seat in waiting)
            if given_up < float("inf") and busy:
                # A busy rank does not wait for others, and will report by itself.
                given_up = max(given_up, now + self.deadlines.grace_s)
            if now >= given_up or self._is_overdue(waiting):
                self._end(waiting)
                return
            self._wait(min(moment for moment in (now + self._left_s(), settled, given_up) if moment > now))

    def _parts(self) -> list[Part]:
        """Whose code the ranks run that have not reported."""
        return [part for seat in self.seats for part in seat.parts]

    def _read_clock(self) -> float:
        """Return time.monotonic(), and attribute the time since the last call to the engine or the suite."""
        now = time.monotonic()
        self._clock.advance(now, self._parts())
        return now

    def _left_s(self) -> float:
        """Seconds left until the current deadline; 0 or less once it has expired."""
        if owner_of_time(self._parts()) is Part.SUITE:
            return self.deadlines.suite_s - self._clock.suite_s
        return self.deadlines.rank_s + self._granted_s - self._clock.engine_s

    def _is_overdue(self, waiting: Sequence[Seat]) -> bool:
        """True if a deadline has expired that cannot be extended; if it is the suite's, its ranks are blamed."""
        if self._left_s() > 0:
            return False
        if owner_of_time(self._parts()) is Part.ENGINE:
            return not self._grant(waiting)
        for seat in waiting:
            seat.blame_suite()
        return True

    def _await_peers(self, meeting: CaseMeeting) -> None:
        """Wait until the ranks of the other workers have spoken, too."""
        if any(seat.failed for seat in self.seats):
            # As with the ranks of one worker: once the rank is released, the transport tells its peers.
            time.sleep(self.deadlines.settle_s)
            self._release(self.seats)
        meeting.meet("spoken", self._case_deadline)

    def _grant(self, waiting: Sequence[Seat]) -> bool:
        """Give late ranks more time if one of them has made progress since the last look."""
        last_lines = ["".join(last_collectives(Path(seat.files.collectives))[-1:]) for seat in waiting]
        has_progressed, self._seen = last_lines != self._seen, last_lines
        if not has_progressed or self._granted_s >= (MOST_TIMES - 1) * self.deadlines.rank_s:
            return False
        # Counted from now: a controller that looks late itself must not take the time from the ranks.
        self._granted_s = self._clock.engine_s - (1 - _LOOK) * self.deadlines.rank_s
        return True

    def _farewell(self) -> None:
        """Release every rank, and terminate those that do not end."""
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
        """Collect the stacks of these ranks, then terminate them by pid: SIGTERM, then SIGKILL."""
        for seat in seats:
            seat.signalled = True
            # From here on a message may only be the effect of STACK_SIGNAL, which interrupts system calls.
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
        """Wait for the ranks to do something, at most until that moment, and handle it."""
        living = [seat for seat in self.seats if seat.end is None]
        sources: dict[Connection | int, Seat] = {seat.sentinel: seat for seat in living}
        sources.update({seat.mailbox.connection: seat for seat in living if not seat.mailbox.closed})
        ready = multiprocessing.connection.wait(list(sources), remaining(until))
        for source in ready:
            if isinstance(source, Connection):
                for message in sources[source].mailbox.receive():
                    self._accept(sources[source], message)
        for source in ready:
            if isinstance(source, int):
                self._note_end(sources[source])

    def _accept(self, seat: Seat, message: bytes) -> None:
        """Handle one message of a rank."""
        sent_at = _turned_at(message)
        if sent_at is None:
            self._read_clock()
        else:
            # Until the message was sent: if the controller reads it late, the time since then is the new part's.
            self._clock.advance(sent_at, self._parts())
        part, had_failed = seat.part, seat.failed
        try:
            seat.accept(message)
        except (ValueError, TypeError, KeyError, AttributeError, RecursionError, pickle.UnpicklingError) as error:
            # Code under test can write to the pipe, too. The rank is responsible for whatever comes from there.
            reason = f"{type(error).__name__}: {str(error)[:200]}"
            seat.fail(f"RuntimeError: the rank sent a message that cannot be read ({reason})")
        if seat.part is not part:
            seat.part_since = self._clock.suite_s
        if seat.failed and not had_failed:
            for other in self.seats:
                # A rank that kept its peers waiting for as long as a collective may take has made theirs time out.
                busy = not other.spoken and other.part is Part.SUITE
                if busy and self._clock.suite_s - other.part_since >= self.deadlines.collective_s:
                    other.blame_suite()

    def _note_end(self, seat: Seat) -> None:
        """Record that a rank's process has ended, after the messages that it had sent before."""
        for message in seat.mailbox.drain():
            self._accept(seat, message)
        self._read_clock()
        seat.end = RankExit(
            rank=seat.rank,
            pid=seat.pid,
            exitcode=seat.process.exitcode,
            time=time.monotonic(),
            reported=seat.report is not None,
            ended_by_controller=seat.signalled,
        )
        try:
            # Processes that the rank has started (workers of a data loader or a compiler) are in its process group.
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
        end.suite_was_late = seat.rank in seat.late
        # A fatal signal leaves a stack, too.
        end.stack = seat.stack or readable(output_tail(seat.stack_file)) or None
        end.last_collectives = last_collectives(Path(seat.files.collectives))
        end.output = output_tail(Path(seat.files.output))
        return end


def _turned_at(message: bytes) -> float | None:
    """When a rank turned to another part, by time.monotonic() on this host; None for any other message."""
    if not message.startswith(b'{"part"'):
        return None
    try:
        # Not later than now: a rank cannot make the suite's time pass.
        return min(float(json.loads(message)["at"]), time.monotonic())
    except (ValueError, TypeError, KeyError, RecursionError):
        return None


class _TextAlone(pickle.Unpickler):
    """Unpickles strings only: unpickling anything else may run code, and code under test may have sent it."""

    def find_class(self, module: str, name: str) -> Any:
        raise pickle.UnpicklingError(f"{module}.{name} is no text")


def _pickled_text(message: bytes) -> str:
    text = _TextAlone(io.BytesIO(message)).load()
    if not isinstance(text, str):
        raise pickle.UnpicklingError(f"a {type(text).__name__} is no text")
    return text


def report_of_text(rank: int, text: str) -> RankReport:
    """The report of a rank that sent only a traceback."""
    last = text.strip().rsplit("\n", 1)[-1]
    kind, _, message = last.partition(": ")
    error = RankError(kind=kind, message=message, traceback=text, blame="implementation", time=time.monotonic())
    return RankReport(rank=rank, error=error)
