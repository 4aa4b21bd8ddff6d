"""
The controller's half of a case: the gate before it, the order for its ranks, the verdict on it.

No rank imports this module: `ConformanceTestCase` does when a case is set up.
"""

from __future__ import annotations

import os
import unittest
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from fsdp_conformance import codec, run_settings
from fsdp_conformance.adapters import registry
from fsdp_conformance.adapters.registry import AdapterDescription
from fsdp_conformance.cases import places, stress
from fsdp_conformance.contract.case import Case
from fsdp_conformance.contract.fingerprint import suite_sha256
from fsdp_conformance.contract.gate import Gated, gate
from fsdp_conformance.errors import RequirementFailed
from fsdp_conformance.harness.processes.stacks import is_alive
from fsdp_conformance.judge import Observed, drilled, judge, keep_evidence
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
    """For the ranks; its device is that of the case."""
    description: AdapterDescription
    worker: TorchrunWorker | None
    """The torchrun worker that this process is."""


def admission(case: Case, *, shares_references: bool) -> Admission | CaseRecord:
    """How a case starts, or its record if the gate says that it does not run."""
    settings = run_settings.current()
    worker = TorchrunWorker.from_environment(os.environ) if settings.ranks == "torchrun" else None
    if worker is not None:
        settings = replace(settings, num_workers=worker.world_size)
    description = registry.describe_once(settings.implementation)
    gated = _gated(case, description, settings)
    if gated.record is not None:
        return gated.record
    references = _offered_references(settings, gated.device) if shares_references else None
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


def _offered_references(settings: RunSettings, device: str) -> dict[str, Any] | None:
    """
    The store of references, where they depend on nothing that the store's keys leave out.

    They do on other devices than the CPU, on ranks that have run other cases, on simulated ones, on other hosts, and
    under stress.
    """
    usual = settings.ranks == "processes" and not settings.reuse_ranks and settings.stress_seed is None
    if not usual or device != "cpu":
        return None
    offer = offered(suite_sha256(), cache_directory(), run=settings.report_dir)
    return None if offer is None else codec.plain(offer)


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
    """Nothing for a case that passed. Raises CaseFailed with the whole report, or SkipTest with the reason."""
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
