"""
The base class of conformance cases: the controller gates, launches and judges; the body runs in every rank.

    class Parity(ConformanceTestCase):
        @conformance_case("R001", "R002", "R003", chapter="A", axes={"world_size": (2, 3, 4)}, kills=("no-reduction",))
        def test_exact_probe(self, world_size):
            '''Losses, gradients and parameters equal DDP's, bit for bit.'''
            workload = probes.exact_mlp()
            run = self.train(workload)
            self.check_parity(run, workload)

The body reaches an implementation only through its adapter: `self.train(...)`, or `self.subject()` for cases that drive
it by hand. Checks add findings to the rank's report instead of raising at the first one, so that a report shows the
whole extent of a failure.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import cached_property
from pathlib import Path
from typing import Any

from fsdp_conformance import run_settings
from fsdp_conformance.adapters import cuda_names, registry
from fsdp_conformance.adapters.base import Adapter
from fsdp_conformance.adapters.registry import AdapterDescription
from fsdp_conformance.capability import CAPABILITIES
from fsdp_conformance.cases.checks import CaseChecks
from fsdp_conformance.cases.declaration import DeclaresCases
from fsdp_conformance.cases.references import CaseReferences
from fsdp_conformance.cases.worlds import CaseWorlds
from fsdp_conformance.checks.streams import same_undisturbed, stream_control, stream_safety
from fsdp_conformance.contract.case import Case, case_of
from fsdp_conformance.contract.fingerprint import suite_sha256
from fsdp_conformance.contract.gate import Gated, gate
from fsdp_conformance.driver import session
from fsdp_conformance.errors import ConformanceError, RequirementFailed, SuiteError, Unsupported
from fsdp_conformance.faults.failure import FailingRank
from fsdp_conformance.faults.fault import Fault
from fsdp_conformance.faults.provocation import Provoked
from fsdp_conformance.harness import context, devices
from fsdp_conformance.harness.accounting import Part
from fsdp_conformance.harness.deadlines import Deadlines
from fsdp_conformance.harness.environment import Determinism
from fsdp_conformance.harness.order import FirstGroup
from fsdp_conformance.harness.processes.stacks import is_alive
from fsdp_conformance.harness.rank_startup import make_first_group
from fsdp_conformance.harness.recording import process_group
from fsdp_conformance.harness.testcase import ShardedTrainingTestCase
from fsdp_conformance.history.training import TrainingHistory
from fsdp_conformance.judge import SWALLOWED, drilled, judge, keep_evidence
from fsdp_conformance.outcome.records import CaseRecord, RankError, RankExit, RankReport
from fsdp_conformance.plan import SIMULATED, InitMode, Plan
from fsdp_conformance.references.sharing import offered
from fsdp_conformance.run_settings import SHARED_DEVICES, RunOrder, RunSettings, TorchrunWorker, order_from_json
from fsdp_conformance.simulator import place
from fsdp_conformance.simulator.build import cache_directory
from fsdp_conformance.stress import MEASUREMENT, failure_of
from fsdp_conformance.verdict import Verdict
from fsdp_conformance.workload.definition import Regime, Workload

#: What any plan on the CPU asks for.
_CPU_COMPUTE = "cpu_compute"

#: Verdicts that pytest shows as skips with a reason; the run file tells them apart.
_NOT_JUDGED = frozenset({Verdict.UNSUPPORTED, Verdict.NOT_RUN_ENV, Verdict.DISABLED})


class ConformanceTestCase(DeclaresCases, CaseReferences, CaseChecks, CaseWorlds, ShardedTrainingTestCase):
    """
    The base class of every case.

    In the controller, `record` holds the verdict once the test method has returned or raised. In a rank, `report`
    collects what the body finds.
    """

    first_part = Part.SUITE
    shares_references: bool = True
    """Whether the references may come from the store."""

    record: CaseRecord | None = None
    _provoked: Provoked | None = None
    _failing: FailingRank | None = None
    _blame: str | None = None
    """In a rank: the part whose code runs; None for our own."""

    @cached_property
    def order(self) -> RunOrder:
        """What the run was asked for, as the controller handed it to the ranks; `device` is that of this case."""
        return order_from_json(self.launch_payload)

    @property
    def reference_offer(self) -> Mapping[str, Any] | None:
        """The store of references, as the controller offers it; None if this case shares none."""
        return self.order.references

    @cached_property
    def description(self) -> AdapterDescription:
        """The adapter's description."""
        return registry.description_from_json(self.order.description or {})

    # --- the controller ----------------------------------------------------------------------------------------------

    @property
    def case(self) -> Case:
        """The case that the test method is bound to."""
        found = case_of(getattr(type(self), self._testMethodName))
        if found is None:
            raise SuiteError(f"{self._testMethodName} is not a case: decorate it with conformance_case")
        return found

    @property
    def world_size(self) -> int:
        """That of the case, whatever the machine offers, or of the smaller world that a rank is in."""
        return self._smaller_world or self.case.world_size

    def setUp(self) -> None:
        super().setUp()
        settings = run_settings.current()
        worker = TorchrunWorker.from_environment(os.environ) if settings.ranks == "torchrun" else None
        if worker is not None:
            settings = replace(settings, num_workers=worker.world_size)
        self._began = time.monotonic()
        description = registry.describe_once(settings.implementation)
        gated = self._gated(description, settings)
        if gated.record is not None:
            self.record = gated.record
            self.skipTest(f"{gated.record.verdict}: {gated.record.reason}")
        order = RunOrder(
            settings=settings,
            description=description.to_json(),
            device=gated.device,
            references=self._offered_references(settings, gated.device),
        )
        self.launch_payload = order.to_json()
        self._take_over_order()
        self.reuse_ranks = settings.reuse_ranks
        self.share_devices = settings.share_devices
        self.slots_per_device = settings.slots_per_device
        # --backend is for the run's device; a case may be sent to the simulated one.
        self.first_group = FirstGroup(only=settings.backend if gated.device == settings.device else "")
        self.simulated_ranks = settings.ranks == "simulated"
        self.torchrun_worker = worker
        self.determinism = Determinism(seed=settings.seed, num_threads=settings.num_threads)
        self.preload = description.preload
        self.rank_environment = dict(description.environment)
        self.preload_environment = dict(description.environment)
        # Compiling the simulated accelerator does not count as the case's time.
        self._began = time.monotonic()
        self._spawn_processes()

    def _gated(self, description: AdapterDescription, settings: RunSettings) -> Gated:
        """The device of the case, or why it does not run. The first simulated case may wait for a compiler."""
        gated = gate(self.case, declared=description.declared, settings=settings, places=place.places(settings))
        if gated.record is None and gated.device == SIMULATED and place.build_problem():
            gated = gate(self.case, declared=description.declared, settings=settings, places=place.places(settings))
        return gated

    def _offered_references(self, settings: RunSettings, device: str) -> dict[str, Any] | None:
        """
        The store of references, where they depend on nothing that the store's keys leave out.

        They do on other devices than the CPU, on ranks that have run other cases, on simulated ones, on other hosts,
        and under stress.
        """
        usual = settings.ranks == "processes" and not settings.reuse_ranks and settings.stress_seed is None
        if not (self.shares_references and usual and device == "cpu"):
            return None
        offer = offered(suite_sha256(), cache_directory(), run=settings.report_dir)
        return None if offer is None else offer.to_json()

    def _take_over_order(self) -> None:
        """Apply what the controller and the ranks must agree on."""
        self.device_type = self.order.device
        self.case_timeout_s = self.case.timeout_s
        self.deadline_scale = self.order.settings.deadline_scale

    def conclude(self, reports: Sequence[RankReport | None], exits: Sequence[RankExit]) -> None:
        """
        Judge the case, keep the record, and tell pytest: a failure with the whole report, or a skip with the reason.
        """
        if self.torchrun_worker is not None and self.torchrun_worker.rank > 0:
            self.skipTest("the first worker judges the case")
        settings = self.order.settings
        self.record = judge(
            self.case,
            declared=self.description.declared(self.order.device),
            reports=reports,
            exits=exits,
            implementation=settings.implementation,
            device=self.order.device,
            ranks=_ranks_of(settings),
            backend=settings.backend,
            stress_seed=settings.stress_seed,
            stress_failure=settings.stress_failure,
            seconds=time.monotonic() - self._began,
        )
        keep_evidence(self.record, reports)
        failing = self._failing_rank()
        if failing is not None:
            struck = self._failure_trace(Path(self._directory.name))
            self.record = drilled(
                self.record,
                failing.failure,
                rank=min(failing.ranks or ()),
                where=struck.read_text(encoding="utf-8") if struck.exists() else "",
                reports=reports,
                exits=exits,
                alive=[end.rank for end in exits if end.pid is not None and is_alive(end.pid)],
            )
        if self.record.verdict in _NOT_JUDGED:
            self.skipTest(f"{self.record.verdict}: {self.record.reason}")
        if self.record.verdict is not Verdict.PASS:
            raise CaseFailed(self.record)

    @property
    def deadlines(self) -> Deadlines:
        """Those of the case. Peers of a rank that was made to fail may wait for it as long as a collective may take."""
        usual = super().deadlines
        return replace(usual, grace_s=usual.collective_s) if self.order.settings.stress_failure else usual

    def _failing_rank(self, directory: Path | None = None) -> FailingRank | None:
        """The rank that is made to fail, if the run asks for that. It leaves its trace in the directory of the case."""
        settings, case = self.order.settings, self.case
        if settings.stress_seed is None or not settings.stress_failure:
            return None
        failure = failure_of(settings.stress_failure, settings.stress_seed, case.id)
        trace = self._failure_trace(directory or Path(self._directory.name))
        return FailingRank(failure, settings.stress_seed, case.id, world_size=case.world_size, trace=trace)

    @staticmethod
    def _failure_trace(directory: Path) -> Path:
        return directory / "stress-failure"

    # --- a rank ------------------------------------------------------------------------------------------------------

    def init_rank(self) -> None:
        self._take_over_order()
        self.subjects = []
        self.trained_references = {}
        super().init_rank()
        run = context.running()
        if not run.has_group:
            began = time.monotonic()
            make_first_group(run.order, self.device)
            self.report.seconds["group"] = time.monotonic() - began
        process_group.log().clear()
        self._provoke()
        self._refuse_the_cpu()

    def _refuse_the_cpu(self) -> None:
        """
        Raise Unsupported on the CPU for an engine that runs only on accelerators.

        Its adapter refuses each plan, but a case that is about an exception would take that one for the engine's.
        """
        on_its_own = any(CAPABILITIES[flag].area == "components" for flag in self.case.needs)
        if self.device_type == "cpu" and not (on_its_own or self.declares(_CPU_COMPUTE)):
            self.report.asked.append(_CPU_COMPUTE)
            named = self.subject().display_name()
            raise Unsupported(_CPU_COMPUTE, f"the case runs on the CPU, and {named} does not declare it")

    def _provoke(self) -> None:
        """In a stress run, provoke the code under test from now on."""
        self._provoked, self._failing = None, None
        seed = self.order.settings.stress_seed
        if seed is not None:
            self._provoked = Provoked(seed, self.case.id, rank=self.rank, world_size=self.world_size)
            self._provoked.install()
            # The counts go on until the report is sent.
            self.report.measurements[MEASUREMENT] = self._provoked.strikes
        self._failing = self._failing_rank(context.running().order.case.directory)
        if self._failing is not None:
            self._failing.install()

    def shutdown_rank(self) -> None:
        for fault in (self._failing, self._provoked):
            if fault is not None:
                fault.remove()
        with process_group.log().phase("close"):
            for adapter in self.subjects:
                adapter.close()
        self.subjects.clear()
        self.trained_references.clear()
        super().shutdown_rank()

    def describe_error(self, error: BaseException) -> RankError:
        """An exception of the body, with the part whose code raised it."""
        described = super().describe_error(error)
        ours = isinstance(error, ConformanceError)
        if ours:
            return described
        # An exception between two calls of the implementation is the suite's fault.
        return replace(described, blame=self._blame or "suite")

    @contextmanager
    def blaming(self, part: str) -> Iterator[None]:
        """Blame exceptions inside the block, and its time, on a part: implementation, adapter or suite."""
        before, self._blame = self._blame, part
        with context.working(Part.SUITE if part == "suite" else Part.ENGINE):
            yield
        # Not after an exception: `describe_error` then needs to know the part.
        self._blame = before

    def note_refusal(self) -> None:
        """An exception was taken as a refusal: no part is to blame."""
        self._blame = None
        if self._failing is not None and self._failing.fired:
            self.report.measurements[SWALLOWED] = True

    # Driving the implementation.

    def subject(self) -> Adapter:
        """A new adapter of the implementation under test."""
        self.engine_entered = True
        with self.blaming("adapter"):
            chosen = registry.load(self.order.settings.implementation)
            cuda_names.provide(chosen, self.device_type)
            adapter = chosen()
        # What a rank has loaded, not what the controller was told.
        self.report.environment["adapter"] = registry.source_sha256(type(adapter))
        self.subjects.append(adapter)
        return adapter

    def declares(self, flag: str) -> bool:
        """Whether the implementation declares the capability."""
        return flag in self.description.declared(self.device_type)

    @property
    def padding(self) -> float:
        """The overhead on the wire that the implementation declares, as a fraction."""
        return self.description.padding

    def plan(self, workload: Workload, **changes: Any) -> Plan:
        """A plan for the workload on the case's device, with `changes`."""
        # A CPU model stays where it is; for other devices it is moved before wrapping, if the engine supports that.
        moved = self.device_type != "cpu" and self.declares("init_before")
        defaults: dict[str, Any] = {
            "device": self.device_type,
            "init_mode": InitMode.BEFORE if moved else InitMode.NEVER,
            "units": workload.units,
            "local_units": workload.local_units,
            "ignored": workload.ignored,
        }
        return Plan(**{**defaults, **changes})

    def train(
        self,
        workload: Workload,
        plan: Plan | None = None,
        regime: Regime | None = None,
        *,
        faults: Sequence[Fault] = (),
        adapter: Adapter | None = None,
        on_step: Callable[[int], object] | None = None,
        **options: Any,
    ) -> TrainingHistory:
        """
        Train the workload through the adapter. Options go to `driver.session.train`.

        Every fault must strike on the ranks that it names: one that does not has tested nothing. If the engine issued
        no collective that it could have struck, the report says so; otherwise raises SuiteError.
        """
        if adapter is None and not faults:
            self.before_engine(workload, regime)
        plan = plan or self.plan(workload)
        regime = regime or Regime()
        asked = plan.capabilities() | workload.capabilities

        def count_step(step: int) -> None:
            self.steps_trained += 1
            if on_step is not None:
                on_step(step)

        self.report.asked += sorted(asked - set(self.report.asked))
        with self.blaming("implementation"):
            run = session.train(
                adapter or self.subject(),
                workload,
                plan,
                regime,
                rank=self.rank,
                world_size=self.world_size,
                faults=faults,
                on_step=count_step,
                **{"new_directory": self.shared_directory, **options},
            )
        self.report.schedule += [record.line() for record in run.collectives]
        unmet = {text: ops for fault in faults for text, ops in fault.unmet(self.rank, run.collectives).items()}
        self.report.unmet |= {text: sorted(ops) for text, ops in unmet.items()}
        silent = [text for fault in faults for text in fault.silent(self.rank) if text not in unmet]
        if silent:
            raise SuiteError(
                "; ".join(f"{text} never struck" for text in silent) + f" [{self.case.id}, rank {self.rank}]"
            )
        self.report.seconds["training"] = self.report.seconds.get("training", 0.0) + run.seconds
        if run.checked_accesses is not None:
            self.check(stream_safety(run, self.hazard_requirements))
        return run

    def check_stream_safety(
        self, workload: Workload, plan: Plan | None = None, regime: Regime | None = None, **options: Any
    ) -> TrainingHistory:
        """
        Train with every memory access checked on the simulated accelerator, then show that the checker sees races.

        That control runs one step of the same configuration with every wait dropped: a checker that finds no race
        there would find none anywhere (SuiteError). On other devices this is the same as `train`.
        """
        run = self.train(workload, plan, regime, **options)
        if run.checked_accesses is not None:
            from fsdp_conformance.simulator import checker

            short = (regime or Regime()).undisturbed(steps=1)
            kept = {name: value for name, value in options.items() if name not in ("faults", "adapter")}
            with checker.without_waits(self.device.index), self.blaming("implementation"):
                control = session.train(
                    self.subject(),
                    workload,
                    plan or self.plan(workload),
                    short,
                    rank=self.rank,
                    world_size=self.world_size,
                    **{**kept, "observe": False},
                )
            self.check(stream_control(control))
        self.check_undisturbed(run, workload, plan, regime, **options)
        return run

    def check_undisturbed(
        self,
        run: TrainingHistory,
        workload: Workload,
        plan: Plan | None = None,
        regime: Regime | None = None,
        **options: Any,
    ) -> None:
        """
        On a real accelerator, train once more without waiting for the device until the end, and compare with `run`.

        There the loop waits after each step to read what is judged, which orders whatever an engine forgot to order.
        Elsewhere this does nothing: the CPU has no order to lose, and the simulated accelerator sees it in any run.
        """
        if not devices.is_scarce(self.device_type):
            return
        kept = {name: value for name, value in options.items() if name != "adapter"}
        undisturbed = self.train(workload, plan, regime, undisturbed=True, **kept)
        self.check(same_undisturbed(run, undisturbed, self.case.requirements[0]))


def _ranks_of(settings: RunSettings) -> str:
    """What a record says of its ranks."""
    if settings.reuse_ranks:
        return "reused"
    return SHARED_DEVICES if settings.share_devices else settings.ranks


class CaseFailed(RequirementFailed):
    """A case whose verdict is a failure; the text is the whole report."""

    def __init__(self, record: CaseRecord) -> None:
        self.record = record
        super().__init__(record.findings)

    def __str__(self) -> str:
        from fsdp_conformance.report.terminal import render_record

        return render_record(self.record)
