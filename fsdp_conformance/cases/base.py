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

In a rank the class has five parts, which share a `CaseRank`. Most verbs of a body are calls of one of them:

    training         the implementation: its adapters, and the trainings
    case_references  the references of the case
    checks           comparisons, expectations, refusals
    worlds           fewer ranks for a while
    case_device      the device

`cases.controller` has the other half.
"""

from __future__ import annotations

import functools
import time
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import cached_property
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, ClassVar, Concatenate, ParamSpec, TypeVar

import torch.distributed as dist
from torch import nn

from fsdp_conformance import codec
from fsdp_conformance.adapters.base import Adapter
from fsdp_conformance.capability import CAPABILITIES
from fsdp_conformance.cases.checks import CaseChecks
from fsdp_conformance.cases.declaration import DeclaresCases
from fsdp_conformance.cases.default_methods import as_adapter_error
from fsdp_conformance.cases.device import CaseDevice
from fsdp_conformance.cases.observed import Observations, ObservedTraining, SilentChecks, comes_from_engine
from fsdp_conformance.cases.rank import CaseRank
from fsdp_conformance.cases.referee import OF_SUITE, RefereeTraining, Replay
from fsdp_conformance.cases.references import CaseReferences
from fsdp_conformance.cases.refusal import ReportedError
from fsdp_conformance.cases.training import CaseTraining
from fsdp_conformance.cases.worlds import CaseWorlds
from fsdp_conformance.checks.memory import Activations
from fsdp_conformance.checks.streams import same_undisturbed, stream_control
from fsdp_conformance.contract.case import Case, case_of
from fsdp_conformance.errors import ConformanceError, SuiteError, Unsupported
from fsdp_conformance.harness import context, devices
from fsdp_conformance.harness.accounting import Part
from fsdp_conformance.harness.deadlines import Deadlines
from fsdp_conformance.harness.environment import Determinism
from fsdp_conformance.harness.observations import (
    ObservationLog,
    ObservationReader,
    ObservationsEnded,
    decisions_directory,
    note_ended,
)
from fsdp_conformance.harness.order import CaseOrder, FirstGroup, Refereed, Role
from fsdp_conformance.harness.rank_startup import make_first_group
from fsdp_conformance.harness.recording import process_group
from fsdp_conformance.harness.simulated_ranks import scheduler
from fsdp_conformance.harness.testcase import ShardedTrainingTestCase
from fsdp_conformance.history.training import TrainingHistory
from fsdp_conformance.outcome.records import CaseRecord, RankError, RankExit, RankReport
from fsdp_conformance.plan import Plan
from fsdp_conformance.references.reference_set import Kind, References
from fsdp_conformance.run_settings import RunOrder, order_from_json
from fsdp_conformance.workload.definition import Regime, Workload, every_point
from fsdp_conformance.workload.events import Action

if TYPE_CHECKING:
    from fsdp_conformance.adapters.registry import AdapterDescription
    from fsdp_conformance.cases.controller import Admission, Referee
    from fsdp_conformance.cases.stress import Stress

P = ParamSpec("P")
R = TypeVar("R")

#: The flag that any plan on the CPU asks for.
_CPU_COMPUTE = "cpu_compute"


def _of(part: str, verb: Callable[Concatenate[Any, P], R]) -> Callable[Concatenate[ConformanceTestCase, P], R]:
    """A method of the base class that calls the method of the same name of one of its parts."""

    @functools.wraps(verb)
    def call(self: ConformanceTestCase, /, *args: P.args, **options: P.kwargs) -> R:
        method: Callable[P, R] = getattr(getattr(self, part), verb.__name__)
        return method(*args, **options)

    return call


class ConformanceTestCase(DeclaresCases, ShardedTrainingTestCase):
    """
    The base class of every case.

    In the controller, `record` holds the verdict once the test method has returned or raised. In a rank, `report`
    collects the findings of the body.
    """

    first_part = Part.SUITE
    shares_references: bool = True
    """True if the references may come from the store."""
    hazard_requirements: Mapping[str, str] = MappingProxyType({})
    """Kinds of hazards (and "parameters") that violate a different requirement in this case: see `checks.streams`."""
    checks_type: ClassVar[type[CaseChecks]] = CaseChecks

    record: CaseRecord | None = None
    referee: Referee | None = None
    """In the controller: the referee of the case, if it has one."""
    began: float = 0.0
    """In the controller: when the ranks were started, on the monotonic clock."""
    _stress: Stress | None = None

    @cached_property
    def order(self) -> RunOrder:
        """The order of the run, as the controller handed it to the ranks; `device` is that of this case."""
        return order_from_json(self.launch_payload)

    @cached_property
    def description(self) -> AdapterDescription:
        """The adapter's description."""
        from fsdp_conformance.adapters import registry

        return codec.typed(registry.AdapterDescription, self.order.description or {})

    @property
    def case(self) -> Case:
        """The case that the test method is bound to. Raises SuiteError for a method that is not a case."""
        case = case_of(getattr(type(self), self._testMethodName))
        if case is None:
            raise SuiteError(f"{self._testMethodName} is not a case: decorate it with conformance_case")
        return case

    @property
    def world_size(self) -> int:
        """The world size of the case, or in a rank that of the current world, which may be smaller."""
        here: CaseRank | None = vars(self).get("here")
        return self.case.world_size if here is None else here.world_size

    def take_over_order(self) -> None:
        """Apply what the controller and the ranks must agree on."""
        self.device_type = self.order.device
        self.case_timeout_s = self.case.timeout_s
        self.deadline_scale = self.order.settings.deadline_scale

    # --- the controller ----------------------------------------------------------------------------------------------

    def setUp(self) -> None:
        from fsdp_conformance.cases import controller

        super().setUp()
        admission = controller.admission(self.case, shares_references=self.shares_references)
        if isinstance(admission, CaseRecord):
            self.record = admission
            controller.tell_pytest(admission)
        else:
            self._adopt(admission)
            self._spawn_processes()

    def _adopt(self, admission: Admission) -> None:
        """Set up the launch of the ranks."""
        settings, description = admission.order.settings, admission.description
        self.launch_payload = admission.order.to_json()
        self.take_over_order()
        self.reuse_ranks = settings.reuse_ranks
        self.share_devices = settings.share_devices
        self.slots_per_device = settings.slots_per_device
        # --backend is for the run's device; a case may be sent to the simulated one.
        self.first_group = FirstGroup(only=settings.backend if self.device_type == settings.device else "")
        self.simulated_ranks = settings.ranks == "simulated"
        self.torchrun_worker = admission.worker
        self.determinism = Determinism(seed=settings.seed, num_threads=settings.num_threads)
        self.preload = description.preload
        self.rank_environment = dict(description.environment)
        self.preload_environment = dict(description.environment)
        # Compiling the simulated accelerator, which is over now, does not count as the case's time.
        self.began = time.monotonic()

    def _case_order(self) -> CaseOrder:
        """The order for the ranks. If they have a referee, it is started first."""
        from fsdp_conformance.cases import controller

        order = super()._case_order()
        self.referee = controller.referee_of(self.case, order)
        if self.referee is None:
            return order
        self.addCleanup(self.referee.close)
        return self.referee.observed

    def conclude(self, reports: Sequence[RankReport | None], exits: Sequence[RankExit]) -> None:
        """Judge the case, keep the record, and tell pytest."""
        from fsdp_conformance.cases import controller

        if self.torchrun_worker is not None and self.torchrun_worker.rank > 0:
            self.skipTest("the first worker judges the case")
        self.record = controller.judged(
            self.case,
            reports if self.referee is None else self.referee.judged(reports),
            exits,
            order=self.order,
            declared=self.description.declared(self.order.device),
            seconds=time.monotonic() - self.began,
            directory=Path(self._directory.name),
        )
        self.record.refereed = self.referee is not None
        self.record.adapter = self.description.identity
        controller.tell_pytest(self.record)

    @property
    def deadlines(self) -> Deadlines:
        """
        The deadlines of the case.

        Peers of a rank that was made to fail may wait for it as long as a collective may take.
        """
        usual = super().deadlines
        return replace(usual, grace_s=usual.collective_s) if self.order.settings.stress_failure else usual

    # --- a rank ------------------------------------------------------------------------------------------------------

    @cached_property
    def here(self) -> CaseRank:
        """This rank, as the parts of the case share it."""
        return CaseRank(
            case=self.case,
            rank=self.rank,
            world_size=self.case.world_size,
            device_type=self.device_type,
            local_rank=self.local_rank,
            declared=self.description.declared(self.device_type),
            report=self.report,
        )

    @cached_property
    def case_references(self) -> CaseReferences:
        """The references that the case has trained or read."""
        return CaseReferences(self.here, self.order.references if self.role is Role.REFEREE else None)

    @cached_property
    def training(self) -> CaseTraining:
        """The implementation under test."""
        options: dict[str, Any] = {
            "declared": frozenset(self.description.capabilities),
            "references": self.case_references,
            "new_directory": self._new_directory,
            "check": self.check,
            "hazards": self.hazard_requirements,
        }
        name = self.order.settings.implementation
        if self.role is Role.REFEREE:
            return RefereeTraining(self.here, name, self._replay, **options)
        if self.role is Role.OBSERVED:
            return ObservedTraining(self.here, name, self._observations, **options)
        return CaseTraining(self.here, name, **options)

    @property
    def role(self) -> Role:
        """The part of this process in the judgement of the case."""
        return context.running().order.case.role

    @cached_property
    def _observations(self) -> Observations:
        """On an observed rank: sends what the body sees to the referee."""
        refereed = self._refereed
        log = ObservationLog(refereed.directory, self.rank, refereed.nonce)
        return Observations(log, self.here, self.describe_error)

    @cached_property
    def _replay(self) -> Replay:
        """In the referee: what the rank has sent."""
        refereed, deadline_s = self._refereed, context.running().order.case.goodbye_timeout_s
        # The ranks of a referee take turns: one that waits for the engine must not keep the others.
        pause = scheduler.running().pause
        reader = ObservationReader(refereed.directory, self.rank, refereed.nonce, deadline_s=deadline_s, pause=pause)
        return Replay(reader, self.here)

    @cached_property
    def _decisions(self) -> ObservationLog:
        """In the referee: sends decisions to the rank."""
        return ObservationLog(decisions_directory(self._refereed.directory), self.rank, self._refereed.nonce)

    @cached_property
    def _instructions(self) -> ObservationReader:
        """On an observed rank: reads the referee's decisions."""
        refereed, deadline_s = self._refereed, context.running().order.case.goodbye_timeout_s
        return ObservationReader(
            decisions_directory(refereed.directory), self.rank, refereed.nonce, deadline_s=deadline_s
        )

    @property
    def _refereed(self) -> Refereed:
        refereed = context.running().order.case.refereed
        if refereed is None:
            raise SuiteError(f"the ranks judge this case alone [{self.case.id}]")
        return refereed

    def observe(self, name: str, look: Callable[[], R]) -> R:
        """
        Look at something that only the engine's process has: its memory, a live module, the log of collectives.

        Returns the result of `look`. A referee runs the body as well, and gets the same result there. It must be data:
        see `history.transfer`.
        """
        if self.role is Role.REFEREE:
            value: R = self._replay.result(name)
            return value
        return self._observations.of(name, look) if self.role is Role.OBSERVED else look()

    @contextmanager
    def catching_warnings(self) -> Iterator[Callable[[], list[str]]]:
        """
        A context that shows no warning. Yields a function that returns the texts of those so far, wherever the body
        runs: the referee, where no engine is, would otherwise see none.

        Python catches warnings for all threads at once, so the case needs ranks that are processes.
        """
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            yield lambda: self.observe("warnings", lambda: [str(warning.message) for warning in caught])

    def with_module(self, act: Callable[[nn.Module], object]) -> Callable[..., None]:
        """A hook of a training that does something with the module that user code sees, where the engine is."""

        def hook(adapter: Adapter, *step: int) -> None:
            def look() -> None:
                act(adapter.module())

            self.observe("the module", look)

        return hook

    def decide(self, name: str, choose: Callable[[], R]) -> R:
        """
        Let the referee choose, if there is one: for a choice that takes references.

        Returns the result of `choose`, which must be data. The rank waits for it. Raises SuiteError if the referee has
        decided something else.
        """
        if self.role is Role.OBSERVED:
            _, content = self._instructions.next()
            if content.get("name") != name:
                raise SuiteError(f"the referee must decide {name!r}, got {content.get('name')!r} [{self.case.id}]")
            value: R = content["value"]
            return value
        value = choose()
        if self.role is Role.REFEREE:
            self._decisions.send("decided", name=name, value=value)
        return value

    @property
    def judges(self) -> bool:
        """False on a rank that a referee judges: references and comparisons are of no use there."""
        return self.role is not Role.OBSERVED

    def finish_body(self) -> None:
        if self.role is Role.OBSERVED:
            self._observations.finish()
        elif self.role is Role.REFEREE:
            self._replay.finish()

    def leave_body(self) -> None:
        if self.role is Role.REFEREE:
            # A rank that waits for a decision of a referee that has failed must not wait until its deadline.
            note_ended(decisions_directory(self._refereed.directory), self.rank)

    @cached_property
    def checks(self) -> CaseChecks:
        """The checks of the body."""
        kind = SilentChecks if self.role is Role.OBSERVED else self.checks_type
        return kind(self.here, references=self.references, examine=self.examine, observe=self.observe)

    @cached_property
    def worlds(self) -> CaseWorlds:
        """The worlds that the ranks of the case form."""
        return CaseWorlds(self.here, close_everything=self.training.drop_all)

    @cached_property
    def case_device(self) -> CaseDevice:
        """The device of this rank."""
        return CaseDevice(self.here, has_engine=self.role is not Role.REFEREE)

    def init_rank(self) -> None:
        self.take_over_order()
        super().init_rank()
        run = context.running()
        if not run.has_group:
            began = time.monotonic()
            make_first_group(run.order, self.device)
            self.report.seconds["group"] = time.monotonic() - began
        process_group.log().clear()
        self._provoke(run.order.case.directory)
        self._refuse_the_cpu()

    def _refuse_the_cpu(self) -> None:
        """
        Raise Unsupported on the CPU for an engine that runs only on accelerators.

        Its adapter refuses each plan, but a case that is about an exception would take that one for the engine's.
        """
        is_component = any(CAPABILITIES[flag].area == "components" for flag in self.case.needs)
        if self.device_type == "cpu" and not (is_component or self.declares(_CPU_COMPUTE)):
            self.report.asked.append(_CPU_COMPUTE)
            name = self.subject().display_name()
            raise Unsupported(_CPU_COMPUTE, f"the case runs on the CPU, and {name} does not declare it")

    def _provoke(self, directory: Path) -> None:
        """In a stress run, provoke the code under test from now on."""
        if self.order.settings.stress_seed is not None:
            from fsdp_conformance.cases.stress import Stress

            self._stress = Stress(self.here, self.order.settings, directory)
            self._stress.install()

    def shutdown_rank(self) -> None:
        if self._stress is not None:
            self._stress.remove()
        self.training.close()
        super().shutdown_rank()

    def describe_error(self, error: BaseException) -> RankError:
        """An exception of the body, with the part whose code raised it."""
        if isinstance(error, ReportedError):
            return error.described
        described = super().describe_error(error)
        if isinstance(error, ObservationsEnded):
            return replace(described, blame=self.here.blame or "suite")
        if self.role is Role.OBSERVED and isinstance(error, OF_SUITE) and comes_from_engine(error):
            # Code under test says nothing about the suite or the machine.
            return replace(described, blame="adapter" if self.here.blame == "adapter" else "implementation")
        if self.role is not Role.REFEREE and self.here.blame == "implementation":
            name = self.here.subjects[-1].display_name() if self.here.subjects else "the adapter"
            adapter_error = as_adapter_error(error, declares=self.declares, adapter=name)
            if adapter_error is not None:
                described_adapter_error = super().describe_error(adapter_error)
                return replace(described_adapter_error, traceback=described.traceback, time=described.time)
        if isinstance(error, ConformanceError):
            return described
        # An exception between two calls of the implementation is the suite's fault, and so is any of the referee's own.
        if self.role is Role.REFEREE:
            return replace(described, blame="suite")
        return replace(described, blame=self.here.blame or "suite")

    def examine(self, error: BaseException) -> None:
        """Let a person who debugs this rank look at an exception that the case has caught (`RankRun.examine`)."""

    # --- the verbs of a body: the implementation ---------------------------------------------------------------------

    subject = _of("training", CaseTraining.subject)
    train = _of("training", CaseTraining.train)
    training_beside = _of("training", CaseTraining.training_beside)
    drop = _of("training", CaseTraining.drop)
    leave_peers = _of("training", CaseTraining.leave_peers)
    declares = _of("here", CaseRank.declares)
    plan = _of("here", CaseRank.plan)
    blaming = _of("here", CaseRank.blaming)
    note_refusal = _of("here", CaseRank.note_refusal)

    @property
    def subjects(self) -> list[Adapter]:
        """Adapters that are open."""
        return self.here.subjects

    @property
    def alignment(self) -> int:
        """Bytes to which the implementation aligns each parameter."""
        return self.description.alignment

    @property
    def padding(self) -> float:
        """The overhead on the wire that the implementation declares, as a fraction."""
        return self.description.padding

    @property
    def kept_buffers(self) -> int:
        """The bytes that the implementation declares to keep in buffers, as a multiple of the largest unit."""
        return self.description.kept_buffers

    def unit_parameters(self, workload: Workload, unit: str) -> tuple[str, ...]:
        """FQNs of the parameters under a submodule."""
        module: nn.Module = workload.build(self.rank).get_submodule(unit)
        return tuple(f"{unit}.{name}" for name, _ in module.named_parameters())

    # --- references --------------------------------------------------------------------------------------------------

    def references(self, workload: Workload, regime: Regime | None = None) -> References:
        """The references for the workload, in agreement. Collective, once per workload and regime."""
        return self.case_references.of(workload, regime)

    @property
    def reference_device(self) -> str:
        """The device that references are trained on."""
        return self.here.reference_device

    plain_history = _of("checks", CaseChecks.plain_history)
    ddp_history = _of("checks", CaseChecks.ddp_history)

    # --- checks ------------------------------------------------------------------------------------------------------

    check = _of("checks", CaseChecks.check)
    check_parity = _of("checks", CaseChecks.check_parity)
    check_rounding = _of("checks", CaseChecks.check_rounding)
    check_equal = _of("checks", CaseChecks.check_equal)
    check_bitwise = _of("checks", CaseChecks.check_bitwise)
    check_same_on_every_rank = _of("checks", CaseChecks.check_same_on_every_rank)
    check_same_schedule = _of("checks", CaseChecks.check_same_schedule)
    check_digests = _of("checks", CaseChecks.check_digests)
    check_devices = _of("checks", CaseChecks.check_devices)
    check_resharded = _of("checks", CaseChecks.check_resharded)
    check_released = _of("checks", CaseChecks.check_released)
    check_flags = _of("checks", CaseChecks.check_flags)
    leave_unobserved = _of("checks", CaseChecks.leave_unobserved)
    expect = _of("checks", CaseChecks.expect)
    expect_equal = _of("checks", CaseChecks.expect_equal)
    refusal = _of("checks", CaseChecks.refusal)

    # --- worlds and the device ---------------------------------------------------------------------------------------

    in_world = _of("worlds", CaseWorlds.in_world)
    _new_directory = _of("worlds", CaseWorlds.shared_directory)
    placed = _of("case_device", CaseDevice.placed)
    another_device = _of("case_device", CaseDevice.another_device)
    no_garbage_collection = _of("case_device", CaseDevice.no_garbage_collection)
    poisoned_allocations = _of("case_device", CaseDevice.poisoned_allocations)

    def allocated_bytes(self) -> int:
        """Bytes allocated on this rank's accelerator now."""
        return self.observe("allocated bytes", self.case_device.allocated_bytes)

    def allocated_bytes_without_backend(self, expected: int) -> int:
        """The same without the bytes that the process group still holds: see `CaseDevice`. Collective."""
        return self.observe("allocated bytes", lambda: self.case_device.allocated_bytes_without_backend(expected))

    def activations(self, workload: Workload) -> Activations:
        """Bytes that one forward of the unwrapped model takes on this rank's device, beyond its parameters."""
        return self.observe("activations", lambda: self.case_device.activations(workload))

    def shared_directory(self) -> Path:
        """
        A new directory that every rank sees and that goes away with the case. Collective.

        Its files are read and written inside `observe`: a referee runs the body later than the ranks, and would write a
        file again that they read meanwhile. It gets a directory that does not exist.
        """
        directory = self.observe("shared directory", self._new_directory)
        return directory / "not for a referee" if self.role is Role.REFEREE else directory

    def total(self, figures: Mapping[str, int]) -> dict[str, int]:
        """The sums of figures over all ranks. Collective, where checks are made; elsewhere the figures themselves."""
        if not self.judges:
            return dict(figures)
        figures_by_rank: list[Mapping[str, int]] = [{}] * self.world_size
        with process_group.log().phase("observe"), self.blaming("suite"):
            dist.all_gather_object(figures_by_rank, dict(figures))
        return {name: sum(of_rank.get(name, 0) for of_rank in figures_by_rank) for name in figures}

    # --- verbs that train and check ----------------------------------------------------------------------------------

    def check_every_point(
        self,
        workload: Workload,
        regime: Regime,
        action: Action,
        *,
        requirement: str,
        runs: int | None = None,
        pending: bool | None = None,
        **fields: Any,
    ) -> None:
        """
        Train with the action at every point of a step at which it is legal, in as many runs as `workload.every_point`
        makes of it, and compare everything with the references. Findings name the points.
        """
        for points, disturbed in every_point(regime, action, runs=runs, pending=pending, **fields):
            adapter, before = self.subject(), len(self.report.findings)
            run = self.train(workload, None, disturbed, adapter=adapter)
            self.check_parity(run, workload, disturbed, requirements=dict.fromkeys(Kind, requirement))
            self.drop(adapter)
            self.report.findings[before:] = [
                replace(finding, message=f"{finding.message}; in each step, {points}")
                for finding in self.report.findings[before:]
            ]

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
            other_options = {name: value for name, value in options.items() if name not in ("faults", "adapter")}
            self.check(stream_control(self.training.train_without_waits(workload, plan, regime, **other_options)))
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
        other_options = {name: value for name, value in options.items() if name != "adapter"}
        undisturbed = self.train(workload, plan, regime, undisturbed=True, **other_options)
        self.check(same_undisturbed(run, undisturbed, self.case.requirements[0]))
