"""
Trains an implementation through its adapter according to the regime, and records what happens: the subject's history.

This loop is for the subject only; the references have a separate one (`references.loop`), so that a mistake cannot
hide in both.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from typing import Any

from fsdp_conformance.adapters.base import Adapter
from fsdp_conformance.adapters.torch_like import compute_device
from fsdp_conformance.driver.events import EVENT_FLAGS
from fsdp_conformance.driver.loop import TrainingLoop
from fsdp_conformance.driver.recorder import Recorder
from fsdp_conformance.driver.task import Conditions, Observer, Task, World
from fsdp_conformance.errors import ConfigError, Unsupported
from fsdp_conformance.history.training import TrainingHistory
from fsdp_conformance.plan import Plan
from fsdp_conformance.workload.definition import Regime, Workload


def plan_for(workload: Workload, regime: Regime, plan: Plan | None = None) -> Plan:
    """
    The plan that tells an engine in advance what the workload and the regime require.

    Units, local units and ignored submodules come from the workload if the plan names none.
    """
    plan = plan or Plan()
    structure: dict[str, Any] = {
        "units": plan.units or (() if plan.auto_wrap else workload.units),
        "local_units": plan.local_units or workload.local_units,
        "ignored": plan.ignored or workload.ignored,
    }
    return _with_regime(replace(plan, **structure), workload, regime)


def train(
    adapter: Adapter,
    workload: Workload,
    plan: Plan,
    regime: Regime,
    world: World,
    observer: Observer | None = None,
    conditions: Conditions | None = None,
) -> TrainingHistory:
    """
    Set the adapter up and train the workload according to the regime. Collective.

    The regime's micro-batches, clipping and deferred reduction go into the plan; losses are scaled if it says so. The
    adapter must be new; it stays open, so that the caller can inspect it. A plan with stages makes this rank train one
    stage; the history has what all stages together have.

    Raises Unsupported for a plan with undeclared flags, or for a regime that the adapter cannot follow, and ConfigError
    for stages that the world or the regime does not fit.
    """
    with training(adapter, workload, plan, regime, world, observer, conditions) as steps:
        for _ in steps:
            pass
    return steps.history


class Steps:
    """The steps of a training that has been set up: each is trained when the next one is asked for."""

    def __init__(self, loop: TrainingLoop, recorder: Recorder) -> None:
        self._loop = loop
        self.history = recorder.history
        self._numbers = iter(range(recorder.task.conditions.first_step, recorder.task.regime.steps))

    def __iter__(self) -> Steps:
        return self

    def __next__(self) -> int:
        """Train a step, and return its number. Collective."""
        step = next(self._numbers)
        self._loop.step(step)
        return step


@contextmanager
def training(
    adapter: Adapter,
    workload: Workload,
    plan: Plan,
    regime: Regime,
    world: World,
    observer: Observer | None = None,
    conditions: Conditions | None = None,
) -> Iterator[Steps]:
    """
    As `train`, but each step is trained when the caller asks for it. The history is complete after the context.

    Raises what `train` raises.
    """
    plan = _with_regime(plan, workload, regime)
    adapter.refuse_undeclared(plan)
    for flag, why in _flags_of(workload, regime).items():
        if flag not in adapter.declared():
            raise Unsupported(flag, f"the regime needs it: {why}")
    task = Task(
        adapter=adapter,
        workload=workload,
        regime=regime,
        world=world,
        device=compute_device(plan),
        observer=observer or Observer(),
        conditions=conditions or Conditions(),
    )
    recorder = Recorder(task)
    loop = TrainingLoop(task, recorder)
    try:
        loop.join_pipeline(plan)
        loop.set_up(plan)
        with ExitStack() as installed:
            for fault in task.conditions.faults:
                fault.install()
                # The case judges faults that never struck.
                installed.callback(fault.remove, must_have_struck=False)
            yield Steps(loop, recorder)
            loop.finish()
        recorder.finish()
    finally:
        recorder.close()


def _flags_of(workload: Workload, regime: Regime) -> dict[str, str]:
    """The flags that following the regime needs, each with the reason."""
    flags = {flag: f"{action} is one of its events" for action, flag in EVENT_FLAGS.items() if regime.happens(action)}
    if regime.optimizer in workload.optimizer_sets:
        flags["orig_params"] = f"the optimizer {regime.optimizer!r} treats parameters differently"
    if regime.backward_from == "output":
        flags["explicit_gradient"] = "the user calls backward on the output"
    if regime.clearing != "optimizer":
        flags["own_clearing"] = "the user clears gradients"
    if regime.sums:
        flags["divide_factor"] = "gradients are sums over the ranks"
    if regime.optimizer_in_backward:
        flags["optim_in_backward"] = "the optimizer steps in backward"
    if regime.norm_type != 2.0:
        flags["clip_norm_type"] = f"it clips by the {regime.norm_type}-norm"
    if regime.pipeline:
        flags["pipelined_microbatch"] = f"its passes are in the order {regime.pipeline}"
    if regime.init_scale is not None:
        flags["grad_scaler"] = f"it scales losses, by {regime.init_scale:g} at first"
    return flags


def _with_regime(plan: Plan, workload: Workload, regime: Regime) -> Plan:
    names = sorted({*workload.optimizers, *workload.optimizer_sets})
    if regime.optimizer not in names:
        raise ConfigError(
            [f"optimizer must be one of {', '.join(names)}, got {regime.optimizer!r}"],
            where=f"workload {workload.name}",
        )
    return replace(
        plan,
        micro_batches=regime.micro_batches,
        micro_batch_size=workload.micro_batch_size,
        defer_reduction=not all(regime.is_reduced(micro) for micro in range(regime.micro_batches)),
        max_norm=regime.max_norm,
    )
