"""Driving the implementation under test from a case's body: its adapters, and the trainings."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import fields, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fsdp_conformance.adapters.base import Adapter
from fsdp_conformance.cases.rank import CaseRank
from fsdp_conformance.cases.references import CaseReferences
from fsdp_conformance.checks.result import CheckResult
from fsdp_conformance.checks.streams import stream_safety
from fsdp_conformance.driver import session
from fsdp_conformance.driver.task import Conditions, Observer, World
from fsdp_conformance.errors import SuiteError
from fsdp_conformance.harness.rank import destroy_process_group
from fsdp_conformance.harness.recording import process_group
from fsdp_conformance.history.training import TrainingHistory
from fsdp_conformance.plan import Plan
from fsdp_conformance.workload.definition import Regime, Workload

if TYPE_CHECKING:
    from fsdp_conformance.faults.fault import Fault

#: The hooks of an observer, which a body names like other options of a training.
_OF_OBSERVER = frozenset(field.name for field in fields(Observer))
#: All functions of a body that a training calls.
HOOKS = _OF_OBSERVER | {"on_step"}


class CaseTraining:
    """
    The adapters of a case, and its trainings, on one rank.

    `declared` are the flags that the adapter has declared to the controller. `check` adds the result of a check to the
    report. `hazards` are the requirements that kinds of hazards violate in this case: see `checks.streams`.
    """

    def __init__(
        self,
        here: CaseRank,
        implementation: str,
        *,
        declared: frozenset[str],
        references: CaseReferences,
        new_directory: Callable[[], Path],
        check: Callable[[CheckResult], object],
        hazards: Mapping[str, str],
    ) -> None:
        self._here = here
        self._implementation = implementation
        self._declared = declared
        self._references = references
        self._new_directory = new_directory
        self._check = check
        self._hazards = hazards

    def subject(self) -> Adapter:
        """A new adapter of the implementation under test."""
        # Code under test enters the process only here.
        from fsdp_conformance.adapters import cuda_names, registry

        here = self._here
        with here.blaming("adapter"):
            adapter_type = registry.load(self._implementation)
            cuda_names.provide(adapter_type, here.device_type)
            adapter = adapter_type()
        # The controller has fixed what is declared: an adapter cannot declare one thing there and another one here.
        vars(adapter)["declared"] = lambda: self._declared
        # The code that this rank has loaded, not the code that the controller was told of.
        here.report.environment["adapter"] = registry.identity_of(adapter_type)
        here.subjects.append(adapter)
        return adapter

    def drop(self, adapter: Adapter) -> None:
        """Close an adapter that the case has finished with. The caller must hold no reference to its engine."""
        with process_group.log().phase("close"), self._here.blaming("implementation"):
            adapter.close()
        self._here.subjects.remove(adapter)

    def drop_all(self) -> None:
        """Close all adapters, and forget the references."""
        self._references.forget()
        for adapter in list(self._here.subjects):
            self.drop(adapter)

    def close(self) -> None:
        """Close all adapters after the goodbye."""
        with process_group.log().phase("close"):
            for adapter in self._here.subjects:
                adapter.close()
        self._here.subjects.clear()
        self._references.forget()

    def leave_peers(self) -> None:
        """
        End all communication of this rank, as a rank that has failed does, so that peers that wait for it notice.

        Engines are not closed, because that may communicate. The caller must hold no reference to one.
        """
        self._here.subjects.clear()
        destroy_process_group()

    def train(
        self,
        /,
        workload: Workload,
        plan: Plan | None = None,
        regime: Regime | None = None,
        *,
        faults: Sequence[Fault] = (),
        adapter: Adapter | None = None,
        **options: Any,
    ) -> TrainingHistory:
        """
        Train the workload through the adapter. Options are hooks of `driver.task.Observer`, fields of
        `driver.task.Conditions`, and `on_step`, which is called with a step before the hook `after_step`.

        Every fault must strike on the ranks that it names: one that does not has tested nothing. If the engine issued
        no collective that it could have struck, the report says so; otherwise raises SuiteError.
        """
        here = self._here
        plan = plan or here.plan(workload)
        observer, conditions = _split(options)

        def after_step(trained: Adapter, step: int) -> None:
            here.steps_trained += 1
            observer.after_step(trained, step)

        self._note_asked(workload, plan)
        with here.blaming("implementation"):
            run = session.train(
                adapter or CaseTraining.subject(self),
                workload,
                plan,
                regime or Regime(),
                World(rank=here.rank, size=here.world_size),
                replace(observer, after_step=after_step),
                Conditions(**{"new_directory": self._new_directory, **conditions, "faults": faults}),
            )
        self._require_strikes(faults, run)
        self._note_run(run)
        return run

    def _note_asked(self, workload: Workload, plan: Plan) -> None:
        """Note in the report which flags a training asks for."""
        flags = self._here.report.asked
        flags += sorted((plan.capabilities() | workload.capabilities) - set(flags))

    def _note_run(self, run: TrainingHistory) -> None:
        """Note in the report what belongs to every training."""
        report = self._here.report
        report.schedule += [record.line() for record in run.collectives]
        report.seconds["training"] = report.seconds.get("training", 0.0) + run.seconds
        if run.checked_accesses is not None:
            self._check(stream_safety(run, self._hazards))

    def training_beside(self, workload: Workload, plan: Plan, regime: Regime) -> AbstractContextManager[session.Steps]:
        """A second training, through a new adapter, whose steps are trained between those of another one."""
        here = self._here
        conditions = Conditions(new_directory=self._new_directory, beside=True)
        world = World(rank=here.rank, size=here.world_size)
        return session.training(CaseTraining.subject(self), workload, plan, regime, world, conditions=conditions)

    def _require_strikes(self, faults: Sequence[Fault], run: TrainingHistory) -> None:
        """Raise SuiteError for a fault that never struck; report one that had no collective to strike."""
        here = self._here
        unmet = {text: ops for fault in faults for text, ops in fault.unmet(here.rank, run.collectives).items()}
        if unknown := sorted(unmet.keys() - set(here.case.faults)):
            raise SuiteError(f"{'; '.join(unknown)} must be among the faults that the case declares [{here.case.id}]")
        here.report.unmet |= {text: sorted(ops) for text, ops in unmet.items()}
        silent = [text for fault in faults for text in fault.silent(here.rank) if text not in unmet]
        if silent:
            raise SuiteError(
                "; ".join(f"{text} never struck" for text in silent) + f" [{here.case.id}, rank {here.rank}]"
            )

    def train_without_waits(
        self, workload: Workload, plan: Plan | None, regime: Regime | None, **options: Any
    ) -> TrainingHistory:
        """One step of the same training on the simulated accelerator, with every wait dropped."""
        from fsdp_conformance.simulator import checker

        here = self._here
        observer, conditions = _split(options)
        with checker.without_waits(here.device.index), here.blaming("implementation"):
            return session.train(
                CaseTraining.subject(self),
                workload,
                plan or here.plan(workload),
                (regime or Regime()).undisturbed(steps=1),
                World(rank=here.rank, size=here.world_size),
                observer,
                Conditions(**{**conditions, "observe": False}),
            )


def _split(options: Mapping[str, Any]) -> tuple[Observer, dict[str, Any]]:
    """The hooks among the options of a training, and its conditions. A hook that is None is left out."""
    observer = Observer(**{name: hook for name, hook in options.items() if name in _OF_OBSERVER and hook is not None})
    conditions = {name: value for name, value in options.items() if name not in _OF_OBSERVER}
    on_step = conditions.pop("on_step", None)
    if on_step is None:
        return observer, conditions

    def after_step(adapter: Adapter, step: int) -> None:
        on_step(step)
        observer.after_step(adapter, step)

    return replace(observer, after_step=after_step), conditions
