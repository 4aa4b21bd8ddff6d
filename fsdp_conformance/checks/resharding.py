"""
Checks from the outside that parameters are resharded between steps: what a rank has freed, it must gather again.

For implementations that cannot tell whether a unit holds full parameters (`Adapter.unit_is_unsharded`). Memory that is
held although the parameters are gathered again does not show here.
"""

from __future__ import annotations

from fsdp_conformance.checks.order import run_order
from fsdp_conformance.checks.result import CheckResult, Tally
from fsdp_conformance.checks.traffic import GATHERING, expect_bytes, in_step, of, steady_steps
from fsdp_conformance.history.training import TrainingHistory
from fsdp_conformance.plan import Plan
from fsdp_conformance.workload.definition import Workload
from fsdp_conformance.workload.units import ROOT, owning_units, parameter_bytes


def holds_whole_parameters(history: TrainingHistory) -> bool:
    """True if a rank keeps all parameters between steps by design: then there is nothing to reshard."""
    return history.held_bytes.get("params", 0) >= history.full_bytes.get("params", 0) > 0


def gathered_again(history: TrainingHistory, workload: Workload, plan: Plan, *, requirement: str) -> CheckResult:
    """
    From the second step on, every unit that runs is gathered in forward, or earlier in the step.

    So at the end of the step before, no rank held it in full. Judged by bytes: engines may gather units together.
    """
    tally = Tally("gathered again", requirement, rank=history.rank)
    entered = {*run_order(workload, plan, rank=history.rank, world_size=history.world_size), ROOT}
    units = [unit for unit in owning_units(workload, plan).shared if unit.fqn in entered]
    for step in steady_steps(history):
        before_backward = [*in_step(history, step.step - 1, "step"), *in_step(history, step.step, "eval", "forward")]
        expect_bytes(
            tally, "parameters gathered", of(before_backward, *GATHERING), least=parameter_bytes(units),
            step=step.step, phase="reshard",
            details="the parameters that are not gathered were left unsharded by the step before",
        )  # fmt: skip
    return tally.result()
