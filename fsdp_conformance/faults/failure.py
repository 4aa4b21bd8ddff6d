"""
A rank that fails: it raises, exits, is killed or stopped, or one of its collectives fails. It fails once, at a random
place.

Unlike the other faults it does change what a correct implementation does: training cannot go on without a rank. The run
must then report this failure as the first one, and every other rank must end, too (`judge.drill`).
"""

from __future__ import annotations

import os
import random
import signal
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.distributed import DistBackendError, ProcessGroup, Work

from fsdp_conformance.faults.fault import QUIET_PHASES
from fsdp_conformance.faults.poison import in_engine
from fsdp_conformance.faults.recorded import CollectiveFault
from fsdp_conformance.history.collective import CollectiveRecord
from fsdp_conformance.stress import EXIT_CODE, Failure

#: The rank fails at one of this many collectives of training, the first ones: most engines reach them in a few steps.
_PLACES = 6


class InjectedFailure(Exception):
    """Raised by a rank that was chosen to fail."""


class FailedWork(Work):
    """The work of a collective that the backend accepted, and that fails."""

    def __init__(self, inner: Work, message: str) -> None:
        super().__init__()
        self._inner = inner
        self._error = DistBackendError(message)

    def wait(self, timeout: timedelta = timedelta(0)) -> bool:
        """Raises DistBackendError with the message."""
        raise self._error

    def is_completed(self) -> bool:
        """True: it has failed."""
        return True

    def is_success(self) -> bool:
        """False: it has failed."""
        return False

    def exception(self) -> Any:
        """The exception that `wait` raises."""
        return self._error

    def get_future(self) -> torch.futures.Future[Any]:
        """A future that raises the same error, also in C++, which would take one from `set_exception` for a value."""

        def fail(_: torch.futures.Future[Any]) -> None:
            raise self._error

        trigger: torch.futures.Future[Any] = torch.futures.Future()
        failed: torch.futures.Future[Any] = trigger.then(fail)
        trigger.set_result(None)
        return failed


class FailingRank(CollectiveFault):
    """
    One rank fails at one of its first collectives of training.

    Before that it writes the place to the file `trace`, because a rank that is gone cannot report. The same seed and
    case fail at the same place.
    """

    need = f"the engine must issue {_PLACES} collectives of training while it is installed"

    def __init__(self, failure: Failure, seed: int, case: str, *, world_size: int, trace: Path) -> None:
        lot = random.Random(f"{seed} {case} failure")
        super().__init__([lot.randrange(world_size)])
        self._place = lot.randrange(_PLACES)
        self.failure = failure
        self._trace = trace
        self._met = 0
        self._fails: CollectiveRecord | None = None

    def before(self, record: CollectiveRecord, group: ProcessGroup) -> None:
        """Fail here, or choose the collective that fails."""
        if not self._strikes_here() or self.fired or record.phase in QUIET_PHASES or not in_engine():
            return
        self._met += 1
        if self._met <= self._place:
            return
        self._fired += 1
        where = f"{record.op} #{self._met} of training"
        self._trace.write_text(where, encoding="utf-8")
        if self.failure is Failure.COLLECTIVE:
            self._fails = record
        else:
            _FAIL[self.failure](where)

    def wrap_work(
        self, record: CollectiveRecord, work: Work, inputs: tuple[Tensor, ...], outputs: tuple[Tensor, ...]
    ) -> Work:
        """Return a work that fails for the chosen collective, and `work` for all others."""
        return FailedWork(work, f"stress: the backend failed in {record.op}") if record is self._fails else work

    def describe(self) -> str:
        """E.g. "kill before a collective on ranks [1]"."""
        return f"{self.failure} before a collective on {self._ranks_phrase()}"


def _raise(where: str) -> None:
    raise InjectedFailure(f"stress: told to raise before {where}")


def _leave(where: str) -> None:
    os._exit(EXIT_CODE)


def _kill(where: str) -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def _stop(where: str) -> None:
    os.kill(os.getpid(), signal.SIGSTOP)


_FAIL: dict[Failure, Callable[[str], None]] = {
    Failure.RAISE: _raise,
    Failure.EXIT: _leave,
    Failure.KILL: _kill,
    Failure.STOP: _stop,
}
