"""
The controller's half of a case: the gate before it, the launch of its ranks, the verdict on it.

No rank imports this module: `ConformanceTestCase` does when a case is set up.
"""

from __future__ import annotations

import os
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fsdp_conformance import codec, run_settings
from fsdp_conformance.adapters import registry
from fsdp_conformance.adapters.registry import AdapterDescription
from fsdp_conformance.cases import places, stress
from fsdp_conformance.contract.case import Case
from fsdp_conformance.contract.fingerprint import suite_sha256
from fsdp_conformance.contract.gate import Gated, gate
from fsdp_conformance.errors import RequirementFailed
from fsdp_conformance.harness.environment import Determinism
from fsdp_conformance.harness.order import FirstGroup
from fsdp_conformance.harness.processes.stacks import is_alive
from fsdp_conformance.judge import Observed, drilled, judge, keep_evidence
from fsdp_conformance.outcome.records import CaseRecord, RankExit, RankReport
from fsdp_conformance.plan import SIMULATED
from fsdp_conformance.references.sharing import offered
from fsdp_conformance.run_settings import RunOrder, RunSettings, TorchrunWorker
from fsdp_conformance.simulator.device.build import cache_directory
from fsdp_conformance.verdict import Verdict

if TYPE_CHECKING:
    from fsdp_conformance.cases.base import ConformanceTestCase

#: Verdicts that pytest shows as skips with a reason; the run file tells them apart.
_NOT_JUDGED = frozenset({Verdict.UNSUPPORTED, Verdict.NOT_RUN_ENV, Verdict.DISABLED})


def prepare(test: ConformanceTestCase) -> None:
    """Set up the launch of a case, or skip it with its record if the gate says that it does not run."""
    settings = run_settings.current()
    worker = TorchrunWorker.from_environment(os.environ) if settings.ranks == "torchrun" else None
    if worker is not None:
        settings = replace(settings, num_workers=worker.world_size)
    description = registry.describe_once(settings.implementation)
    gated = _gated(test.case, description, settings)
    if gated.record is not None:
        test.record = gated.record
        test.skipTest(f"{gated.record.verdict}: {gated.record.reason}")
    references = _offered_references(settings, gated.device) if test.shares_references else None
    order = RunOrder(
        settings=settings, description=codec.plain(description), device=gated.device, references=references
    )
    test.launch_payload = order.to_json()
    test.take_over_order()
    test.reuse_ranks = settings.reuse_ranks
    test.share_devices = settings.share_devices
    test.slots_per_device = settings.slots_per_device
    # --backend is for the run's device; a case may be sent to the simulated one.
    test.first_group = FirstGroup(only=settings.backend if gated.device == settings.device else "")
    test.simulated_ranks = settings.ranks == "simulated"
    test.torchrun_worker = worker
    test.determinism = Determinism(seed=settings.seed, num_threads=settings.num_threads)
    test.preload = description.preload
    test.rank_environment = dict(description.environment)
    test.preload_environment = dict(description.environment)
    # Compiling the simulated accelerator does not count as the case's time.
    test.began = time.monotonic()


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


def conclude(
    test: ConformanceTestCase,
    reports: Sequence[RankReport | None],
    exits: Sequence[RankExit],
    *,
    directory: Path,
) -> None:
    """
    Judge the case, keep the record, and tell pytest: a failure with the whole report, or a skip with the reason.

    `directory` is the case's, in which a rank that was made to fail has left its trace.
    """
    if test.torchrun_worker is not None and test.torchrun_worker.rank > 0:
        test.skipTest("the first worker judges the case")
    observed = Observed(
        reports=reports,
        exits=exits,
        declared=test.description.declared(test.order.device),
        device=test.order.device,
        seconds=time.monotonic() - test.began,
    )
    record = _judged(test.case, observed, test.order.settings, directory)
    test.record = record
    if record.verdict in _NOT_JUDGED:
        test.skipTest(f"{record.verdict}: {record.reason}")
    if record.verdict is not Verdict.PASS:
        raise CaseFailed(record)


def _judged(case: Case, observed: Observed, settings: RunSettings, directory: Path) -> CaseRecord:
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


class CaseFailed(RequirementFailed):
    """A case whose verdict is a failure; the text is the whole report."""

    def __init__(self, record: CaseRecord) -> None:
        self.record = record
        super().__init__(record.findings)

    def __str__(self) -> str:
        from fsdp_conformance.report.terminal import render_record

        return render_record(self.record)
