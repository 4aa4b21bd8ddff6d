"""
The loop that trains an implementation through its adapter: a step, with the labels of its collectives in the log.

    attempts             one for each event that raises: passes up to it, and the engine's recovery
    events               before the step
    each micro-batch     events before the forward
                         "forward"
                         events, and the fault point after_loss, between forward and backward
                         "backward"
                         events after the backward. In a pipeline other micro-batches' passes may lie in between, too
                         With stages, the sends and receives of the pipeline are "pipeline"
    gradients            "observe"   full gradients are read, before clipping
    events               before the optimizer
    fault point          before_step
    optimizer            "step"      clipping, update, zero_grad
    events               after the optimizer
    parameters           "observe"   losses, full parameters and buffers are read

The collectives of an event are labelled "eval", "forward" or "observe", or "event" if they are none of these.
"""

from __future__ import annotations

from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from fsdp_conformance.adapters.names import OriginalNames
from fsdp_conformance.driver.batches import Batches
from fsdp_conformance.driver.events import Events
from fsdp_conformance.driver.further_step import clear_gradients, run_backwards
from fsdp_conformance.driver.optimizer import RegimeOptimizer
from fsdp_conformance.driver.pipeline import Pipeline
from fsdp_conformance.driver.recorder import Recorder
from fsdp_conformance.driver.task import Task
from fsdp_conformance.errors import SuiteError
from fsdp_conformance.harness import context
from fsdp_conformance.harness.accounting import Part
from fsdp_conformance.history.memory import Point
from fsdp_conformance.history.training import StepRecord, random_state
from fsdp_conformance.plan import Plan
from fsdp_conformance.workload.definition import Batch, Fuse
from fsdp_conformance.workload.events import Event, Moment

if TYPE_CHECKING:
    from fsdp_conformance.driver.pipeline_stage import Passes

#: The pass that raises after a moment. At other moments the code between the passes does.
_RAISING = {Moment.FORWARD: "forward", Moment.LOSS: "backward"}


class TrainingLoop:
    """One training of one rank."""

    def __init__(self, task: Task, recorder: Recorder) -> None:
        self._task = task
        self._recorder = recorder
        self._batches = Batches(task)
        self._events = Events(recorder, self._batches)
        self._optimizer = RegimeOptimizer(task)
        self._fuse: Fuse | None = None
        self._pipeline: Pipeline | None = None

    def join_pipeline(self, plan: Plan) -> None:
        """Take this rank's place among the stages of a plan that has them. Collective."""
        if plan.stages:
            task = self._task
            with self._recorder.phase("setup"), context.working(Part.SUITE):
                self._pipeline = Pipeline(
                    plan,
                    task.workload,
                    task.regime,
                    rank=task.world.rank,
                    world_size=task.world.size,
                    device=task.device,
                )
            self._recorder.pipeline = self._pipeline

    def set_up(self, plan: Plan) -> None:
        """Set the adapter up with a model and its optimizer."""
        task, recorder = self._task, self._recorder
        recorder.watch.begin()
        recorder.units = ("", *plan.units)
        if task.device.type != "cpu":
            self._batches.place(recorder.watch)
        recorder.mark(Point.BEFORE_SETUP)

        def build() -> nn.Module:
            return self._build(meta=plan.meta_init)

        plan_of_rank = plan if self._pipeline is None else self._pipeline.plan_of_stage(plan)
        with recorder.phase("setup"):
            random_before = random_state()
            task.adapter.setup(build, self._optimizer.optim_fn(), plan_of_rank)
            if not plan.meta_init and random_state() != random_before:
                # On meta, the values are drawn now.
                recorder.history.drawn_by.append("wrapping")
            if task.regime.init_scale is not None:
                task.adapter.scale_losses(task.regime.init_scale, task.regime.growth_interval)
            if task.regime.sums:
                task.adapter.divide_gradients_by(1.0)
            if task.regime.optimizer_in_backward:
                recorder.own_optimizers = self._optimizer.step_in_backward(recorder.history)
            if task.regime.clearing != "optimizer":
                task.adapter.leave_grads()
            task.observer.on_setup(task.adapter)
        recorder.mark(Point.SETUP)
        recorder.record_setup()
        task.adapter.train(True)

    def _build(self, *, meta: bool) -> nn.Module:
        """The model of this rank, before the engine wraps it."""
        workload, rank = self._task.workload, self._task.world.rank
        with context.working(Part.SUITE):
            if not meta:
                model = workload.build(rank)
            elif workload.build_on_meta is None:
                raise SuiteError(f"{workload.name} must have build_on_meta for a plan with meta_init, got None")
            else:
                model = workload.build_on_meta(rank)
            if self._pipeline is not None:
                self._pipeline.cut(model)
            for fault in self._task.conditions.faults:
                fault.prepare(model)
        self._recorder.names = OriginalNames(model)
        if workload.fuse is not None:
            self._fuse = workload.fuse(model)
        self._optimizer.note_model(model)
        return model

    def step(self, step: int) -> None:
        """Train one step."""
        task, recorder = self._task, self._recorder
        if step == task.conditions.first_step > 0:
            # Restore what earlier steps have left in the run that this one continues; this step's own events follow.
            self._events.continue_mode(step)
            if (names := task.regime.frozen(step - 1)) is not None:
                task.adapter.set_requires_grad(names)
        record = recorder.begin_step(step)
        with recorder.timed(step):
            for event, begun in task.regime.attempts(step):
                self._attempt(event, begun)
            self._events.happen(Moment.STEP, step)
            self._passes_of(record)
            recorder.mark(Point.BACKWARD, step)
        record.unsharded_after_backward = recorder.unsharded_if_known()
        recorder.record_gradients(record)
        norm = None
        with recorder.timed(step):
            self._events.happen(Moment.OPTIMIZER, step)
            self._reach("before_step", step)
            with recorder.phase("step", step):
                if task.regime.skips(step):
                    task.adapter.drop_grads(list(recorder.history.initial_params))
                else:
                    norm = task.adapter.step(**task.regime.clipping())
                    if task.regime.clearing != "optimizer" and task.regime.clears(step):
                        clear_gradients(task.adapter)
        recorder.mark(Point.STEP, step)
        record.unsharded_after_step = recorder.unsharded_if_known()
        with recorder.timed(step):
            self._events.happen(Moment.END, step)
        recorder.record_step(record, norm)
        task.observer.after_step(task.adapter, step)

    def finish(self) -> None:
        """Finish what the last step has left open. Collective."""
        self._events.end()

    def _passes_of(self, record: StepRecord) -> None:
        """The forwards and backwards of a step: those of this rank's stage, in the regime's order, or one by one."""
        task, step = self._task, record.step
        if self._pipeline is not None:
            with self._recorder.phase("pipeline", step):
                batches = [self._batches.batch(step, micro) for micro in range(task.regime.micro_batches)]
                self._pipeline.step(self._passes(step), batches, task.adapter.pipeline_module())
        elif task.regime.pipeline:
            self._pipelined(record)
        else:
            for micro in range(task.regime.micro_batches):
                self._events.happen(Moment.FORWARD, step, micro)
                batch = self._batches.batch(step, micro)
                with self._context(micro):
                    output, loss = self._forward_loss(record, micro, batch)
                    if task.regime.backward_from == "output":
                        self._backward_from(step, output, batch)
                    else:
                        self._backward(step, loss)
                self._recorder.add_input_gradients(batch)
                self._events.happen(Moment.BACKWARD, step, micro)

    def _pipelined(self, record: StepRecord) -> None:
        """The passes in the regime's order, each in the context of its micro-batch."""
        losses: dict[int, Tensor] = {}
        for kind, micro in self._task.regime.passes():
            with self._context(micro):
                if kind == "forward":
                    _, losses[micro] = self._forward_loss(record, micro, self._batches.batch(record.step, micro))
                else:
                    self._backward(record.step, losses.pop(micro))

    def _passes(self, step: int) -> Passes:
        """The computations of this rank's stage in a step."""
        from fsdp_conformance.driver.pipeline_stage import Passes

        def forward(micro: int, x: Tensor) -> Tensor:
            with self._context(micro):
                output: Tensor = self._forward(step, Batch(args=(x,)))
            self._recorder.mark(Point.FORWARD, step)
            self._reach("after_loss", step)
            return output

        def loss(output: Tensor, target: Any) -> Tensor:
            value = self._task.workload.loss(output, Batch(target=target))
            self._recorder.add_loss(value)
            return value

        def backward(micro: int, loss: Tensor) -> None:
            with self._context(micro):
                self._backward(step, loss)

        return Passes(forward, loss, backward)

    def _context(self, micro: int) -> AbstractContextManager[Any]:
        """The adapter's context for a micro-batch."""
        last = micro == self._task.regime.micro_batches - 1
        return self._task.adapter.microbatch(last, reduced=self._task.regime.is_reduced(micro))

    def _forward_loss(self, record: StepRecord, micro: int, batch: Batch) -> tuple[Any, Tensor]:
        """A micro-batch's output and its loss."""
        output = self._forward(record.step, batch)
        loss = self._task.workload.loss(output, batch)
        record.random_states.append(random_state())
        self._recorder.add_loss(loss)
        self._recorder.add_output(record, output)
        self._recorder.mark(Point.FORWARD, record.step)
        record.unsharded_after_forward.append(self._recorder.unsharded_if_known())
        self._events.happen(Moment.LOSS, record.step, micro)
        self._reach("after_loss", record.step)
        return output, loss

    def _backward_from(self, step: int, output: Any, batch: Batch) -> None:
        """A backward that the user begins at the output, with the loss's gradient for it."""
        leaf = output.detach().requires_grad_()
        (gradient,) = torch.autograd.grad(self._task.workload.loss(leaf, batch), [leaf])
        with self._recorder.phase("backward", step):
            torch.autograd.backward([output], [gradient])

    def _backward(self, step: int, loss: Tensor) -> None:
        self._task.observer.on_loss(self._task.adapter, step)
        with self._recorder.phase("backward", step):
            run_backwards(self._task.adapter, loss, self._task.regime)

    def _forward(self, step: int, batch: Batch) -> Any:
        with self._recorder.phase("forward", step):
            return self._task.adapter.forward(*batch.args, **batch.kwargs)

    def _attempt(self, event: Event, begun: int) -> None:
        """Begin `begun` micro-batches, let the user's code raise as the event says, catch it, and recover."""
        fuse, place = self._fuse, _RAISING.get(event.moment, "")
        if fuse is None:
            raise SuiteError(f"{self._task.workload.name} must have a fuse for an event that raises, got None")
        before = self._recorder.unsharded()
        try:
            for micro in range(begun):
                if place and micro == begun - 1:
                    fuse.arm(place, _code(event))
                with self._context(micro):
                    batch = self._batches.batch(event.step, micro)
                    self._backward(event.step, self._task.workload.loss(self._forward(event.step, batch), batch))
            if not place:
                raise _Between
            self._recorder.history.caught.append("nothing")
        except Exception as error:
            if not isinstance(error, _Between):
                if not place or fuse.place:
                    # An exception of the engine: the fuse has not raised.
                    raise
                self._recorder.history.caught.append(f"{type(error).__name__}: {error}")
        fuse.arm("", 0)
        with self._recorder.phase("event", event.step):
            self._task.adapter.recover()
        self._recorder.history.left_unsharded += sorted(self._recorder.unsharded() - before)

    def _reach(self, point: str, step: int) -> None:
        for fault in self._task.conditions.faults:
            fault.at(point, step)


class _Between(Exception):
    """The exception of code between the passes of a step."""


def _code(event: Event) -> int:
    """The number that the exception of an event carries."""
    return 100 * event.step + event.micro
