"""
Ranks that are threads of one process take turns: one runs until it waits for the others, then the next one does.

Taking turns makes such ranks sound, not only fast. What Python and torch keep once per process (random states,
environment variables, the current context) is switched with the turn (`state`), so each rank has its own. The order of
events is the same in every run. A deadlock is noticed at once, without a deadline, and every waiting rank is told what
each of them waits for.

A rank keeps its turn while it computes. If it blocks other than through this module (on a lock or a socket), it blocks
all ranks: the process groups, stores and pauses of this package wait through here.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from torch.distributed import DistBackendError

from fsdp_conformance.errors import ConfigError, SuiteError
from fsdp_conformance.harness.simulated_ranks.state import RankState

#: How the error of ranks that wait for one another begins; `outcome.endings` takes it for a hang.
STUCK = "no rank can go on"

#: How the error of ranks that wait for a failed rank begins; `outcome.endings` takes it for a lost peer.
PEER_FAILED = "connection closed by peer"


@dataclass(slots=True)
class _Seat:
    """A rank as the scheduler sees it."""

    state: RankState
    turn: threading.Lock = field(default_factory=threading.Lock)
    """Released when its turn begins."""
    ready: Callable[[], bool] | None = None
    """The condition it waits for; None if it has the turn, or can take it at once."""
    describe: Callable[[], str] | None = None
    wakes_at: float = 0.0
    """When its pause ends, by time.monotonic(); 0 if it does not pause."""
    is_done: bool = False
    """True if its body has ended, and it only waits for the others to end."""
    has_left: bool = False
    failure: str | None = None
    """The error to raise in the rank instead of returning from its wait."""

    def can_go_on(self, *, at_end: bool) -> bool:
        """True if it can take a turn; `at_end` if all waiting ranks are to be woken."""
        return self.ready is None or bool(self.failure) or (at_end and not self.is_done) or self.ready()


class RankScheduler:
    """Passes the turn between ranks, one for each of `states`. Rank 0 begins."""

    def __init__(self, states: Sequence[RankState]) -> None:
        self._seats = [_Seat(state) for state in states]
        for seat in self._seats:
            seat.turn.acquire()
        self._ranks = threading.local()
        self.failed: dict[int, str] = {}
        """The ranks whose body has failed, in order of failure, and how."""
        self._reason: str | None = None
        self._unfinished = set(range(len(states)))
        """The ranks whose body has not ended."""
        self._expected = set(range(len(states)))
        """The ranks that `once_together` waits for."""
        self._did_together = False
        self._seats[0].turn.release()
        self.on_turn: Callable[[int], object] | None = None
        """Called with the rank whose turn begins."""

    @property
    def world_size(self) -> int:
        """The number of ranks."""
        return len(self._seats)

    @property
    def rank(self) -> int:
        """The rank that the calling thread runs. Raises SuiteError in any other thread."""
        rank: int | None = getattr(self._ranks, "rank", None)
        if rank is None:
            raise SuiteError(
                f"thread {threading.current_thread().name!r} cannot wait for other ranks: it does not run a rank"
            )
        return rank

    def enter(self, rank: int) -> None:
        """Make the calling thread run `rank`. Returns when it has its first turn."""
        self._ranks.rank = rank
        self._await_turn(rank)

    def leave(self) -> None:
        """Pass the turn on for good: the calling rank takes no more turns."""
        seat = self._seats[self.rank]
        seat.has_left = seat.is_done = True
        self._unfinished.discard(self.rank)
        self._expected.discard(self.rank)
        seat.state.save()
        following = self._following(self.rank)
        if following is not None:
            self._seats[following].turn.release()

    def wait_until(self, ready: Callable[[], bool], describe: Callable[[], str]) -> None:
        """
        Let the others run until `ready()`. `describe()` says what the rank waits for, in case it never happens.

        Both may be called in any rank's turn. Raises DistBackendError if no rank can go on, or if `end` was called.
        """
        if self._reason is None and ready():
            return
        rank = self.rank
        seat = self._seats[rank]
        seat.ready, seat.describe = ready, describe
        self._pass_on(rank)
        seat.ready = seat.describe = None
        failure, seat.failure = seat.failure or self._reason, None
        if failure is not None:
            raise DistBackendError(failure)

    def require_going(self) -> None:
        """Raise DistBackendError if `end` was called: for callers that never wait."""
        if self._reason is not None:
            raise DistBackendError(self._reason)

    def give_way(self) -> None:
        """Let every other rank that can go on run first: for callers that poll."""
        self._pass_on(self.rank)
        self.require_going()

    def pause(self, seconds: float) -> None:
        """Let the others run for that long, or longer if they do not give way."""
        seat = self._seats[self.rank]
        seat.wakes_at = time.monotonic() + seconds
        self.wait_until(lambda: time.monotonic() >= seat.wakes_at, lambda: f"a pause of {seconds} s")
        seat.wakes_at = 0.0

    def finish(self, failure: str = "") -> None:
        """The calling rank's body has ended; `failure` says how it failed. Returns when all bodies have ended."""
        rank = self.rank
        seat = self._seats[rank]
        seat.is_done = True
        if failure:
            self.failed[rank] = failure
        self._unfinished.discard(rank)
        seat.ready = lambda: not self._unfinished
        self._pass_on(rank)
        seat.ready = None

    def once_together(self, work: Callable[[], object]) -> None:
        """
        Call `work` once for all ranks, when each of them has called this or has left. Call it after `finish`, once.

        For work that a rank in its own process does for itself, but which costs as much as all ranks have.
        """
        seat = self._seats[self.rank]
        self._expected.discard(self.rank)
        if self._expected:
            seat.ready = lambda: not self._expected
            self._pass_on(self.rank)
            seat.ready = None
        if not self._did_together:
            self._did_together = True
            work()

    def end(self, reason: str) -> None:
        """Raise an error with this reason in every rank that waits, now or later. Call it from any thread."""
        self._reason = reason

    def _pass_on(self, rank: int) -> None:
        """Give the turn to the next rank that can go on; returns when it is this rank's turn again."""
        following = self._following(rank)
        if following is None or following == rank:
            return
        self._seats[rank].state.save()
        self._seats[following].turn.release()
        self._await_turn(rank)

    def _await_turn(self, rank: int) -> None:
        seat = self._seats[rank]
        seat.turn.acquire()
        seat.state.restore()
        if self.on_turn is not None:
            self.on_turn(rank)

    def _following(self, rank: int) -> int | None:
        """The next rank that can go on, `rank` itself last; None if all have left."""
        while True:
            present = False
            for step in range(1, self.world_size + 1):
                candidate = (rank + step) % self.world_size
                seat = self._seats[candidate]
                if seat.has_left:
                    continue
                present = True
                if seat.can_go_on(at_end=bool(self._reason)):
                    return candidate
            if not present:
                return None
            pauses = [seat.wakes_at for seat in self._seats if seat.wakes_at and not seat.has_left]
            if pauses:
                time.sleep(max(0.0, min(pauses) - time.monotonic()))
            else:
                self._fail_all_waiting()

    def _fail_all_waiting(self) -> None:
        """No rank can go on: wake all with an error."""
        waiting = [seat for seat in self._seats if not seat.is_done]
        if not waiting:
            raise SuiteError("no rank can go on although all bodies have ended")
        reason = self._why_stuck()
        for seat in waiting:
            seat.failure = reason

    def _why_stuck(self) -> str:
        lines = []
        for rank, seat in enumerate(self._seats):
            if rank in self.failed:
                continue
            waits = seat.describe() if seat.describe is not None and not seat.is_done else ""
            lines.append(f"rank {rank} waits for {waits}" if waits else f"rank {rank} has ended")
        begin = STUCK
        if self.failed:
            rank, failure = next(iter(self.failed.items()))
            begin = f"{PEER_FAILED}: rank {rank} failed, {failure}"
        return f"{begin}: " + ";\n  ".join(lines)


_scheduler: RankScheduler | None = None


def current() -> RankScheduler | None:
    """The scheduler of this process's simulated ranks; None if there are none."""
    return _scheduler


def running() -> RankScheduler:
    """The scheduler of this process's simulated ranks. Raises SuiteError if there are none."""
    if _scheduler is None:
        raise SuiteError("this process has no simulated ranks: start them with run_ranks")
    return _scheduler


def use(scheduler: RankScheduler | None) -> None:
    """
    Set what `current()` returns; None when the ranks have ended.

    Raises ConfigError if there already is one: torch's globals serve one set of ranks per process.
    """
    global _scheduler
    if scheduler is not None and _scheduler is not None:
        raise ConfigError(
            [f"cannot start more simulated ranks: {_scheduler.world_size} are already running in this process"],
            where="run_ranks",
        )
    _scheduler = scheduler
