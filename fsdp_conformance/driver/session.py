"""
Trains an implementation through its adapter according to the regime, and records what happens: the subject's history.

This loop is for the subject only; the references have a separate one (`references.loop`), so that a mistake cannot
hide in both.

A step, with the labels of its collectives in the log:

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

On an accelerator nothing within a step makes the host wait: inputs are on the device before setup, and losses and
outputs stay there until the step's observation. A wait orders everything before it, so a loop that waits would hide
races. On the simulated accelerator, observations are suspended: they order nothing. On a real one an observation waits,
and hides the races between steps; there an `undisturbed` run, which observes only its end, shows what they do.
"""

from __future__ import annotations

import gc
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from fsdp_conformance.adapters.base import Adapter, OptimFn
from fsdp_conformance.adapters.names import OriginalNames
from fsdp_conformance.adapters.optimizers import Several
from fsdp_conformance.adapters.sharded import full_copy, materialise_norm
from fsdp_conformance.adapters.structures import map_tensors, moved
from fsdp_conformance.adapters.torch_like import compute_device
from fsdp_conformance.driver.pipeline import Pipeline
from fsdp_conformance.driver.watch import Watch, watch_for
from fsdp_conformance.errors import AdapterError, ConfigError, SuiteError, Unsupported
from fsdp_conformance.faults.fault import Fault
from fsdp_conformance.harness import context
from fsdp_conformance.harness.accounting import Part
from fsdp_conformance.harness.recording import process_group
from fsdp_conformance.history.memory import MemoryMark, Point
from fsdp_conformance.history.training import StepRecord, TrainingHistory
from fsdp_conformance.plan import Plan
from fsdp_conformance.workload.definition import Batch, BatchKey, Fuse, Regime, Workload
from fsdp_conformance.workload.events import Action, Event, Moment

if TYPE_CHECKING:
    from fsdp_conformance.driver.pipeline_stage import Passes

#: Kinds of `Adapter.local_tensors` whose bytes are counted while gradients exist.
_BEFORE_STEP = frozenset({"grads"})

#: Actions that use a batch.
_FORWARDS = frozenset({Action.EVALUATE, Action.FORWARD})

#: Flags without which an adapter cannot be asked for an action; other actions need none.
EVENT_FLAGS = {
    Action.UNSHARD: "manual_unshard",
    Action.LEARNING_RATE: "learning_rate",
    Action.ZEROS: "zero_grads",
    Action.WRITE: "writeback_direct",
    Action.ASSIGN: "writeback_direct",
    Action.WRITE_GRADIENT: "writeback_direct",
    Action.ASSIGN_GRADIENT: "writeback_direct",
    Action.SAVE: "checkpoint",
    Action.LOAD: "checkpoint",
    Action.RAISE: "exception_recovery",
}

#: The pass that raises after a moment. At other moments the code between the passes does.
_RAISING = {Moment.FORWARD: "forward", Moment.LOSS: "backward"}


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
    *,
    rank: int,
    world_size: int,
    faults: Sequence[Fault] = (),
    observe: bool = True,
    undisturbed: bool = False,
    on_setup: Callable[[Adapter], object] | None = None,
    on_loss: Callable[[Adapter, int], object] | None = None,
    on_gradients: Callable[[Adapter, int], object] | None = None,
    on_step: Callable[[int], object] | None = None,
    after_step: Callable[[Adapter, int], object] | None = None,
    first_step: int = 0,
    inputs_on_cpu: bool = False,
    new_directory: Callable[[], Path] | None = None,
) -> TrainingHistory:
    """
    Set the adapter up and train the workload according to the regime. Collective.

    The regime's micro-batches, clipping and deferred reduction go into the plan; losses are scaled if it says so. The
    adapter must be new; it stays open, so that the caller can inspect it. Faults are prepared with the model, installed
    after setup and removed at the end. With `observe=False`, only losses and the final parameters are read; with
    `undisturbed` these too are read at the end, and from the first forward on the loop itself neither waits for the
    device, nor reads from it, nor collects garbage. `on_setup`
    is called after setup and before initial values are recorded; `on_loss`, with the step, between a loss and its
    backward, like a user's own code; `on_gradients` after a step's gradients are complete, as an observer; `on_step`
    with each step whose optimizer step has returned, and `after_step` then with the adapter too, like a user's own
    code. With `inputs_on_cpu`, batches stay on the CPU for the engine to move. A run that continues another one begins
    with `first_step`; `on_setup` then loads what the other one has saved. `new_directory` makes a directory that all
    ranks see, for a regime that saves checkpoints; collective.

    A plan with stages makes this rank train one stage; the history has what all stages together have.

    Raises Unsupported for a plan with undeclared flags, or for a regime that the adapter cannot follow, and ConfigError
    for stages that the world or the regime does not fit.
    """
    plan = _with_regime(plan, workload, regime)
    adapter.refuse_undeclared(plan)
    for flag, why in _flags_of(workload, regime).items():
        if flag not in adapter.declared():
            raise Unsupported(flag, f"the regime needs it: {why}")
    log = process_group.log()
    begin = len(log.records)
    run = _Run(
        adapter=adapter,
        workload=workload,
        regime=regime,
        rank=rank,
        world_size=world_size,
        device=compute_device(plan),
        faults=tuple(faults),
        history=TrainingHistory(source=adapter.display_name(), rank=rank, world_size=world_size),
        observe=observe and not undisturbed,
        undisturbed=undisturbed,
        input_device=torch.device("cpu") if inputs_on_cpu else compute_device(plan),
        on_loss=on_loss,
        on_gradients=on_gradients,
        first_step=first_step,
        new_directory=new_directory,
    )
    try:
        run.join_pipeline(plan)
        run.set_up(plan, on_setup)
        with ExitStack() as installed:
            for fault in faults:
                installed.enter_context(fault)
            for step in range(first_step, regime.steps):
                run.step(step)
                if on_step is not None:
                    on_step(step)
                if after_step is not None:
                    after_step(adapter, step)
        run.finish()
    finally:
        # Recorded even if the run raised: a failure's report quotes it.
        run.note_order()
        run.history.collectives = [record for record in log.records[begin:] if record.phase != "observe"]
    return run.history


@dataclass(kw_only=True)
class _Run:
    """One training run of one rank."""

    adapter: Adapter
    workload: Workload
    regime: Regime
    rank: int
    world_size: int
    device: torch.device
    faults: tuple[Fault, ...]
    history: TrainingHistory
    observe: bool
    undisturbed: bool
    input_device: torch.device
    on_loss: Callable[[Adapter, int], object] | None
    on_gradients: Callable[[Adapter, int], object] | None
    first_step: int
    new_directory: Callable[[], Path] | None
    declared: frozenset[str] = field(init=False)
    watch: Watch = field(init=False)
    names: OriginalNames = field(init=False)

    def __post_init__(self) -> None:
        self.declared = self.adapter.declared()
        self.log = process_group.log()
        self.watch = watch_for(self.device)
        self._batches: dict[tuple[int, int], list[Batch]] = {}
        self._spent: list[Batch] = []
        self._built: dict[str, nn.Parameter] = {}
        """The parameters of the newly built model by name, if an optimizer needs their names."""
        self._kept: list[Tensor] = []
        self._unread: list[tuple[StepRecord, list[Tensor]]] = []
        """Of an undisturbed run: the steps so far, and their losses on the device."""
        self._evaluated: list[Any] = []
        self._fuse: Fuse | None = None
        self._units: tuple[str, ...] = ()
        """The units of the plan, and the root."""
        self._saved: Path | None = None
        """The last checkpoint."""
        self._pipeline: Pipeline | None = None

    def join_pipeline(self, plan: Plan) -> None:
        """Take this rank's place among the stages of a plan that has them. Collective."""
        if plan.stages:
            with self._phase("setup"), context.working(Part.SUITE):
                self._pipeline = Pipeline(
                    plan,
                    self.workload,
                    self.regime,
                    rank=self.rank,
                    world_size=self.world_size,
                    device=self.device,
                )

    def set_up(self, plan: Plan, on_setup: Callable[[Adapter], object] | None) -> None:
        self.watch.begin()
        self._units = ("", *plan.units)
        if self.device.type != "cpu":
            self._place_batches()
        self._mark(Point.BEFORE_SETUP)

        def build() -> nn.Module:
            with context.working(Part.SUITE):
                model = self._build_on_meta() if plan.meta_init else self.workload.build(self.rank)
                if self._pipeline is not None:
                    self._pipeline.cut(model)
                for fault in self.faults:
                    fault.prepare(model)
            self.names = OriginalNames(model)
            if self.workload.fuse is not None:
                self._fuse = self.workload.fuse(model)
            if self.regime.optimizer in self.workload.optimizer_sets:
                self._built = dict(model.named_parameters())
            return model

        if self._pipeline is not None:
            plan = self._pipeline.plan_of_stage(plan)
        with self._phase("setup"):
            self.adapter.setup(build, self._optim_fn(), plan)
            if self.regime.init_scale is not None:
                self.adapter.scale_losses(self.regime.init_scale, self.regime.growth_interval)
            if self.regime.optimizer_in_backward:
                self._step_in_backward()
            if on_setup is not None:
                on_setup(self.adapter)
        self._mark(Point.SETUP)
        self.history.requires_grad = self._requires_grad()
        with self._observing():
            self.history.initial_params = self._whole(self.adapter.full_params())
            self.history.initial_buffers = self._buffers()
        self.adapter.train(True)

    def _build_on_meta(self) -> nn.Module:
        if self.workload.build_on_meta is None:
            raise SuiteError(f"{self.workload.name} must have build_on_meta for a plan with meta_init, got None")
        return self.workload.build_on_meta(self.rank)

    def step(self, step: int) -> None:
        if step == self.first_step > 0 and (names := self.regime.frozen(step - 1)) is not None:
            # What the run that it continues had frozen; this step's own events follow.
            self.adapter.set_requires_grad(names)
        record = StepRecord(step=step, losses=[])
        self.history.steps.append(record)
        with self._timed(step):
            for event, begun in self.regime.attempts(step):
                self._attempt(event, begun)
            self._happen(Moment.STEP, step)
            if self._pipeline is not None:
                with self._phase("pipeline", step):
                    batches = [self._batch(step, micro) for micro in range(self.regime.micro_batches)]
                    self._pipeline.step(self._passes(step), batches, self.adapter.pipeline_module())
            elif self.regime.pipeline:
                self._pipelined(record)
            else:
                for micro in range(self.regime.micro_batches):
                    self._happen(Moment.FORWARD, step, micro)
                    with self._context(micro):
                        self._backward(step, self._forward_loss(record, micro))
                    self._happen(Moment.BACKWARD, step, micro)
            self._mark(Point.BACKWARD, step)
        with self._observing(step):
            # With the optimizer in backward, the gradients are gone. Scaled ones are not kept: they may be infinite or
            # NaN, and no two NaNs are equal.
            kept = not self.regime.optimizer_in_backward and self.regime.init_scale is None
            if self.observe and "full_grads" in self.declared and kept:
                record.grads = self._whole(self.adapter.full_grads())
            if self.on_gradients is not None:
                self.on_gradients(self.adapter, step)
            if step == self.regime.steps - 1 and not self.undisturbed:
                self._weigh(lambda kind: kind in _BEFORE_STEP)
        norm = None
        with self._timed(step):
            self._happen(Moment.OPTIMIZER, step)
            self._reach("before_step", step)
            with self._phase("step", step):
                if self.regime.skips(step):
                    self.adapter.drop_grads(list(self.history.initial_params))
                else:
                    norm = self.adapter.step(**self._clipping())
        self._mark(Point.STEP, step)
        with self._timed(step):
            self._happen(Moment.END, step)
        if self.undisturbed:
            self._leave_unread(record)
            if step < self.regime.steps - 1:
                return
        with self._observing(step):
            self._fetch(record)
            record.grad_norm = None if norm is None else materialise_norm(torch.as_tensor(norm))
            if self.regime.init_scale is not None:
                record.loss_scale = torch.tensor(self.adapter.loss_scale(), dtype=torch.float64)
            if self.observe or step == self.regime.steps - 1:
                record.params = self._whole(self.adapter.full_params())
                record.buffers = self._buffers()

    def _whole(self, values: dict[str, Any]) -> dict[str, Any]:
        """Values by name, in a pipeline those of all stages. Collective."""
        return values if self._pipeline is None else self._pipeline.joined(values)

    def finish(self) -> None:
        """Count the bytes this rank holds, and those that an unsharded run would hold."""
        with self._observing():
            if not self.undisturbed:
                self._weigh(lambda kind: kind not in _BEFORE_STEP)
        self.history.final_requires_grad = self._requires_grad()
        with context.working(Part.SUITE):
            self.history.full_bytes = self._unsharded_bytes()

    def _attempt(self, event: Event, begun: int) -> None:
        """Begin so many micro-batches, let the user's code raise as the event says, catch it, and recover."""
        fuse, place = self._fuse, _RAISING.get(event.moment, "")
        if fuse is None:
            raise SuiteError(f"{self.workload.name} must have a fuse for an event that raises, got None")
        before = self._unsharded()
        try:
            for micro in range(begun):
                if place and micro == begun - 1:
                    fuse.arm(place, _code(event))
                with self._context(micro):
                    batch = self._batch(event.step, micro)
                    self._backward(event.step, self.workload.loss(self._forward(event.step, batch), batch))
            if not place:
                raise _Between
            self.history.caught.append("nothing")
        except Exception as error:
            if not isinstance(error, _Between):
                if not place or fuse.place:
                    # The engine's own: the fuse has not raised.
                    raise
                self.history.caught.append(f"{type(error).__name__}: {error}")
        fuse.arm("", 0)
        with self._phase("event", event.step):
            self.adapter.recover()
        self.history.left_unsharded += sorted(self._unsharded() - before)

    def _unsharded(self) -> frozenset[str]:
        """The units that hold full parameters, if the adapter can tell."""
        units = self._units if "sharded_state" in self.declared else ()
        return frozenset(unit or "the root" for unit in units if self.adapter.unit_is_unsharded(unit))

    def _pipelined(self, record: StepRecord) -> None:
        """The passes in the regime's order, each in the context of its micro-batch."""
        losses: dict[int, Tensor] = {}
        for kind, micro in self.regime.passes():
            with self._context(micro):
                if kind == "forward":
                    losses[micro] = self._forward_loss(record, micro)
                else:
                    self._backward(record.step, losses.pop(micro))

    def _passes(self, step: int) -> Passes:
        """What this rank's stage computes in a step."""
        from fsdp_conformance.driver.pipeline_stage import Passes

        def forward(micro: int, x: Tensor) -> Tensor:
            with self._context(micro):
                output: Tensor = self._forward(step, Batch(args=(x,)))
            self._mark(Point.FORWARD, step)
            self._reach("after_loss", step)
            return output

        def loss(output: Tensor, target: Any) -> Tensor:
            found = self.workload.loss(output, Batch(target=target))
            self._kept.append(_kept(found))
            return found

        def backward(micro: int, loss: Tensor) -> None:
            with self._context(micro):
                self._backward(step, loss)

        return Passes(forward, loss, backward)

    def _context(self, micro: int) -> AbstractContextManager[Any]:
        """The adapter's context for a micro-batch."""
        last = micro == self.regime.micro_batches - 1
        return self.adapter.microbatch(last, reduced=self.regime.is_reduced(micro))

    def _forward_loss(self, record: StepRecord, micro: int) -> Tensor:
        """A micro-batch's forward and its loss."""
        batch = self._batch(record.step, micro)
        output = self._forward(record.step, batch)
        loss = self.workload.loss(output, batch)
        self._kept.append(_kept(loss))
        if self.regime.keep_outputs:
            record.outputs.append(_kept(output))
        self._mark(Point.FORWARD, record.step)
        self._happen(Moment.LOSS, record.step, micro)
        self._reach("after_loss", record.step)
        return loss

    def _backward(self, step: int, loss: Tensor) -> None:
        if self.on_loss is not None:
            self.on_loss(self.adapter, step)
        parts = self.regime.backwards_per_forward
        with self._phase("backward", step):
            for part in range(parts):
                self.adapter.backward(loss / parts if parts > 1 else loss, retain_graph=part < parts - 1)

    def _forward(self, step: int, batch: Batch) -> Any:
        with self._phase("forward", step):
            return self.adapter.forward(*batch.args, **batch.kwargs)

    def _happen(self, moment: Moment, step: int, micro: int = 0) -> None:
        """Make the events at a point happen on this rank."""
        for event in self.regime.at(moment, step, micro):
            if event.happens_on(self.rank):
                self._make_happen(event)

    def _make_happen(self, event: Event) -> None:
        adapter, step = self.adapter, event.step
        match event.action:
            case Action.EVALUATE:
                self._evaluate(step, event.micro)
            case Action.FORWARD:
                self._forward(step, self._batch(step, event.micro))
            case Action.READ:
                with self._observing(step):
                    self.history.reads.append(adapter.full_params())
            case Action.TOGGLE:
                adapter.train(False)
                adapter.train(True)
            case Action.UNSHARD:
                with self._phase("event", step):
                    for unit in event.names:
                        adapter.unshard(unit)
                        adapter.reshard(unit)
            case Action.LEARNING_RATE:
                adapter.set_learning_rate(event.number)
            case Action.FREEZE:
                adapter.set_requires_grad(event.names)
            case Action.DROP:
                adapter.drop_grads(event.names)
            case Action.SKIP | Action.RAISE:
                pass  # `step` looks for them, in place of the optimizer and before everything else
            case Action.ZEROS:
                adapter.keep_zero_grads()
            case Action.WRITE | Action.ASSIGN | Action.WRITE_GRADIENT | Action.ASSIGN_GRADIENT:
                parameters = adapter.parameters()
                for name in event.names:
                    _write(parameters[name], event.action, event.number)
            case Action.SAVE:
                if self.new_directory is None:
                    raise SuiteError("training must be given `new_directory` for events that save, got None")
                self._saved = self.new_directory()
                with self._phase("event", step):
                    adapter.save_checkpoint(self._saved)
            case Action.LOAD:
                if self._saved is None:
                    raise SuiteError(f"a checkpoint must be saved before one is loaded, got none: {event.describe()}")
                with self._phase("event", step):
                    adapter.load_checkpoint(self._saved)

    def _evaluate(self, step: int, micro: int) -> None:
        batch = self._batch(step, micro)
        self.adapter.train(False)
        try:
            with torch.no_grad(), self._phase("eval", step):
                self._evaluated.append(_kept(self.adapter.forward(*batch.args, **batch.kwargs)))
        finally:
            self.adapter.train(True)

    def _optim_fn(self) -> OptimFn:
        """
        What builds the regime's optimizer, or one that stands for several; the engine calls it during setup.

        An adapter may keep it, so it refers to this run only where names are needed: otherwise a model that is dropped
        would be part of a cycle.
        """
        build = self.workload.optimizer_sets.get(self.regime.optimizer)
        if build is None:
            return self.workload.optimizers[self.regime.optimizer]
        return lambda params: Several(build(self._named(params)))

    def _named(self, params: Any) -> dict[str, nn.Parameter]:
        """The parameters that an engine hands to its optimizer, by original name."""
        given = {id(parameter) for parameter in params}
        try:
            named = self.adapter.parameters()
        except (AttributeError, NotImplementedError):
            # Not wrapped yet: they are those of the model.
            named = self._built
        unknown = len(given - {id(parameter) for parameter in named.values()})
        if unknown:
            raise AdapterError(
                f"{unknown} of {len(given)} parameters of the optimizer are not those of parameters(), "
                "as the capability orig_params promises"
            )
        return {name: parameter for name, parameter in named.items() if id(parameter) in given}

    def _step_in_backward(self) -> None:
        """Give each parameter its own optimizer, which steps when the gradient has been accumulated."""
        build = self.workload.optimizers[self.regime.optimizer]
        for name, parameter in self.adapter.parameters().items():
            if parameter.requires_grad:
                hook = partial(self._update, name, build([parameter]))
                parameter.register_post_accumulate_grad_hook(hook)  # type: ignore[no-untyped-call]

    def _update(self, name: str, optimizer: Optimizer, parameter: Tensor) -> None:
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        updates = self.history.steps[-1].updates
        updates[name] = updates.get(name, 0) + 1

    def _leave_unread(self, record: StepRecord) -> None:
        """Keep a step's losses on the device until the end of the run."""
        self._unread.append((record, self._kept))
        self._kept = []

    def _fetch(self, record: StepRecord) -> None:
        """Copy losses and outputs from the device to the host."""
        record.losses = _fetched(self._kept)
        if self._pipeline is not None:
            record.losses = self._pipeline.losses(record.losses)
        for earlier, losses in self._unread:
            earlier.losses, earlier.outputs = _fetched(losses), _fetched(earlier.outputs)
        record.outputs = _fetched(record.outputs)
        self.history.eval_outputs += _fetched(self._evaluated)
        self._kept, self._evaluated, self._unread = [], [], []

    def _place_batches(self) -> None:
        """Put the whole run's inputs on the device in advance: copying pageable memory makes the host wait."""
        with context.working(Part.SUITE), self.watch.suspended():
            for step in range(self.first_step, self.regime.steps):
                for micro in range(self.regime.micro_batches):
                    # A separate batch for each use, as on the CPU: a model may write into its inputs.
                    events = self.regime.in_step(step)
                    uses = 1 + sum(event.micro == micro and event.action in _FORWARDS for event in events)
                    uses += sum(micro < begun for _, begun in self.regime.attempts(step))
                    self._batches[step, micro] = [self._new_batch(step, micro) for _ in range(uses)]

    def _batch(self, step: int, micro: int) -> Batch:
        waiting = self._batches.get((step, micro))
        if not waiting:
            return self._new_batch(step, micro)
        # Held until the end of the run, so that the loop holds the same bytes at every mark.
        self._spent.append(waiting.pop())
        return self._spent[-1]

    def _new_batch(self, step: int, micro: int) -> Batch:
        key = BatchKey(step=step, micro=micro, rank=self.rank, world_size=self.world_size)
        return self._placed(self.workload.batch(key))

    def _placed(self, batch: Batch) -> Batch:
        """The batch with its inputs on the run's input device, and its target where the loss is computed."""
        return Batch(
            args=moved(batch.args, self.input_device),
            kwargs=moved(batch.kwargs, self.input_device),
            target=moved(batch.target, self.device),
        )

    def _clipping(self) -> dict[str, float]:
        if self.regime.max_norm is None:
            return {}
        norm_type = {} if self.regime.norm_type == 2.0 else {"norm_type": self.regime.norm_type}
        return {"max_norm": self.regime.max_norm, **norm_type}

    def _reach(self, point: str, step: int) -> None:
        for fault in self.faults:
            fault.at(point, step)

    @contextmanager
    def _timed(self, step: int) -> Iterator[None]:
        begin = time.perf_counter()
        try:
            yield
        finally:
            if not self.undisturbed and (self.observe or step == self.regime.steps - 1):
                # The observation that follows waits anyway.
                self.watch.synchronise()
            self.history.seconds += time.perf_counter() - begin

    @contextmanager
    def _phase(self, name: str, step: int | None = None) -> Iterator[None]:
        """Label collectives, and accesses on the simulated accelerator."""
        with self.log.phase(name, step), self.watch.label(name):
            yield

    @contextmanager
    def _observing(self, step: int | None = None) -> Iterator[None]:
        """Reads inside are for the history only: they neither count as training nor order it."""
        with self.log.phase("observe", step), self.watch.suspended():
            yield
        if self.watch.counts_bytes and not self.undisturbed:
            self.watch.reset_peak()

    def _mark(self, point: Point, step: int | None = None) -> None:
        if not self.watch.counts_bytes or self.undisturbed:
            return
        gc.collect()  # Otherwise the count would depend on when Python happened to collect garbage last.
        allocated, peak = self.watch.allocated_bytes(), self.watch.peak_bytes()
        self.history.memory.append(MemoryMark(point=point, step=step, allocated=allocated, peak=peak))
        self.watch.reset_peak()

    def note_order(self) -> None:
        """Record what the simulated accelerator's checker has seen."""
        if not self.watch.checks_order:
            return
        with context.working(Part.SUITE):
            self.history.hazards = self.watch.hazards()
            self.history.checked_accesses = self.watch.accesses()
            self.history.checked_streams = self.watch.streams()

    def _buffers(self) -> dict[str, Tensor]:
        """The adapter's answer, or, if it gives none, what user code finds in the wrapped module."""
        if "full_buffers" in self.declared:
            return self._whole(self.adapter.full_buffers())
        try:
            found = self.names.buffers_of(self.adapter.module())
        except NotImplementedError:
            self.history.shows_buffers = False
            return {}
        return self._whole({name: full_copy(buffer) for name, buffer in found.items()})

    def _requires_grad(self) -> dict[str, bool]:
        try:
            parameters = self.adapter.parameters()
        except NotImplementedError:
            # An adapter may expose no module; then its flags are unknown.
            return {}
        return {name: parameter.requires_grad for name, parameter in parameters.items()}

    def _weigh(self, wanted: Callable[[str], bool]) -> None:
        for kind, tensors in self.adapter.local_tensors().items():
            if wanted(kind):
                self.history.held_bytes[kind] = storage_bytes(tensors)
                self.history.shown_bytes[kind] = sum(tensor.nbytes for tensor in tensors)

    def _unsharded_bytes(self) -> dict[str, int]:
        """Bytes of parameters, gradients and optimizer state of one unsharded, trained copy."""
        model = self.workload.build(self.rank)
        parameters = list(model.parameters())
        trained = [parameter for parameter in parameters if parameter.requires_grad]
        state: list[Tensor] = []
        if trained:
            build = self.workload.optimizer_sets.get(self.regime.optimizer)
            optimizers = (
                [self.workload.optimizers[self.regime.optimizer](trained)]
                if build is None
                else build({name: value for name, value in model.named_parameters() if value.requires_grad})
            )
            for parameter in trained:
                parameter.grad = torch.zeros_like(parameter)
            for optimizer in optimizers:
                optimizer.step()
            state = [
                value
                for optimizer in optimizers
                for entries in optimizer.state.values()
                for value in entries.values()
                if isinstance(value, Tensor) and value.numel() > 1
            ]
        return {
            "params": storage_bytes(parameters),
            "grads": storage_bytes(parameter.grad for parameter in trained if parameter.grad is not None),
            "optim": storage_bytes(state),
        }


class _Between(Exception):
    """The exception of code between the passes of a step."""


def _code(event: Event) -> int:
    """What the exception of an event carries."""
    return 100 * event.step + event.micro


def _flags_of(workload: Workload, regime: Regime) -> dict[str, str]:
    """The flags that following the regime needs, each with the reason."""
    flags = {flag: f"{action} is one of its events" for action, flag in EVENT_FLAGS.items() if regime.happens(action)}
    if regime.optimizer in workload.optimizer_sets:
        flags["orig_params"] = f"the optimizer {regime.optimizer!r} treats parameters differently"
    if regime.optimizer_in_backward:
        flags["optim_in_backward"] = "the optimizer steps in backward"
    if regime.norm_type != 2.0:
        flags["clip_norm_type"] = f"it clips by the {regime.norm_type}-norm"
    if regime.pipeline:
        flags["pipelined_microbatch"] = f"its passes are in the order {regime.pipeline}"
    if regime.init_scale is not None:
        flags["grad_scaler"] = f"it scales losses, by {regime.init_scale:g} at first"
    return flags


def _write(parameter: nn.Parameter, action: Action, factor: float) -> None:
    """What a user writes to a parameter or its gradient."""
    if action is Action.WRITE:
        parameter.data.mul_(factor)
    elif action is Action.ASSIGN:
        parameter.data = parameter.data * factor
    elif parameter.grad is not None:
        # A rank without elements of a parameter may have no gradient of it.
        if action is Action.WRITE_GRADIENT:
            parameter.grad.mul_(factor)
        else:
            parameter.grad = parameter.grad * factor


def storage_bytes(tensors: Iterable[Tensor]) -> int:
    """Bytes of the storages behind `tensors`, counting a storage once however many views it has."""
    storages = {}
    for tensor in tensors:
        storage = tensor.detach().untyped_storage()
        # An empty storage has no unique address.
        if storage.nbytes():
            storages[storage.data_ptr()] = storage.nbytes()
    return sum(storages.values())


def _with_regime(plan: Plan, workload: Workload, regime: Regime) -> Plan:
    known = sorted({*workload.optimizers, *workload.optimizer_sets})
    if regime.optimizer not in known:
        raise ConfigError(
            [f"optimizer must be one of {', '.join(known)}, got {regime.optimizer!r}"],
            where=f"workload {workload.name}",
        )
    return replace(
        plan,
        micro_batches=regime.micro_batches,
        micro_batch_size=workload.micro_batch_size,
        defer_reduction=not all(regime.is_reduced(micro) for micro in range(regime.micro_batches)),
        max_norm=regime.max_norm,
    )


def _kept(value: Any) -> Any:
    """A loss or an output with every tensor detached and copied on its device; structure and types are unchanged."""
    return map_tensors(value, lambda tensor: tensor.detach().clone())


def _fetched(value: Any) -> Any:
    """A copy of `value` with all tensors on the CPU."""
    return moved(value, torch.device("cpu"))
