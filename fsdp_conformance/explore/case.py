"""
One example as a case: trained through the adapter and judged by the oracles of the suites.

The same body runs on simulated ranks in a warm worker, on processes when a failure is confirmed, and from a file that
was saved. It checks whatever the example can show: losses, gradients, parameters, buffers and evaluations against the
references; equality of all ranks; the same collectives on every rank; units resharded; bytes held.
"""

from __future__ import annotations

import json
import unittest
from collections.abc import Mapping
from dataclasses import replace
from functools import cached_property
from typing import Any

from fsdp_conformance import run_settings
from fsdp_conformance.adapters.base import Adapter
from fsdp_conformance.cases.base import ConformanceTestCase
from fsdp_conformance.cases.refusal import why_no_refusal
from fsdp_conformance.checks import partition
from fsdp_conformance.checks.rounding import rounds_alike
from fsdp_conformance.contract.case import CASE_ATTRIBUTE, EXPLORED, TIMEOUT_S, Case
from fsdp_conformance.errors import SuiteError, Unsupported
from fsdp_conformance.explore.example import Example, asks, example_from_json, shard_group_size, uses_all
from fsdp_conformance.explore.references import Prepared, prepare
from fsdp_conformance.history.training import TrainingHistory
from fsdp_conformance.outcome.records import CaseRecord
from fsdp_conformance.plan import Plan, Sharding
from fsdp_conformance.references.reference_set import Kind, References
from fsdp_conformance.run_settings import RunOrder, RunSettings, order_from_json
from fsdp_conformance.workload.definition import Workload
from fsdp_conformance.workload.events import Action

#: What an example is about: any combination of what is declared meets the contract, or is refused.
COMBINATIONS = "R000"
REQUIREMENTS = (
    COMBINATIONS, "R001", "R002", "R003", "R007", "R010", "R033", "R035", "R067", "R101", "R130", "R160", "R161", "R188"
)  # fmt: skip

#: `RankReport.measurements` has this where the engine declined the combination.
DECLINED = "declined"

#: Engines align parameters to at most this many bytes, which in small models is much.
_ALIGNMENT = 16
#: Bytes of a parameter below which the bytes held show more of the alignment than of the sharding.
_SHOWS_SHARDING = 36

#: In a warm worker: the references of the example that runs, so that its ranks do not train them again.
prepared: dict[str, Prepared] = {}


def case_for(example: Example) -> Case:
    """The case of an example."""
    return Case(
        id=f"{COMBINATIONS}/{EXPLORED}{example.digest}-ws{example.world_size}",
        requirements=REQUIREMENTS,
        chapter="A",
        world_size=example.world_size,
        title="A drawn model, sharded and trained as drawn, is at parity, or the combination is refused.",
        timeout_s=TIMEOUT_S,
    )


class DrawnCase(ConformanceTestCase):
    """One example. In the controller, set `example` before it runs."""

    example: Example | None = None
    shares_references = False
    """No other run draws the same example."""

    @property
    def case(self) -> Case:
        """The case of the example."""
        return case_for(self._example)

    @property
    def _example(self) -> Example:
        if self.example is None:
            if not isinstance(self.launch_payload, str):
                raise SuiteError("a drawn case has no example: set `example` before it runs")
            self.example = example_from_json(json.loads(self.launch_payload)["example"])
        return self.example

    @cached_property
    def order(self) -> RunOrder:
        """The order for the run; in a rank it comes with the example."""
        return order_from_json(_order_text(self.launch_payload))

    def _spawn_processes(self) -> None:
        self.launch_payload = payload(_order_text(self.launch_payload), self._example)
        super()._spawn_processes()

    def test_drawn(self) -> None:
        """A drawn model, sharded and trained as drawn, is at parity, or the combination is refused."""
        example = self._example
        here = prepared.get(example.digest)
        workload = here.workload if here is not None else example.workload()
        plan = self.placed_plan(example, workload)
        adapter = self.subject()
        run = self._trained(example, workload, plan, adapter)
        if plan.param_dtype is not None:
            self._check_rounding(example, run, workload, here)
        else:
            self._check_values(example, run, workload)
        self._check_ranks(example, run)
        self._check_sharding(example, run, workload, plan, adapter)

    def placed_plan(self, example: Example, workload: Workload) -> Plan:
        """The plan of the example on this case's device."""
        general = self.plan(workload)
        return replace(example.plan, device=general.device, init_mode=general.init_mode)

    def references(self, workload: Workload, regime: Any = None) -> References:
        """The references that the worker has prepared, if it has."""
        here = prepared.get(self._example.digest)
        if here is None or not here.references:
            return super().references(workload, regime)
        return here.references[self.rank]

    def _trained(self, example: Example, workload: Workload, plan: Plan, adapter: Adapter) -> TrainingHistory:
        self.here.steps_trained = 0
        try:
            return self.train(workload, plan, example.regime, adapter=adapter)
        except Exception as error:
            if _declines(error, example, self.here.steps_trained):
                self.report.measurements[DECLINED] = f"{type(error).__name__}: {_first_line(error)}"
            raise

    def _check_values(self, example: Example, run: TrainingHistory, workload: Workload) -> None:
        # A parameter that no step uses may have a gradient of zeros (R117).
        lenient = not uses_all(example) and not self.declares("unused_untouched")
        self.check_parity(run, workload, example.regime, none_or_zero=lenient)
        if example.regime.happens(Action.RAISE):
            expected = self.references(workload, example.regime).expected.caught
            self.expect_equal("R160", "exceptions that reached the caller", run.caught, expected, check="the exception")
            left = "units that a recovery left unsharded"
            self.expect_equal("R161", left, run.left_unsharded, [], check="clean after recovery")

    def _check_rounding(
        self, example: Example, run: TrainingHistory, workload: Workload, here: Prepared | None
    ) -> None:
        kinds = [Kind.LOSS, Kind.GRADIENT, Kind.PARAMETER]
        if here is None:
            with self.blaming("suite"):
                here = prepare(example)
        self.check(rounds_alike(run, here.rounded[self.rank], requirement="R084", kinds=kinds))

    def _check_ranks(self, example: Example, run: TrainingHistory) -> None:
        self.check_same_on_every_rank(run, "R007")
        if "unused_divergent" not in asks(example):
            self.check_same_schedule(run, "R067")

    def _check_sharding(
        self, example: Example, run: TrainingHistory, workload: Workload, plan: Plan, adapter: Adapter
    ) -> None:
        """Check bytes and traffic, where the schedule determines them."""
        regime = example.regime
        disturbed = regime.frozen_at or regime.eval_between or regime.events
        usual = uses_all(example) and not example.model.calls and not disturbed
        if not usual or plan.sharding is Sharding.NONE or plan.persist_numel or example.model.frozen:
            return
        # Which units a policy has chosen, only the engine knows.
        knows = plan.auto_wrap is None and (self.declares("sharded_state") or regime.steps > 1)
        if shard_group_size(example) > 1 and knows:
            self.check_resharded(adapter, workload, "R035", run, plan)
        if regime.eval_before or regime.idle_forwards:
            return
        tensors = run.initial_params.values()
        whole = sum(tensor.nbytes for tensor in tensors)
        if plan.param_dtype is None and whole >= _SHOWS_SHARDING * len(tensors):
            padding = self.padding + _ALIGNMENT * len(tensors) * example.world_size / whole
            self.check(partition.sharding_witness(run, plan, world_size=example.world_size, padding=padding))


def payload(order: str, example: Example) -> str:
    """The JSON that the ranks of an example receive."""
    return json.dumps({"order": json.loads(order), "example": example.to_json()})


def run_on(example: Example, implementation: str, *, base: RunSettings) -> CaseRecord:
    """
    The record of an example on fresh ranks, as `base` says.

    Raises SuiteError, with unittest's output, if it ends without a record.
    """
    before, description = run_settings.current(), run_settings.description()
    run_settings.use(replace(base, implementation=implementation))
    try:
        test = DrawnCase("test_drawn")
        test.example = example
        result = unittest.TestResult()
        test.run(result)  # type: ignore[no-untyped-call]
    finally:
        run_settings.use(before, description)
    if test.record is None:
        texts = [text for _, text in [*result.errors, *result.failures]] + [reason for _, reason in result.skipped]
        raise SuiteError(f"{test.case.id} on {implementation} ended without a record:\n" + "\n".join(texts))
    return test.record


def bind(owner: type[DrawnCase], example: Example) -> None:
    """Make a class of `DrawnCase` the case of one example."""
    owner.example = example

    def test_drawn(self: DrawnCase) -> None:
        DrawnCase.test_drawn(self)

    test_drawn.__doc__ = DrawnCase.test_drawn.__doc__
    setattr(test_drawn, CASE_ATTRIBUTE, case_for(example))
    owner.test_drawn = test_drawn  # type: ignore[method-assign]


def declined_by(measurements: Mapping[str, Any]) -> str | None:
    """Why the engine declined the combination, from a record's measurements; None if it did not."""
    declines = measurements.get(DECLINED)
    return next(iter(declines.values()), None) if isinstance(declines, dict) else declines


def _order_text(sent: Any) -> str:
    data = json.loads(sent)
    return json.dumps(data["order"]) if "order" in data else str(sent)


def _declines(error: Exception, example: Example, steps_trained: int) -> bool:
    """
    True if an exception is the engine's way to decline a combination.

    It must come before anything was trained, and be made for it. Two backwards through one forward may be rejected
    wherever the second one fails (R156).
    """
    if steps_trained:
        return False
    deliberate = why_no_refusal(error, [""]) is None
    if example.regime.backwards_per_forward > 1:
        return deliberate
    return deliberate and isinstance(error, (Unsupported, NotImplementedError, ValueError))


def _first_line(error: Exception) -> str:
    return next(iter(str(error).splitlines()), "")[:160]
