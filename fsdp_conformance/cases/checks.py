"""
The checks that a case's body calls: comparisons with the references, single expectations, refusals.

A mixin of `ConformanceTestCase`; everything here runs in a rank. Checks add findings to the rank's report; they do not
raise.
"""

from __future__ import annotations

import gc
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import replace
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from fsdp_conformance.adapters.base import Adapter
from fsdp_conformance.adapters.structures import moved
from fsdp_conformance.cases.refusal import Refusal, why_no_refusal
from fsdp_conformance.checks.equality import parameter_digests, schedule_digests
from fsdp_conformance.checks.memory import Activations
from fsdp_conformance.checks.parity import REQUIREMENTS, hidden_kinds, parity
from fsdp_conformance.checks.resharding import gathered_again, holds_whole_parameters
from fsdp_conformance.checks.result import CheckResult, comparison
from fsdp_conformance.checks.rounding import rounds_alike
from fsdp_conformance.driver.watch import watch_for
from fsdp_conformance.errors import EnvironmentUnavailable, RequirementFailed, SuiteError
from fsdp_conformance.harness.devices import device_count, use_device
from fsdp_conformance.harness.rank import destroy_process_group
from fsdp_conformance.harness.recording import process_group
from fsdp_conformance.history.training import TrainingHistory
from fsdp_conformance.outcome.records import CheckCount, Finding, RankReport
from fsdp_conformance.plan import SIMULATED, Plan
from fsdp_conformance.references.ddp import ddp_reference
from fsdp_conformance.references.reference_set import Kind, References
from fsdp_conformance.references.rounding import rounding_reference
from fsdp_conformance.references.single_process import single_process_reference
from fsdp_conformance.workload.definition import Batch, BatchKey, Regime, Workload, every_point
from fsdp_conformance.workload.events import Action

if TYPE_CHECKING:
    from fsdp_conformance.contract.case import Case


#: How often, and how many seconds apart, memory is counted that NCCL's watchdog may yet release: it wakes every 0.1 s.
_WATCHDOG_ROUNDS = 5
_WATCHDOG_PERIOD_S = 0.15

#: The capability flag with which an implementation shows values of a kind.
_SHOWN_BY = {Kind.GRADIENT: "full_grads", Kind.BUFFER: "full_buffers"}


class CaseChecks:
    """The checks of a case, on one rank."""

    rank: int
    report: RankReport
    device_type: str
    subjects: list[Adapter]
    """Adapters that are open."""
    steps_trained: int = 0
    """Optimizer steps since the last `refusal` began."""
    hazard_requirements: Mapping[str, str] = MappingProxyType({})
    """Kinds of hazards (and "parameters") that violate a different requirement in this case: see `checks.streams`."""

    if TYPE_CHECKING:

        @property
        def case(self) -> Case: ...

        @property
        def world_size(self) -> int: ...

        @property
        def device(self) -> torch.device: ...

        def declares(self, flag: str) -> bool: ...

        def subject(self) -> Adapter: ...

        def references(self, workload: Workload, regime: Regime | None = None) -> References: ...

        def train(
            self,
            workload: Workload,
            plan: Plan | None = None,
            regime: Regime | None = None,
            *,
            adapter: Adapter | None = None,
            **options: Any,
        ) -> TrainingHistory: ...

        def plan(self, workload: Workload, **changes: Any) -> Plan: ...

        def blaming(self, part: str) -> AbstractContextManager[None]: ...

        def note_refusal(self) -> None: ...

    def examine(self, error: BaseException) -> None:
        """Let somebody who debugs this rank look at an exception that the case has caught (`RankRun.examine`)."""

    @property
    def reference_device(self) -> str:
        """
        The device that references are trained on: this rank's kind, or the CPU for the simulated accelerator.

        The simulated operations are bitwise the CPU's, so such a reference is valid and independent of the simulation.
        """
        return "cpu" if self.device_type == SIMULATED else self.device_type

    def check(self, result: CheckResult) -> None:
        """Add a check's findings, counts and figures to the report."""
        result.into(self.report)

    def check_parity(
        self,
        run: TrainingHistory,
        workload: Workload,
        regime: Regime | None = None,
        *,
        requirement: str | None = None,
        requirements: Mapping[str, str] | None = None,
        none_or_zero: bool = False,
    ) -> None:
        """
        Compare losses, gradients, parameters, buffers and whatever else the regime produces with the references.

        `requirement` replaces the requirements of losses, gradients and parameters, `requirements` those of single
        kinds of comparison ("loss", "gradient", "parameter", "buffer", "norm", "eval", "output"). `none_or_zero` treats
        a gradient of zeros like a missing one, where the contract leaves the choice.

        If a kind that the case's own requirement is about cannot be seen, because the implementation does not declare
        to show it, the case does not pass: see `leave_unobserved`.
        """
        references = self.references(workload, regime)
        replaced = {} if requirement is None else dict.fromkeys(("loss", "gradient", "parameter"), requirement)
        replaced |= requirements or {}
        for result in parity(run, references, requirements=replaced, none_or_zero=none_or_zero):
            self.check(result)
        for kind in hidden_kinds(run, references):
            judged_for = replaced.get(kind, REQUIREMENTS[kind])
            if judged_for == self.case.requirements[0] and kind in _SHOWN_BY:
                self.leave_unobserved(_SHOWN_BY[kind])

    def leave_unobserved(self, flag: str) -> None:
        """
        Record that the case's own requirement cannot be judged without `flag`: UNSUPPORTED unless something else fails.

        Does nothing if the flag is declared: then the case chose not to look.
        """
        if not self.declares(flag) and flag not in self.report.unobserved:
            self.report.unobserved.append(flag)

    def expect(self, holds: bool, requirement: str, message: str, **where: Any) -> None:
        """Count one comparison, and add a finding if it does not hold. `where` are fields of the Finding."""
        check = where.pop("check", self.case.title)
        count = self.report.checks.setdefault(check, CheckCount())
        count.comparisons += 1
        count.elements += 1
        if not holds:
            self.report.findings.append(
                Finding(requirement=requirement, check=check, message=message, **{"rank": self.rank, **where})
            )

    def expect_equal(
        self, requirement: str, what: str, got: object, expected: object, *, details: str = "", **where: Any
    ) -> None:
        """`expect` two plain values to be equal; the message names both."""
        self.expect(
            got == expected, requirement, comparison(what, expected=expected, got=got, details=details), **where
        )

    @contextmanager
    def refusal(self, requirement: str, what: str, *, names: Sequence[str]) -> Iterator[Refusal]:
        """
        The implementation should refuse inside, on every rank, because of `what`: see `refusal.why_no_refusal`.

        Adds a finding if nothing is raised, if the error is not a refusal or names none of `names`, or if it comes
        after a step was trained: a refusal is due at construction or at first use. Its text becomes a note.
        """
        outcome = Refusal()
        self.steps_trained = 0
        problem: str | None = "none"
        try:
            yield outcome
        except (SuiteError, EnvironmentUnavailable, RequirementFailed):
            raise
        except Exception as error:  # noqa: BLE001 - whether it is a refusal is judged below
            self.note_refusal()
            outcome.error = error
            self.report.notes.append(
                f"refused ({what}): {type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}"
            )
            problem = why_no_refusal(error, names)
            if problem is None and self.steps_trained:
                problem = f"one after {self.steps_trained} steps"
            if problem is not None and not outcome.excused:
                self.examine(error)
        message = comparison(what, expected="a refusal", got=problem)
        self.expect(problem is None or outcome.excused, requirement, message, check="refusal")

    def check_equal(self, requirement: str, got: Tensor | None, expected: Tensor, *, check: str, **where: Any) -> None:
        """Bitwise equality of one tensor with a value that was computed independently."""
        if got is None:
            message = comparison(check, expected=f"a tensor of {tuple(expected.shape)}", got="None")
            self.expect(False, requirement, message, check=check, **where)
            return
        if isinstance(got, DTensor):
            message = comparison(check, expected="a whole tensor", got="a sharded one (DTensor)")
            self.expect(False, requirement, message, check=check, **where)
            return
        got = got.detach().cpu()
        same = got.shape == expected.shape and got.dtype == expected.dtype and torch.equal(got, expected.cpu())
        message = comparison(check, expected="equal values", got="different ones")
        if got.numel() <= 16:
            message = comparison(check, expected=expected.tolist(), got=got.tolist())
        self.expect(same, requirement, message, check=check, bound="bitwise", **where)

    def check_bitwise(self, run: TrainingHistory, expected: TrainingHistory, requirement: str) -> None:
        """Losses, gradients and parameters of every step equal those of another run, bit for bit."""
        if len(run.steps) != len(expected.steps):
            raise SuiteError(f"steps: expected {len(expected.steps)}, got {len(run.steps)} [{self.case.id}]")
        for got, want in zip(run.steps, expected.steps, strict=True):
            for index, (loss, wanted) in enumerate(zip(got.losses, want.losses, strict=True)):
                self._bitwise(
                    requirement, loss, wanted, step=got.step, phase="forward", fqn=f"loss of micro-batch {index}"
                )
            if got.grads is not None and want.grads is not None:
                for name, gradient in want.grads.items():
                    self._bitwise(requirement, got.grads.get(name), gradient, step=got.step, phase="reduce", fqn=name)
            elif want.grads is not None:
                self._note("gradients are not exposed: the parameters they lead to were compared")
            for name, value in want.params.items():
                self._bitwise(requirement, got.params.get(name), value, step=got.step, phase="step", fqn=name)

    def _note(self, text: str) -> None:
        """Add a note once."""
        if text not in self.report.notes:
            self.report.notes.append(text)

    def _bitwise(self, requirement: str, got: Tensor | None, want: Tensor | None, **where: Any) -> None:
        what = "values"
        if got is None or want is None:
            same = got is want
            seen, wanted = ("None" if value is None else "a tensor" for value in (got, want))
        elif got.shape != want.shape:
            same, what, seen, wanted = False, "shape", str(tuple(got.shape)), str(tuple(want.shape))
        else:
            same = torch.equal(got.to(want.dtype), want)
            wanted = "bitwise equality"
            seen = f"differences of up to {(got.double() - want.double()).abs().max().item():.3g}"
        message = comparison(what, expected=wanted, got=seen)
        self.expect(same, requirement, message, check="bitwise equality", bound="bitwise", **where)

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

    def check_rounding(
        self,
        run: TrainingHistory,
        workload: Workload,
        plan: Plan,
        regime: Regime | None = None,
        *,
        requirement: str,
        kinds: Sequence[Kind] = (Kind.LOSS, Kind.GRADIENT, Kind.PARAMETER),
    ) -> None:
        """Values of these kinds equal those of the reference that rounds as the plan says, bit for bit."""
        with self.blaming("suite"):
            expected = rounding_reference(
                workload,
                regime or Regime(),
                plan,
                rank=self.rank,
                world_size=self.world_size,
                device=self.reference_device,
            )
        self.check(rounds_alike(run, expected, requirement=requirement, kinds=kinds))

    def plain_history(self, workload: Workload, regime: Regime) -> TrainingHistory:
        """The unwrapped model, trained in this process in float32."""
        return single_process_reference(
            workload,
            regime,
            rank=self.rank,
            world_size=self.world_size,
            device=self.reference_device,
            dtype=torch.float32,
        )

    def ddp_history(self, workload: Workload, regime: Regime) -> TrainingHistory:
        """The model, trained by torch's DistributedDataParallel. Collective."""
        with process_group.log().phase("observe"), self.blaming("suite"):
            return ddp_reference(
                workload, regime, rank=self.rank, world_size=self.world_size, device=self.reference_device
            )

    def check_same_on_every_rank(self, run: TrainingHistory, requirement: str) -> None:
        """Full parameters of every step are bitwise equal on all ranks: the controller compares the digests."""
        self.check_digests(parameter_digests(run), "params", requirement, "cross-rank equality")

    def check_same_schedule(self, run: TrainingHistory, requirement: str) -> None:
        """Every rank issued the same sequence of collectives: the controller compares the digests."""
        self.check_digests(schedule_digests(run), "schedule", requirement, "schedule equality")

    def check_digests(self, digests: Mapping[str, str], prefix: str, requirement: str, check: str) -> None:
        """Each digest is the same on all ranks; labels begin with `prefix`."""
        strange = [label for label in digests if not label.startswith(prefix)]
        if strange:
            raise SuiteError(f"digest labels must begin with {prefix!r}, got {strange} [{self.case.id}]")
        self.report.digests.update(digests)
        self.report.digest_requirements[prefix] = requirement
        count = self.report.checks.setdefault(check, CheckCount())
        count.comparisons += len(digests)
        count.elements += len(digests)

    def check_devices(self, requirement: str, adapter: Adapter, device: torch.device) -> None:
        """Every parameter and buffer that user code sees is on the device."""
        with self.blaming("implementation"):
            module = adapter.module()
            tensors = [*module.named_parameters(), *module.named_buffers()]
        for name, tensor in tensors:
            right = tensor.device.type == device.type and device.index in (None, tensor.device.index)
            message = comparison("device", expected=device, got=tensor.device)
            self.expect(right, requirement, message, fqn=name, phase="init", check="placement")

    def check_resharded(
        self, adapter: Adapter, workload: Workload, requirement: str, run: TrainingHistory, plan: Plan | None = None
    ) -> None:
        """
        No unit holds full parameters between steps.

        If the implementation cannot tell, what it gathers in the next step does: see `checks.resharding`.
        """
        if not self.declares("sharded_state"):
            if holds_whole_parameters(run):
                self.report.notes.append("parameters are whole on every rank by default: there is nothing to reshard")
                return
            self.check(gathered_again(run, workload, plan or self.plan(workload), requirement=requirement))
            return
        with self.blaming("implementation"):
            unsharded = [unit for unit in ("", *workload.units) if adapter.unit_is_unsharded(unit)]
        message = comparison("parameters after backward", expected="resharded", got="unsharded")
        for unit in ("", *workload.units):
            holds, fqn = unit not in unsharded, unit or "the root"
            self.expect(holds, requirement, message, fqn=fqn, phase="reshard", check="resharded")

    def check_released(
        self,
        adapter: Adapter,
        workload: Workload,
        requirement: str,
        run: TrainingHistory,
        plan: Plan | None = None,
        regime: Regime | None = None,
    ) -> None:
        """
        No unit holds full parameters when a backward has returned, nor between the steps of `run`.

        The first is seen in another training, of two steps, on an adapter of its own: reading gradients may gather a
        unit and free it again, so nobody reads them there. It needs `sharded_state`.
        """
        self.check_resharded(adapter, workload, requirement, run, plan)
        if not self.declares("sharded_state"):
            return
        units = ("", *workload.units)
        gathered: set[tuple[int, str]] = set()

        def look(other: Adapter, step: int) -> None:
            gathered.update((step, unit) for unit in units if other.unit_is_unsharded(unit))

        regime = replace(regime or Regime(), steps=2)
        self.train(workload, plan, regime, observe=False, on_gradients=look)
        message = comparison("parameters when backward has returned", expected="resharded", got="unsharded")
        for step in range(regime.steps):
            for unit in units:
                where: dict[str, Any] = {"fqn": unit or "the root", "step": step, "phase": "reshard"}
                self.expect((step, unit) not in gathered, requirement, message, check="resharded", **where)

    def check_flags(self, run: TrainingHistory, workload: Workload, requirement: str) -> None:
        """
        `requires_grad` of every parameter is as in the model, after setup and after the last step.

        Flat parameters hide the model's own, and their flags. An engine that declares `orig_params` must show all.
        """
        if not run.requires_grad:
            self.report.notes.append("cannot read requires_grad: the adapter exposes no module")
            return
        for name, parameter in workload.build(self.rank).named_parameters():
            if name not in run.requires_grad and not self.declares("orig_params"):
                self.report.notes.append(f"cannot read requires_grad of {name!r}: the adapter shows no such parameter")
                continue
            for phase, flags in (("init", run.requires_grad), ("step", run.final_requires_grad)):
                where: dict[str, Any] = {"fqn": name, "phase": phase, "check": "flags"}
                self.expect_equal(requirement, "requires_grad", flags.get(name), parameter.requires_grad, **where)

    # Bytes.

    def allocated_bytes(self) -> int:
        """Bytes allocated on this rank's accelerator now."""
        return watch_for(self.device).allocated_bytes()

    def allocated_bytes_without_backend(self, expected: int) -> int:
        """
        Bytes allocated on this rank's accelerator now, without those that the process group still holds. Collective.

        NCCL keeps the tensors of a collective whose Work nobody waited for until the first collective after its
        watchdog has seen the end. DistributedDataParallel waits for futures instead, so the group holds its last
        buckets, which no engine can return. The wait for the watchdog ends at `expected` bytes.
        """
        module = torch.get_device_module(self.device_type)
        for _ in range(_WATCHDOG_ROUNDS):
            module.synchronize(self.device)
            flag = torch.tensor(float(self.allocated_bytes() > expected), device=self.device)
            dist.all_reduce(flag, op=dist.ReduceOp.MAX)
            more = flag.item()
            del flag
            if not more:
                break
            time.sleep(0 if self.device_type == SIMULATED else _WATCHDOG_PERIOD_S)
        return self.allocated_bytes()

    def activations(self, workload: Workload) -> Activations:
        """Bytes that one forward of the unwrapped model takes on this rank's device, beyond its parameters."""
        watch = watch_for(self.device)
        if not watch.counts_bytes:
            raise SuiteError(f"no allocator counts bytes on {self.device}, so the case must ask for an accelerator")
        model = workload.build(self.rank).to(self.device)
        batch = self.placed(workload.batch(BatchKey(step=0, rank=self.rank, world_size=self.world_size)))
        watch.reset_peak()
        before = watch.allocated_bytes()
        loss = workload.loss(model(*batch.args, **batch.kwargs), batch)
        kept, peak = watch.allocated_bytes() - before, watch.peak_bytes() - before
        del loss
        return Activations(kept=kept, forward_peak=peak)

    def drop(self, adapter: Adapter) -> None:
        """Close an adapter that the case has finished with. The caller must hold no reference to its engine."""
        with process_group.log().phase("close"), self.blaming("implementation"):
            adapter.close()
        self.subjects.remove(adapter)

    def leave_peers(self) -> None:
        """
        End all communication of this rank, as a rank that has failed does, so that peers that wait for it notice.

        Engines are not closed, because that may communicate. The caller must hold no reference to one.
        """
        self.subjects.clear()
        destroy_process_group()

    @contextmanager
    def another_device(self) -> Iterator[None]:
        """
        Make a device other than this rank's the current one.

        Raises EnvironmentUnavailable if this rank sees only one.
        """
        count = device_count(self.device.type)
        if count < 2:
            raise EnvironmentUnavailable(
                f"needs two devices of type {self.device.type} that each rank sees, got {count}"
            )
        use_device(torch.device(self.device.type, ((self.device.index or 0) + 1) % count))
        try:
            yield
        finally:
            use_device(self.device)

    @contextmanager
    def no_garbage_collection(self) -> Iterator[None]:
        """Disable garbage collection, so that memory is freed only when its last reference is dropped."""
        gc.collect()
        gc.disable()
        try:
            yield
        finally:
            gc.enable()

    # Helpers of bodies.

    def placed(self, batch: Batch) -> Batch:
        """The batch on this rank's device."""
        args, kwargs, target = (moved(part, self.device) for part in (batch.args, batch.kwargs, batch.target))
        return Batch(args=args, kwargs=kwargs, target=target)

    def unit_parameters(self, workload: Workload, unit: str) -> tuple[str, ...]:
        """FQNs of the parameters under a submodule."""
        module: nn.Module = workload.build(self.rank).get_submodule(unit)
        return tuple(f"{unit}.{name}" for name, _ in module.named_parameters())

    @contextmanager
    def poisoned_allocations(self) -> Iterator[None]:
        """
        Fill memory that torch allocates without initialising with NaN.

        Uses torch's own mechanism: deterministic algorithms with `fill_uninitialized_memory`.
        """
        deterministic = torch.are_deterministic_algorithms_enabled()
        warn_only = torch.is_deterministic_algorithms_warn_only_enabled()
        # The module replaces itself with an object that has this property, which type checkers do not see.
        memory: Any = torch.utils.deterministic
        filled = memory.fill_uninitialized_memory
        torch.use_deterministic_algorithms(True, warn_only=True)
        memory.fill_uninitialized_memory = True
        try:
            if not torch.empty(64).isnan().all():
                raise SuiteError("cannot poison padding: torch.empty is not filled with NaN")
            yield
        finally:
            memory.fill_uninitialized_memory = filled
            torch.use_deterministic_algorithms(deterministic, warn_only=warn_only)
