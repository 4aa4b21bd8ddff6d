"""
Ranks that are threads of one process take turns: one runs until it waits for the others, then the next one does.

Taking turns is what makes such ranks sound, not only quick. Whatever Python and torch keep once per process (random
states, environment variables, the log of collectives) can be a rank's own, because it is exchanged when the turn passes
on (`rank_state`). The order of events is the same in every run. And that nobody can go on is seen at once, without a
deadline: then every rank that waits is told what each of them waits for.

A rank keeps its turn while it computes. What blocks it in any other way than through this module (a lock, a socket)
blocks all: process groups, stores and pauses of this package wait through here.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from torch.distributed import DistBackendError

from fsdp_conformance.errors import ConfigError, SuiteError
from fsdp_conformance.harness.simulated_ranks.state import RankState

#: Begins what ranks are told that wait for one another in vain; `attribution` takes it for a hang.
STUCK = "no rank can go on"

#: Begins what they are told when it is a rank that has failed for which they wait.
PEER_FAILED = "connection closed by peer"


@dataclass(slots=True)
class _Seat:
    """A rank, as the others see it."""

    state: RankState
    turn: threading.Lock = field(default_factory=threading.Lock)
    """Released when its turn begins."""
    ready: Callable[[], bool] | None = None
    """What it waits for; None: it has the turn, or would take it at once."""
    describe: Callable[[], str] | None = None
    wakes_at: float = 0.0
    """Of a rank that pauses, by time.monotonic()."""
    is_done: bool = False
    """Its body has ended: it waits for the others to end, and for nothing else."""
    has_left: bool = False
    failure: str | None = None
    """What it is told instead of what it waited for."""


class RankScheduler:
    """Whose turn it is, among `states`, one for each rank. Rank 0 begins."""

    def __init__(self, states: Sequence[RankState]) -> None:
        self._seats = [_Seat(state) for state in states]
        for seat in self._seats:
            seat.turn.acquire()
        self._ranks = threading.local()
        self.failed: dict[int, str] = {}
        """The ranks whose body has failed, in the order in which they did, and how."""
        self._reason: str | None = None
        self._seats[0].turn.release()
        self.on_turn: Callable[[int], object] | None = None
        """Called with the rank whose turn begins."""

    @property
    def world_size(self) -> int:
        """The number of ranks."""
        return len(self._seats)

    @property
    def rank(self) -> int:
        """The rank that the calling thread is. Raises SuiteError in a thread that is none."""
        rank: int | None = getattr(self._ranks, "rank", None)
        if rank is None:
            raise SuiteError(
                f"thread {threading.current_thread().name!r} is no rank, but should be one to wait for others"
            )
        return rank

    def enter(self, rank: int) -> None:
        """The calling thread is `rank` from now on. Returns when it has its first turn."""
        self._ranks.rank = rank
        self._await_turn(rank)

    def leave(self) -> None:
        """The calling rank takes no turn any more."""
        seat = self._seats[self.rank]
        seat.has_left = seat.is_done = True
        seat.state.save()
        following = self._following(self.rank)
        if following is not None:
            self._seats[following].turn.release()

    def wait_until(self, ready: Callable[[], bool], describe: Callable[[], str]) -> None:
        """
        Let the others run until `ready()`. `describe()` says what is waited for, should it never come.

        Both are called in any rank's turn. Raises DistBackendError if no rank can go on, and once the world was ended.
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
        """Raise DistBackendError once the world was ended: for who never waits."""
        if self._reason is not None:
            raise DistBackendError(self._reason)

    def give_way(self) -> None:
        """Let each rank that can go on do so before the caller does: for who asks again and again whether it may."""
        self._pass_on(self.rank)
        self.require_going()

    def pause(self, seconds: float) -> None:
        """Let the others run for so long, and longer if they do not give way."""
        seat = self._seats[self.rank]
        seat.wakes_at = time.monotonic() + seconds
        self.wait_until(lambda: time.monotonic() >= seat.wakes_at, lambda: f"a pause of {seconds} s")
        seat.wakes_at = 0.0

    def finish(self, failure: str = "") -> None:
        """The calling rank's body has ended; `failure` says how it failed. Returns when those of all ranks have."""
        rank = self.rank
        seat = self._seats[rank]
        seat.is_done = True
        if failure:
            self.failed[rank] = failure
        seat.ready = lambda: all(other.is_done for other in self._seats)
        self._pass_on(rank)
        seat.ready = None

    def end(self, reason: str) -> None:
        """Every rank that waits, now or later, is told that this is why it waits in vain. From any thread."""
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
                if seat.ready is None or seat.failure or (self._reason and not seat.is_done) or seat.ready():
                    return candidate
            if not present:
                return None
            pauses = [seat.wakes_at for seat in self._seats if seat.wakes_at and not seat.has_left]
            if pauses:
                time.sleep(max(0.0, min(pauses) - time.monotonic()))
            else:
                self._tell_that_nobody_can_go_on()

    def _tell_that_nobody_can_go_on(self) -> None:
        waiting = [seat for seat in self._seats if not seat.is_done]
        if not waiting:
            raise SuiteError("every rank has ended its body, but none can go on")
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
    """The scheduler of the ranks that are threads of this process; None if there are none."""
    return _scheduler


def running() -> RankScheduler:
    """The scheduler of the ranks that are threads of this process. Raises SuiteError if there are none."""
    if _scheduler is None:
        raise SuiteError("no ranks are simulated in this process, but should be: start them with run_ranks")
    return _scheduler


def use(scheduler: RankScheduler | None) -> None:
    """
    Make it what `current()` returns; None when its ranks have ended.

    Raises ConfigError for a second one: torch keeps what is global once per process, for one set of ranks.
    """
    global _scheduler
    if scheduler is not None and _scheduler is not None:
        raise ConfigError(
            [f"a second set of simulated ranks, but should be one at a time ({_scheduler.world_size} ranks)"],
            where="run_ranks",
        )
    _scheduler = scheduler
