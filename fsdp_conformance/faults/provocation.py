"""
The faults of a stress run for each rank of a case, drawn from its seed and the case's id.

    provocation = Provoked(seed, case, rank=rank, world_size=world_size)
    with provocation:
        ...
    provocation.strikes    how often each of `stress.Provocation` struck on this rank

The same seed draws the same numbers, and the ranks agree on which of them is slow. On another device than the CPU only
the slow rank strikes: there, the order of streams is what a case provokes.
"""

from __future__ import annotations

import random

from fsdp_conformance.faults.fault import FaultSet
from fsdp_conformance.faults.late import LateCollectives
from fsdp_conformance.faults.poison import PoisonedMemory
from fsdp_conformance.faults.slow_rank import SlowRank
from fsdp_conformance.stress import Provocation


class Provoked(FaultSet):
    """The faults of a stress run on one rank."""

    def __init__(self, seed: int, case: str, *, rank: int, world_size: int) -> None:
        self.strikes: dict[str, int] = {provocation.value: 0 for provocation in Provocation}
        slow = random.Random(f"{seed} {case}").randrange(world_size)
        super().__init__(
            SlowRank(slow, random.Random(f"{seed} {case} {rank} slow"), self._strike),
            PoisonedMemory(self._strike),
            LateCollectives(random.Random(f"{seed} {case} {rank} late"), self._strike),
        )

    def inert(self, rank: int) -> list[str]:
        """A sentence if none of its members has struck. Which of them can depends on engine and device."""
        return super().inert(rank) if self.fired == 0 else []

    def _strike(self, provocation: Provocation) -> None:
        self.strikes[provocation.value] += 1
