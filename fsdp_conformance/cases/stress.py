"""A case in a stress run: its ranks are delayed and disturbed, and one of them may be made to fail."""

from __future__ import annotations

from pathlib import Path

from fsdp_conformance.cases.rank import CaseRank
from fsdp_conformance.contract.case import Case
from fsdp_conformance.faults.failure import FailingRank
from fsdp_conformance.faults.provocation import Provoked
from fsdp_conformance.run_settings import RunSettings
from fsdp_conformance.stress import MEASUREMENT, SWALLOWED, failure_of

#: The file in the directory of a case in which a rank that is made to fail leaves its trace.
TRACE = "stress-failure"


def failing_rank(settings: RunSettings, case: Case, directory: Path) -> FailingRank | None:
    """The rank that is made to fail, if the run asks for that. It leaves its trace in `directory`."""
    if settings.stress_seed is None or not settings.stress_failure:
        return None
    failure = failure_of(settings.stress_failure, settings.stress_seed, case.id)
    return FailingRank(failure, settings.stress_seed, case.id, world_size=case.world_size, trace=directory / TRACE)


class Stress:
    """The provocations of one rank."""

    def __init__(self, here: CaseRank, settings: RunSettings, directory: Path) -> None:
        seed = settings.stress_seed
        assert seed is not None, "only a stress run provokes"
        self._here = here
        self._provoked = Provoked(seed, here.case.id, rank=here.rank, world_size=here.world_size)
        self._failing = failing_rank(settings, here.case, directory)

    def install(self) -> None:
        """Provoke the code under test from now on."""
        self._provoked.install()
        # The counts go on until the report is sent.
        self._here.report.measurements[MEASUREMENT] = self._provoked.strikes
        if self._failing is not None:
            self._failing.install()
            self._here.on_refusal.append(self._note_refusal)

    def remove(self) -> None:
        """Leave the code under test alone again."""
        if self._failing is not None:
            self._failing.remove(must_have_struck=False)
        self._provoked.remove(must_have_struck=False)

    def _note_refusal(self) -> None:
        if self._failing is not None and self._failing.fired:
            self._here.report.measurements[SWALLOWED] = True
