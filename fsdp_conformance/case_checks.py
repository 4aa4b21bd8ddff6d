"""
What a case's body says about what it saw: checks against the references, single expectations, refusals.

A mixin of `ConformanceTestCase`; everything here runs in a rank. Checks add to the rank's report and raise nothing.
"""

from __future__ import annotations

import gc
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map_only

from fsdp_conformance.adapters.base import Adapter
from fsdp_conformance.adapters.watch import watch_for
from fsdp_conformance.checks.communication import schedule_digests
from fsdp_conformance.checks.equality import parameter_digests
from fsdp_conformance.checks.memory import Activations
from fsdp_conformance.checks.parity import parity
from fsdp_conformance.checks.reference_rounding import rounding_reference, rounds_alike
from fsdp_conformance.checks.reference_single import single_process_reference
from fsdp_conformance.checks.references import Kind, References, train_references
from fsdp_conformance.checks.result import CheckResult
from fsdp_conformance.config import SIMULATED, Plan
from fsdp_conformance.errors import EnvironmentUnavailable, RequirementFailed, SuiteError
from fsdp_conformance.harness.recording import process_group
from fsdp_conformance.history.training import TrainingHistory
from fsdp_conformance.outcome import CheckCount, Finding, RankReport
from fsdp_conformance.workload import Batch, BatchKey, Regime, Workload

if TYPE_CHECKING:
    from fsdp_conformance.case import Case


@dataclass(slots=True)
class Refusal:
    """What became of a block that should raise."""

    error: Exception | None = None
    excused: bool = False
    """Set by the case where going on rightly is as good as a refusal."""


class CaseChecks:
    """The checks of a case, on one rank."""

    rank: int
    report: RankReport
    device_type: str
    subjects: list[Adapter]
    """Adapters that are open."""
    trained_references: dict[tuple[str, Regime], References]
    """By workload and regime, so that a case with several checks trains them once."""
    hazard_requirements: Mapping[str, str] = MappingProxyType({})
    """Kinds of hazards (and "parameters") that speak for another requirement in this case: see `checks.streams`."""

    if TYPE_CHECKING:

        @property
        def case(self) -> Case: ...

        @property
        def world_size(self) -> int: ...

        @property
        def device(self) -> torch.device: ...

        def declares(self, flag: str) -> bool: ...

        def blaming(self, part: str) -> AbstractContextManager[None]: ...

        def note_refusal(self) -> None: ...

    @property
    def reference_device(self) -> str:
        """
        What references are trained on: this rank's kind of device, or the CPU for the simulated one.

        Its operations are the CPU's, bit for bit, so a reference there is as good and owes nothing to the simulation.
        """
        return "cpu" if self.device_type == SIMULATED else self.device_type

    def references(self, workload: Workload, regime: Regime | None = None) -> References:
        """The references for the workload, trained and in agreement. Collective, once per workload and regime."""
        regime = regime or Regime()
        key = (workload.name, regime)
        if key not in self.trained_references:
            with process_group.log().phase("observe"), self.blaming("suite"):
                found = train_references(
                    workload, regime, rank=self.rank, world_size=self.world_size, device=self.reference_device
                )
                found.agree()
            self.trained_references[key] = found
        return self.trained_references[key]

    def check(self, result: CheckResult) -> None:
        """Take a check's findings, counts and figures into the report."""
        result.into(self.report)

    def check_parity(
        self,
        run: TrainingHistory,
        workload: Workload,
        regime: Regime | None = None,
        *,
        requirements: Mapping[str, str] | None = None,
        none_or_zero: bool = False,
    ) -> None:
        """
        Compare losses, gradients, parameters, buffers and what else the regime gives with the references.

        `requirements` replaces the requirement that a kind of comparison speaks for ("loss", "gradient", "parameter",
        "buffer", "norm", "eval", "output"); `none_or_zero` takes a gradient of zeros for none,
        where the contract leaves the choice.
        """
        references = self.references(workload, regime)
        for result in parity(run, references, requirements=dict(requirements or {}), none_or_zero=none_or_zero):
            self.check(result)

    def expect(self, holds: bool, requirement: str, message: str, **where: Any) -> None:
        """Count one comparison, and make a finding unless it holds. `where` goes to the Finding."""
        check = where.pop("check", self.case.title)
        count = self.report.checks.setdefault(check, CheckCount())
        count.comparisons += 1
        count.elements += 1
        if not holds:
            self.report.findings.append(
                Finding(requirement=requirement, check=check, message=message, **{"rank": self.rank, **where})
            )

    @contextmanager
    def refusal(self, requirement: str, what: str) -> Iterator[Refusal]:
        """
        The implementation should raise inside, on every rank, because of `what`.

        Adds a finding if it does not. The exception's text is kept as a note: a refusal that nobody can understand
        is one too, but the reader of the report sees it.
        """
        outcome = Refusal()
        try:
            yield outcome
        except (SuiteError, EnvironmentUnavailable, RequirementFailed):
            raise
        except Exception as error:  # noqa: BLE001 - a refusal may be any exception
            self.note_refusal()
            outcome.error = error
            self.report.notes.append(
                f"refused ({what}): {type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}"
            )
        self.expect(
            outcome.error is not None or outcome.excused,
            requirement,
            f"no exception was raised, but should be: {what}",
            check="refusal",
        )

    def check_equal(self, requirement: str, got: Tensor | None, expected: Tensor, *, check: str, **where: Any) -> None:
        """Bitwise equality of one tensor with a value that was worked out independently."""
        if got is None:
            self.expect(False, requirement, f"no tensor, but should be {tuple(expected.shape)}", check=check, **where)
            return
        got = got.detach().cpu()
        same = got.shape == expected.shape and got.dtype == expected.dtype and torch.equal(got, expected.cpu())
        message = (
            f"got={got.tolist()}, but should be {expected.tolist()}"
            if got.numel() <= 16
            else "values differ, but should be equal"
        )
        self.expect(same, requirement, message, check=check, bound="bitwise", **where)

    def check_bitwise(self, run: TrainingHistory, expected: TrainingHistory, requirement: str) -> None:
        """Losses, gradients, parameters and buffers of every step equal those of another run, bit for bit."""
        if len(run.steps) != len(expected.steps):
            raise SuiteError(f"{len(run.steps)} steps are compared with {len(expected.steps)} [{self.case.id}]")
        for got, want in zip(run.steps, expected.steps, strict=True):
            for index, (loss, wanted) in enumerate(zip(got.losses, want.losses, strict=True)):
                self._bitwise(
                    requirement, loss, wanted, step=got.step, phase="forward", fqn=f"loss of micro-batch {index}"
                )
            if got.grads is not None and want.grads is not None:
                for name, gradient in want.grads.items():
                    self._bitwise(requirement, got.grads.get(name), gradient, step=got.step, phase="reduce", fqn=name)
            for name, value in want.params.items():
                self._bitwise(requirement, got.params.get(name), value, step=got.step, phase="step", fqn=name)

    def _bitwise(self, requirement: str, got: Tensor | None, want: Tensor | None, **where: Any) -> None:
        if got is None or want is None:
            same, message = (
                got is want,
                f"got={'None' if got is None else 'a tensor'}, but should be {'None' if want is None else 'a tensor'}",
            )
        else:
            same = got.shape == want.shape and torch.equal(got.to(want.dtype), want)
            worst = (
                "" if got.shape != want.shape else f" by up to {(got.double() - want.double()).abs().max().item():.3g}"
            )
            message = f"values differ{worst}, but should be bitwise equal"
        self.expect(same, requirement, message, check="bitwise equality", bound="bitwise", **where)

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
        """Values of these kinds are those of the reference that rounds as the plan says, bit for bit."""
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

    def check_same_on_every_rank(self, run: TrainingHistory, requirement: str) -> None:
        """Full parameters of every step are bitwise the same on all ranks: the controller compares the digests."""
        self._digest(parameter_digests(run), "params", requirement, "cross-rank equality")

    def check_same_schedule(self, run: TrainingHistory, requirement: str) -> None:
        """Every rank issued the same sequence of collectives: the controller compares the digests."""
        self._digest(schedule_digests(run), "schedule", requirement, "schedule equality")

    def _digest(self, digests: Mapping[str, str], prefix: str, requirement: str, check: str) -> None:
        strange = [label for label in digests if not label.startswith(prefix)]
        if strange:
            raise SuiteError(f"digest labels {strange} do not begin with {prefix!r} [{self.case.id}]")
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
            self.expect(
                right,
                requirement,
                f"device={tensor.device}, but should be {device}",
                fqn=name,
                phase="init",
                check="placement",
            )

    def check_resharded(self, adapter: Adapter, workload: Workload, requirement: str) -> None:
        """No unit holds full parameters between steps, where the implementation can be asked; else this is noted."""
        if not self.declares("sharded_state"):
            self.report.notes.append("whether a unit is unsharded cannot be asked: sharded_state is not declared")
            return
        with self.blaming("implementation"):
            unsharded = [unit for unit in ("", *workload.units) if adapter.unit_is_unsharded(unit)]
        for unit in ("", *workload.units):
            self.expect(
                unit not in unsharded,
                requirement,
                "the unit holds full parameters, but should be resharded after backward",
                fqn=unit or "the root",
                phase="reshard",
                check="resharded",
            )

    def check_flags(self, run: TrainingHistory, workload: Workload, requirement: str) -> None:
        """`requires_grad` of every parameter is what the model said."""
        wanted = {name: parameter.requires_grad for name, parameter in workload.build(self.rank).named_parameters()}
        if not run.requires_grad:
            self.report.notes.append("requires_grad cannot be read: the adapter shows no module")
            return
        for name, flag in wanted.items():
            self.expect(
                run.requires_grad.get(name) == flag,
                requirement,
                f"requires_grad={run.requires_grad.get(name)}, but should be {flag}",
                fqn=name,
                phase="init",
                check="flags",
            )

    # Bytes.

    def allocated_bytes(self) -> int:
        """What this rank's accelerator has given out now."""
        return watch_for(self.device).allocated_bytes()

    def activations(self, workload: Workload) -> Activations:
        """What the unwrapped model takes on this rank's device for one forward, beside its parameters."""
        watch = watch_for(self.device)
        if not watch.counts_bytes:
            raise SuiteError(f"nothing counts bytes on {self.device}, so the case should ask for an accelerator")
        model = workload.build(self.rank).to(self.device)
        batch = self.placed(workload.batch(BatchKey(step=0, rank=self.rank, world_size=self.world_size)))
        watch.reset_peak()
        before = watch.allocated_bytes()
        loss = workload.loss(model(*batch.args, **batch.kwargs), batch)
        kept, peak = watch.allocated_bytes() - before, watch.peak_bytes() - before
        del loss
        return Activations(kept=kept, forward_peak=peak)

    def drop(self, adapter: Adapter) -> None:
        """The case is done with an adapter, and its engine with everything: the caller holds no reference either."""
        with process_group.log().phase("close"), self.blaming("implementation"):
            adapter.close()
        self.subjects.remove(adapter)

    @contextmanager
    def no_garbage_collection(self) -> Iterator[None]:
        """What is freed inside is freed because nobody refers to it, not because a cycle was found."""
        gc.collect()
        gc.disable()
        try:
            yield
        finally:
            gc.enable()

    # Helpers of bodies.

    def placed(self, batch: Batch) -> Batch:
        """The batch on this rank's device."""

        def moved(value: Any) -> Any:
            return tree_map_only(Tensor, lambda tensor: tensor.to(self.device), value)

        return Batch(args=moved(batch.args), kwargs=moved(batch.kwargs), target=moved(batch.target))

    def unit_parameters(self, workload: Workload, unit: str) -> tuple[str, ...]:
        """FQNs of the parameters under a submodule."""
        module: nn.Module = workload.build(self.rank).get_submodule(unit)
        return tuple(f"{unit}.{name}" for name, _ in module.named_parameters())

    @contextmanager
    def poisoned_allocations(self) -> Iterator[None]:
        """
        Memory that torch allocates without writing holds NaN inside.

        The mechanism is torch's own: deterministic algorithms with `fill_uninitialized_memory`.
        """
        deterministic = torch.are_deterministic_algorithms_enabled()
        warn_only = torch.is_deterministic_algorithms_warn_only_enabled()
        # Its module replaces itself by an object with this property, which type checkers do not see.
        memory: Any = torch.utils.deterministic
        filled = memory.fill_uninitialized_memory
        torch.use_deterministic_algorithms(True, warn_only=True)
        memory.fill_uninitialized_memory = True
        try:
            if not torch.empty(64).isnan().all():
                raise SuiteError("torch.empty is not filled with NaN, so padding cannot be poisoned")
            yield
        finally:
            memory.fill_uninitialized_memory = filled
            torch.use_deterministic_algorithms(deterministic, warn_only=warn_only)
