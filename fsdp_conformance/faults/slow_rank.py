"""A rank that is slow now and then: it sleeps before collectives that are drawn at random."""

from __future__ import annotations

import random
from collections.abc import Callable

from torch.distributed import ProcessGroup

from fsdp_conformance.faults.pause import calibrate, device_in_use, pause
from fsdp_conformance.faults.poison import in_engine, uncounted
from fsdp_conformance.faults.recorded import CollectiveFault
from fsdp_conformance.history.collective import CollectiveRecord
from fsdp_conformance.stress import Provocation

#: How long it sleeps, how often, and how often at most in one case.
_MILLISECONDS = 5.0
_CHANCE = 1 / 3
_MOST = 30


class SlowRank(CollectiveFault):
    """One rank sleeps before some of its collectives, wherever the code under test issues them."""

    need = "the engine must issue so many collectives while it is installed that the lot draws one of them"

    def __init__(self, rank: int, lot: random.Random, strike: Callable[[Provocation], None] = uncounted) -> None:
        super().__init__([rank])
        self._lot = lot
        self._count = strike

    def before(self, record: CollectiveRecord, group: ProcessGroup) -> None:
        """Sleep if a random number says so, but not too often in one case."""
        if self._strikes_here() and in_engine() and self.fired < _MOST and self._lot.random() < _CHANCE:
            self._fired += 1
            self._count(Provocation.SLOW)
            pause(_MILLISECONDS, record.device if "/" not in record.device else "cpu")

    def describe(self) -> str:
        """E.g. "delay of 5 ms before one in 3 collectives on ranks [1]"."""
        return f"delay of {_MILLISECONDS:g} ms before one in {1 / _CHANCE:.0f} collectives on {self._ranks_phrase()}"

    def _attach(self) -> None:
        super()._attach()
        calibrate(device_in_use())
