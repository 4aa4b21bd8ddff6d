"""
The controller's half of a case: the gate before it, the order for its ranks, the verdict on it.

No rank imports this module: `ConformanceTestCase` does when a case is set up.
"""

from __future__ import annotations

import os
import secrets
import shutil
import unittest
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from fsdp_conformance import codec, run_settings
from fsdp_conformance.adapters import registry
from fsdp_conformance.adapters.registry import AdapterDescription
from fsdp_conformance.cases import own_model, places, stress
from fsdp_conformance.contract.case import Case
from fsdp_conformance.contract.fingerprint import suite_sha256
from fsdp_conformance.contract.gate import Gated, gate, is_refereed
from fsdp_conformance.contract.selection import selection_options
from fsdp_conformance.errors import RequirementFailed
from fsdp_conformance.harness import devices
from fsdp_conformance.harness.accounting import Part
from fsdp_conformance.harness.observations import decisions_directory, note_ended
from fsdp_conformance.harness.order import CaseOrder, FirstGroup, Refereed, Role
from fsdp_conformance.harness.processes.launcher import RefereeLaunch
from fsdp_conformance.harness.processes.stacks import is_alive
from fsdp_conformance.judge import (
    Observed,
    drilled,
    has_ended_early,
    judge,
    keep_evidence,
    refereed_report,
    without_directory,
)
from fsdp_conformance.outcome.records import CaseRecord, RankExit, RankReport
from fsdp_conformance.plan import SIMULATED
from fsdp_conformance.references.sharing import offered
from fsdp_conformance.run_settings import RunOrder, RunSettings, TorchrunWorker
from fsdp_conformance.simulator.device.build import cache_directory
from fsdp_conformance.verdict import Verdict

#: Verdicts that pytest shows as skips with a reason; the run file tells them apart.
_NOT_JUDGED = frozenset({Verdict.UNSUPPORTED, Verdict.NOT_RUN_ENV, Verdict.DISABLED})


@dataclass(frozen=True, kw_only=True, slots=True)
class Admission:
    """A case that runs, as its test case needs to know it to start the ranks."""

    order: RunOrder
    """The order for the ranks; its device is that of the case."""
    description: AdapterDescription
    worker: TorchrunWorker | None
    """The torchrun worker that this process is."""


def admission(case: Case, *, shares_references: bool) -> Admission | CaseRecord:
    """The admission of a case that runs, or the record of one that the gate does not let run."""
    settings = run_settings.current()
    if case.is_own:
        settings = own_model.with_properties(settings)
    worker = TorchrunWorker.from_environment(os.environ) if settings.ranks == "torchrun" else None
    if worker is not None:
        settings = replace(settings, num_workers=worker.world_size)
    description = registry.describe_once(settings.implementation)
    gated = _gated(case, description, settings)
    if gated.record is not None:
        gated.record.adapter = description.identity
        return gated.record
    references = _offered_references(settings) if shares_references else None
    order = RunOrder(
        settings=settings, description=codec.plain(description), device=gated.device, references=references
    )
    return Admission(order=order, description=description, worker=worker)


def _gated(case: Case, description: AdapterDescription, settings: RunSettings) -> Gated:
    """The device of the case, or why it does not run. The first simulated case may wait for a compiler."""
    gated = gate(case, declared=description.declared, settings=settings, places=places.places(settings))
    if gated.record is None and gated.device == SIMULATED and places.build_problem():
        gated = gate(case, declared=description.declared, settings=settings, places=places.places(settings))
    return gated


def _secret_of(settings: RunSettings) -> str:
    """
    The secret of the run, if all of its profile is run; otherwise "".

    Code under test can write to the store, as any program of its user can. A run that can certify an engine therefore
    takes no reference that another run has left there.
    """
    return "" if selection_options(settings) else run_settings.secret()


def _offered_references(settings: RunSettings) -> dict[str, Any] | None:
    """The store of references, for a referee: see `CaseReferences`."""
    offer = offered(suite_sha256(), cache_directory(), run=settings.report_dir, secret=_secret_of(settings))
    return None if offer is None else codec.plain(offer)


class Referee:
    """The referee of a case, in the controller."""

    def __init__(self, order: CaseOrder) -> None:
        """Start the referee of ranks that get `order`. Raises EnvironmentUnavailable if it cannot be started."""
        directory = Path(decisions_directory(str(order.directory)))
        refereed = Refereed(role=Role.OBSERVED, directory=str(order.directory), nonce=secrets.token_hex(16))
        self._directory = refereed.directory
        of_device = dict(devices.preload_environment(order.device_type, shared=order.share_devices))
        self.observed = replace(order, refereed=refereed)
        self._order = replace(
            order,
            refereed=replace(refereed, role=Role.REFEREE, secret=_secret_of(run_settings.current())),
            directory=directory,
            file_name=str(directory / "store"),
            simulated=True,
            group=FirstGroup(),
            first_part=Part.SUITE,
            # Nothing of the engine: neither its modules nor its variables.
            engine=(),
            preload_environment=of_device,
            variables=of_device,
        )
        self._launch = self._started()

    def _started(self) -> RefereeLaunch:
        self._order.directory.mkdir()
        return RefereeLaunch(self._order)

    def judged(self, reports: Sequence[RankReport | None]) -> list[RankReport | None]:
        """The reports of the ranks, which have ended, with the referee's judgement in place of their own."""
        try:
            for rank in range(len(reports)):
                note_ended(self._directory, rank)
        except OSError as error:
            return [without_directory(report, str(error)) for report in reports]
        judgements, exits = self._launch.wait()
        if any(map(_is_disturbed, judgements)):
            # The ranks may have killed or stopped it, as they run under the same user. Now they have ended, and what
            # they have shown is still there.
            self.close()
            try:
                shutil.rmtree(self._order.directory)
                self._launch = self._started()
            except OSError as error:
                return [without_directory(report, str(error)) for report in reports]
            note = f"the first referee could not judge this case, so a second one did: {_reasons(judgements)}"
            judgements, exits = self._launch.wait()
            if judgements and judgements[0] is not None:
                judgements[0].notes.append(note)
        return [
            refereed_report(report, judgement, end)
            for report, judgement, end in zip(reports, judgements, exits, strict=True)
        ]

    def close(self) -> None:
        """End the referee if it still runs."""
        self._launch.close()


def _is_disturbed(judgement: RankReport | None) -> bool:
    """True if a referee has not judged, or has failed by itself."""
    error = None if judgement is None else judgement.error
    return judgement is None or (error is not None and error.blame == "suite" and not has_ended_early(error))


def _reasons(judgements: Sequence[RankReport | None]) -> str:
    """The reasons why a referee has not judged, as text."""
    errors = [judgement.error for judgement in judgements if judgement is not None and judgement.error is not None]
    return "; ".join(f"{error.kind}: {error.message}" for error in errors) or "its process ended early"


def referee_of(case: Case, order: CaseOrder) -> Referee | None:
    """The referee of a case, started; None if its ranks judge alone."""
    judged = is_refereed(case, run_settings.current(), order.device_type)
    return None if not judged or order.reuse or order.debugged else Referee(order)


def judged(
    case: Case,
    reports: Sequence[RankReport | None],
    exits: Sequence[RankExit],
    *,
    order: RunOrder,
    declared: frozenset[str],
    seconds: float,
    directory: Path,
) -> CaseRecord:
    """
    The verdict on a case that has run.

    `declared` are the flags that the implementation offers on the case's device. `directory` is the case's, in which a
    rank that was made to fail has left its trace.
    """
    settings = order.settings
    observed = Observed(reports=reports, exits=exits, declared=declared, device=order.device, seconds=seconds)
    record = keep_evidence(judge(case, observed, settings), observed.reports)
    failing = stress.failing_rank(settings, case, directory)
    if failing is None:
        return record
    trace = directory / stress.TRACE
    return drilled(
        record,
        failing.failure,
        rank=min(failing.ranks or ()),
        where=trace.read_text(encoding="utf-8") if trace.exists() else "",
        reports=observed.reports,
        exits=observed.exits,
        alive=[end.rank for end in observed.exits if end.pid is not None and is_alive(end.pid)],
    )


def tell_pytest(record: CaseRecord) -> None:
    """Do nothing if the case passed; otherwise raise CaseFailed with the whole report, or SkipTest with the reason."""
    if record.verdict in _NOT_JUDGED:
        raise unittest.SkipTest(f"{record.verdict}: {record.reason}")
    if record.verdict is not Verdict.PASS:
        raise CaseFailed(record)


class CaseFailed(RequirementFailed):
    """A case whose verdict is a failure; the text is the whole report."""

    def __init__(self, record: CaseRecord) -> None:
        self.record = record
        super().__init__(record.findings)

    def __str__(self) -> str:
        from fsdp_conformance.report.terminal import render_record

        return render_record(self.record)
