"""
Failing rows of the pair profile, shrunk at once to the values that it takes to fail.

A row has dozens of values, and a failure takes one or two of them. Plainer trainings run on simulated ranks in a warm
process. Where the row does not fail there in the same way, or on a device that simulated ranks do not have, they run
on a process for each rank.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass, field, replace

from fsdp_conformance.contract.selection import unselected
from fsdp_conformance.diagnosis.headline import headline_of, is_explained
from fsdp_conformance.errors import ConformanceError
from fsdp_conformance.explore.case import run_on
from fsdp_conformance.explore.exploration import MAX_SHRINKS, Runs, shrunk
from fsdp_conformance.explore.pool import Outcome, WarmWorker, outcome_of
from fsdp_conformance.explore.signature import Signature, signature_of
from fsdp_conformance.outcome.records import CaseRecord, Takes
from fsdp_conformance.plan import SIMULATED
from fsdp_conformance.run_settings import RunOrder, RunSettings
from fsdp_conformance.scenarios.scenario import Scenario

#: Seconds after which no further training of a row is tried, and no further row is shrunk. Both grow with the scale of
#: deadlines, for slow machines. On a busy one, a row has the time for so many trainings as long as the first.
ROW_S = 60.0
ALL_S = 600.0
TRAININGS = 40


@dataclass(frozen=True, slots=True)
class _Shrunk:
    """A row that was shrunk."""

    case: str
    signature: Signature
    takes: Takes


class OnProcesses:
    """Runs scenarios on a process for each rank."""

    def __init__(self, settings: RunSettings) -> None:
        self._settings = settings

    def run(self, scenario: Scenario) -> Outcome:
        """Run a scenario. Raises SuiteError or AdapterError if it cannot be judged."""
        began = time.monotonic()
        record = run_on(scenario, self._settings.implementation, base=self._settings)
        return outcome_of(record, time.monotonic() - began)


@dataclass(kw_only=True, slots=True)
class RowShrinker:
    """Shrinks the failing rows of one engine. `close` ends the warm process."""

    clock: Callable[[], float] = time.monotonic
    _spent_s: float = 0.0
    _shrunk: list[_Shrunk] = field(default_factory=list)
    _simulated: WarmWorker | None = None
    _resources: ExitStack = field(default_factory=ExitStack)

    def takes(self, record: CaseRecord, scenario: Scenario, order: RunOrder) -> Takes | None:
        """The values that it takes to fail as `record` says; None if plainer trainings cannot show that."""
        signature = signature_of(Outcome(record=record))
        for earlier in self._shrunk:
            if signature.is_shown_by(earlier.signature) and scenario.features.issuperset(earlier.takes.values):
                return replace(earlier.takes, like=earlier.case)
        began = self.clock()
        try:
            takes = self._shrink(signature, scenario, order)
        except ConformanceError:
            # The row has its verdict. It stays without an explanation if a plainer one breaks the suite or the adapter.
            takes = None
        finally:
            self._spent_s += self.clock() - began
        if takes is not None:
            self._shrunk.append(_Shrunk(record.case, signature, takes))
        return takes

    def close(self) -> None:
        """End everything that was started."""
        self._resources.close()

    def _shrink(self, signature: Signature, scenario: Scenario, order: RunOrder) -> Takes | None:
        scale = order.settings.deadline_scale
        for runs in self._places(order):
            began = self.clock()
            if self._spent_s < ALL_S * scale and _failure(runs, scenario, signature) is not None:
                limit_s = max(ROW_S * scale, TRAININGS * (self.clock() - began))
                return self._shrink_on(runs, signature, scenario, limit_s=limit_s)
        return None

    def _shrink_on(self, runs: Runs, signature: Signature, scenario: Scenario, *, limit_s: float) -> Takes:
        end = self.clock() + limit_s
        was_late = False
        failures: dict[Scenario, CaseRecord] = {}

        def fails(candidate: Scenario) -> bool:
            nonlocal was_late
            was_late = was_late or self.clock() > end
            failure = None if was_late else _failure(runs, candidate, signature)
            if failure is not None:
                failures[candidate] = failure
            return failure is not None

        smallest, trainings = shrunk(scenario, fails)
        values = tuple(sorted(smallest.features))
        likely = None if signature.is_explained or smallest not in failures else _cause(failures[smallest])
        complete = not was_late and trainings < MAX_SHRINKS
        return Takes(values=values, trainings=trainings, complete=complete, likely=likely)

    def _places(self, order: RunOrder) -> list[Runs]:
        """Where plainer trainings can run, the fastest first."""
        settings = replace(unselected(order.settings), ranks="processes")
        on_processes = OnProcesses(settings)
        if order.device not in ("cpu", SIMULATED):
            return [on_processes]
        if self._simulated is None:
            simulated = replace(order, settings=replace(settings, ranks="simulated"), references=None)
            self._simulated = self._resources.enter_context(WarmWorker(simulated))
        return [self._simulated, on_processes]


def _failure(runs: Runs, scenario: Scenario, signature: Signature) -> CaseRecord | None:
    """The record of a scenario that fails in this way; None if it does not."""
    outcome = runs.run(scenario)
    return outcome.record if signature.is_shown_in(outcome) else None


def _cause(record: CaseRecord) -> str | None:
    """The explanation of a failure, if it names a cause."""
    finding = headline_of(record)
    return finding.likely if finding is not None and is_explained(finding) else None
