"""
The checks that a case's body calls: comparisons with the references, single expectations, refusals.

Everything here runs in a rank. Checks add findings to the rank's report; they do not raise.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from fsdp_conformance.adapters.base import Adapter
from fsdp_conformance.cases import control
from fsdp_conformance.cases.rank import CaseRank
from fsdp_conformance.cases.refusal import Refusal, why_no_refusal
from fsdp_conformance.checks.equality import parameter_digests, schedule_digests
from fsdp_conformance.checks.parity import REQUIREMENTS, hidden_kinds, parity
from fsdp_conformance.checks.resharding import gathered_again, holds_whole_parameters
from fsdp_conformance.checks.result import CheckResult, comparison
from fsdp_conformance.checks.rounding import rounds_alike
from fsdp_conformance.errors import EnvironmentUnavailable, RequirementFailed, SuiteError
from fsdp_conformance.harness.recording import process_group
from fsdp_conformance.history.training import StepRecord, TrainingHistory
from fsdp_conformance.history.transfer import Opaque
from fsdp_conformance.outcome.records import CheckCount, Finding
from fsdp_conformance.plan import Plan
from fsdp_conformance.references.ddp import ddp_reference
from fsdp_conformance.references.reference_set import Kind, References
from fsdp_conformance.references.rounding import rounding_mistakes, rounding_reference
from fsdp_conformance.references.single_process import single_process_reference
from fsdp_conformance.workload.definition import Regime, Workload
from fsdp_conformance.workload.events import RUNS_A_FORWARD

#: The capability flag with which an implementation shows values of a kind.
_SHOWN_BY = {Kind.GRADIENT: "full_grads", Kind.BUFFER: "full_buffers"}


class CaseChecks:
    """
    The checks of a case, on one rank.

    `references` returns the references for a workload, `observe` what a function returns where the engine is
    (`ConformanceTestCase.observe`); `examine` lets a person who debugs this rank look at an
    exception that a check has caught (`RankRun.examine`).
    """

    def __init__(
        self,
        here: CaseRank,
        *,
        references: Callable[[Workload, Regime | None], References],
        examine: Callable[[BaseException], object],
        observe: Callable[[str, Callable[[], Any]], Any],
    ) -> None:
        self._here = here
        self._report = here.report
        self._references = references
        self._examine = examine
        self._observe = observe

    def check(self, result: CheckResult) -> None:
        """Add a check's findings, counts and figures to the report."""
        result.into(self._report)

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
        references = self._references(workload, regime)
        replaced = {} if requirement is None else dict.fromkeys(("loss", "gradient", "parameter"), requirement)
        replaced |= requirements or {}
        for result in parity(run, references, requirements=replaced, none_or_zero=none_or_zero):
            self.check(result)
        for kind in hidden_kinds(run, references):
            requirement_of_kind = replaced.get(kind, REQUIREMENTS[kind])
            if requirement_of_kind == self._here.case.requirements[0] and kind in _SHOWN_BY:
                self.leave_unobserved(_SHOWN_BY[kind])

    def check_control(self, run: TrainingHistory, workload: Workload, regime: Regime) -> None:
        """
        Show that a value which is wrong on purpose comes out as a finding: see `control`.

        Raises SuiteError if the comparisons do not notice it here. If they do, but not in what the rank has sent, then
        the code under test has changed what its rank sends, which is a finding.
        """
        for kind in control.KINDS:
            sent = self._observe(f"{control.CHECK}: {kind}", partial(control.wrong_on_purpose, run, kind))
            self._expect_noticed(kind, run, sent, workload, regime)

    def _expect_noticed(
        self, kind: str, run: TrainingHistory, sent: TrainingHistory | None, workload: Workload, regime: Regime
    ) -> None:
        wrong = control.wrong_on_purpose(run, kind)
        if wrong is None:
            return
        references = self._references(workload, regime)

        def is_noticed(history: TrainingHistory) -> bool:
            return any(result.findings for result in parity(history, references))

        if not is_noticed(wrong):
            raise SuiteError(f"{control.CHECK}: a wrong {kind} in the last step was not noticed [{self._here.case.id}]")
        problem = None if sent is not None and is_noticed(sent) else "the right one"
        message = comparison(f"{kind} that the rank must send", expected="a wrong one", got=problem)
        self.expect(problem is None, self._here.case.requirements[0], message, check=control.CHECK)

    def leave_unobserved(self, flag: str) -> None:
        """
        Record that the case's own requirement cannot be judged without `flag`: UNSUPPORTED unless something else fails.

        Does nothing if the flag is declared: then the case chose not to look.
        """
        if not self._here.declares(flag) and flag not in self._report.unobserved:
            self._report.unobserved.append(flag)

    def expect(self, /, holds: bool, requirement: str, message: str, **where: Any) -> None:
        """Count one comparison, and add a finding if it does not hold. `where` are fields of the Finding."""
        check = where.pop("check", self._here.case.title)
        count = self._report.checks.setdefault(check, CheckCount())
        count.comparisons += 1
        count.elements += 1
        if not holds:
            self._report.findings.append(
                Finding(requirement=requirement, check=check, message=message, **{"rank": self._here.rank, **where})
            )

    def expect_equal(
        self, /, requirement: str, what: str, got: object, expected: object, *, details: str = "", **where: Any
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
        self._here.steps_trained = 0
        problem: str | None = "none"
        try:
            yield outcome
        except (SuiteError, EnvironmentUnavailable, RequirementFailed):
            raise
        except Exception as error:  # noqa: BLE001 - whether it is a refusal is judged below
            self._here.note_refusal()
            outcome.error = error
            self._report.notes.append(
                f"refused ({what}): {type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}"
            )
            problem = why_no_refusal(error, names)
            if problem is None and self._here.steps_trained:
                problem = f"one after {self._here.steps_trained} steps"
            if problem is not None and not outcome.excused:
                self._examine(error)
        message = comparison(what, expected="a refusal", got=problem)
        self.expect(problem is None or outcome.excused, requirement, message, check="refusal")

    def check_equal(
        self, /, requirement: str, got: Tensor | None, expected: Tensor, *, check: str, **where: Any
    ) -> None:
        """Bitwise equality of one tensor with a value that was computed independently."""
        if got is None:
            message = comparison(check, expected=f"a tensor of {tuple(expected.shape)}", got="None")
            self.expect(False, requirement, message, check=check, **where)
            return
        if isinstance(got, DTensor | Opaque):
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
        """
        Losses, gradients and parameters of every step equal those of another run, bit for bit.

        Raises SuiteError if the runs have different numbers of steps.
        """
        if len(run.steps) != len(expected.steps):
            raise SuiteError(f"steps: expected {len(expected.steps)}, got {len(run.steps)} [{self._here.case.id}]")
        for got, want in zip(run.steps, expected.steps, strict=True):
            for index, (loss, expected_loss) in enumerate(zip(got.losses, want.losses, strict=True)):
                self._bitwise(
                    requirement, loss, expected_loss, step=got.step, phase="forward", fqn=f"loss of micro-batch {index}"
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
        if text not in self._report.notes:
            self._report.notes.append(text)

    def _bitwise(self, requirement: str, got: Tensor | None, want: Tensor | None, **where: Any) -> None:
        what = "values"
        if got is None or want is None:
            same = got is want
            observed, expected = ("None" if value is None else "a tensor" for value in (got, want))
        elif got.shape != want.shape:
            same, what, observed, expected = False, "shape", str(tuple(got.shape)), str(tuple(want.shape))
        else:
            same = torch.equal(got.to(want.dtype), want)
            expected = "bitwise equality"
            observed = f"differences of up to {(got.double() - want.double()).abs().max().item():.3g}"
        message = comparison(what, expected=expected, got=observed)
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
        """Values of these kinds equal those of the reference that rounds as the plan says, bit for bit."""
        where: dict[str, Any] = {
            "rank": self._here.rank,
            "world_size": self._here.world_size,
            "device": self._here.reference_device,
        }
        order = workload, regime or Regime(), plan
        with self._here.blaming("suite"):
            expected = rounding_reference(*order, **where)
            mistakes = partial(rounding_mistakes, *order, **where)
            result = rounds_alike(run, expected, requirement=requirement, kinds=kinds, mistakes=mistakes)
        self.check(result)

    def plain_history(self, workload: Workload, regime: Regime) -> TrainingHistory:
        """The unwrapped model, trained in this process in float32."""
        return single_process_reference(
            workload,
            regime,
            rank=self._here.rank,
            world_size=self._here.world_size,
            device=self._here.reference_device,
            dtype=torch.float32,
        )

    def ddp_history(self, workload: Workload, regime: Regime) -> TrainingHistory:
        """The model, trained by torch's DistributedDataParallel. Collective."""
        with process_group.log().phase("observe"), self._here.blaming("suite"):
            return ddp_reference(
                workload,
                regime,
                rank=self._here.rank,
                world_size=self._here.world_size,
                device=self._here.reference_device,
            )

    def check_same_on_every_rank(self, run: TrainingHistory, requirement: str) -> None:
        """Full parameters of every step are bitwise equal on all ranks: the controller compares the digests."""
        self.check_digests(parameter_digests(run), "params", requirement, "cross-rank equality")

    def check_same_schedule(self, run: TrainingHistory, requirement: str) -> None:
        """Every rank issued the same sequence of collectives: the controller compares the digests."""
        self.check_digests(schedule_digests(run), "schedule", requirement, "schedule equality")

    def check_digests(self, digests: Mapping[str, str], prefix: str, requirement: str, check: str) -> None:
        """Each digest is the same on all ranks; labels begin with `prefix`. Raises SuiteError for any other label."""
        foreign_labels = [label for label in digests if not label.startswith(prefix)]
        if foreign_labels:
            raise SuiteError(f"digest labels must begin with {prefix!r}, got {foreign_labels} [{self._here.case.id}]")
        self._report.digests.update(digests)
        self._report.digest_requirements[prefix] = requirement
        count = self._report.checks.setdefault(check, CheckCount())
        count.comparisons += len(digests)
        count.elements += len(digests)

    def check_devices(self, requirement: str, adapter: Adapter, device: torch.device) -> None:
        """Every parameter and buffer that user code sees is on the device."""

        def devices() -> dict[str, torch.device]:
            with self._here.blaming("implementation"):
                module = adapter.module()
                return {name: tensor.device for name, tensor in (*module.named_parameters(), *module.named_buffers())}

        for name, got in self._observe("devices", devices).items():
            right = got.type == device.type and device.index in (None, got.index)
            message = comparison("device", expected=device, got=got)
            self.expect(right, requirement, message, fqn=name, phase="init", check="placement")

    def check_resharded(
        self,
        adapter: Adapter,
        workload: Workload,
        requirement: str,
        run: TrainingHistory,
        plan: Plan | None = None,
        regime: Regime | None = None,
    ) -> None:
        """
        No unit holds full parameters between steps: before anything was read, and now.

        A step in which a forward has no backward says nothing: units may wait for the next forward. If the
        implementation cannot tell, what it gathers in the next step does: see `checks.resharding`.
        """
        if not self._here.declares("sharded_state"):
            if holds_whole_parameters(run):
                self._report.notes.append("parameters are whole on every rank by default: there is nothing to reshard")
                return
            self.check(gathered_again(run, workload, plan or self._here.plan(workload), requirement=requirement))
            return
        with self._here.blaming("implementation"):
            unsharded = [unit for unit in ("", *workload.units) if adapter.unit_is_unsharded(unit)]
        message = comparison("parameters after backward", expected="resharded", got="unsharded")
        for unit in ("", *workload.units):
            holds, fqn = unit not in unsharded, unit or "the root"
            self.expect(holds, requirement, message, fqn=fqn, phase="reshard", check="resharded")
        after = {record.step: record.unsharded_after_step for record in _settled(run, regime)}
        self._expect_resharded(after, "the step", workload, requirement)

    def check_released(
        self,
        adapter: Adapter,
        workload: Workload,
        requirement: str,
        run: TrainingHistory,
        plan: Plan | None = None,
        regime: Regime | None = None,
    ) -> None:
        """Make `check_resharded`, and check that no unit holds full parameters when a backward has returned."""
        self.check_resharded(adapter, workload, requirement, run, plan, regime)
        after = {record.step: record.unsharded_after_backward for record in _settled(run, regime)}
        self._expect_resharded(after, "backward", workload, requirement)

    def _expect_resharded(
        self, unsharded: Mapping[int, Sequence[str] | None], what: str, workload: Workload, requirement: str
    ) -> None:
        """`unsharded`: by step, the units that held full parameters after it; None if the adapter could not tell."""
        if not self._here.declares("sharded_state"):
            return
        message = f"parameters after {what}, before anything was read"
        for step, held in unsharded.items():
            for unit in ("", *workload.units):
                got = "unknown: unit_is_unsharded raised" if held is None else "unsharded"
                holds = held is not None and (unit or "the root") not in held
                where: dict[str, Any] = {"fqn": unit or "the root", "step": step, "phase": "reshard"}
                text = comparison(message, expected="resharded", got=got)
                self.expect(holds, requirement, text, check="resharded", **where)

    def check_flags(self, run: TrainingHistory, workload: Workload, requirement: str) -> None:
        """
        `requires_grad` of every parameter is as in the model, after setup and after the last step.

        Flat parameters hide the model's own, and their flags. An engine that declares `orig_params` must show all.
        """
        if not run.requires_grad:
            self._report.notes.append("cannot read requires_grad: the adapter exposes no module")
            return
        for name, parameter in workload.build(self._here.rank).named_parameters():
            if name not in run.requires_grad and not self._here.declares("orig_params"):
                self._report.notes.append(f"cannot read requires_grad of {name!r}: the adapter shows no such parameter")
                continue
            for phase, flags in (("init", run.requires_grad), ("step", run.final_requires_grad)):
                where: dict[str, Any] = {"fqn": name, "phase": phase, "check": "flags"}
                self.expect_equal(requirement, "requires_grad", flags.get(name), parameter.requires_grad, **where)


def _settled(run: TrainingHistory, regime: Regime | None) -> list[StepRecord]:
    """The steps in which every forward had its backward."""
    return [
        record
        for record in run.steps
        if regime is None or not any(event.action in RUNS_A_FORWARD for event in regime.in_step(record.step))
    ]
