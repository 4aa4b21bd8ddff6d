"""
The recorder of a training: labels, times, bytes, and the values of each step.

On an accelerator nothing within a step makes the host wait: losses and outputs stay on the device until the step's
observation. A wait orders everything before it, so a loop that waits would hide races. On the simulated accelerator,
observations are suspended: they order nothing. On a real one an observation waits, and hides the races between steps;
there an `undisturbed` run, which observes only its end, shows what they do.
"""

from __future__ import annotations

import gc
import time
import weakref
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from fsdp_conformance.adapters.names import OriginalNames
from fsdp_conformance.adapters.sharded import full_copy, materialise_norm, same_tensors, state_tensors
from fsdp_conformance.adapters.structures import map_tensors, moved
from fsdp_conformance.driver.pipeline import Pipeline
from fsdp_conformance.driver.task import Task
from fsdp_conformance.driver.watch import Watch, watch_for
from fsdp_conformance.harness import context, host_memory
from fsdp_conformance.harness.accounting import Part
from fsdp_conformance.harness.recording import process_group
from fsdp_conformance.history.memory import MemoryMark, Point
from fsdp_conformance.history.training import StepRecord, TrainingHistory
from fsdp_conformance.workload.definition import Batch

#: Kinds of `Adapter.local_tensors` whose bytes are counted while gradients exist.
_BEFORE_STEP = frozenset({"grads"})

#: The end of labels of a training beside another one.
BESIDE = " beside"


class Recorder:
    """Writes the history of one rank."""

    names: OriginalNames
    """The original names in the model; set when it has been built."""

    def __init__(self, task: Task) -> None:
        self.task = task
        self.history = TrainingHistory(
            source=task.adapter.display_name(), rank=task.world.rank, world_size=task.world.size
        )
        self.declared = task.adapter.declared()
        self.watch = Watch() if task.conditions.beside else watch_for(task.device)
        self.pipeline: Pipeline | None = None
        self.units: tuple[str, ...] = ()
        """The units of the plan, and the root."""
        self.own_optimizers: list[torch.optim.Optimizer] = []
        """The optimizers that step in backward, which the engine does not have."""
        self._log = process_group.log()
        self._begin = len(self._log.records)
        self._losses: list[Tensor] = []
        """The losses of the current step, on the device."""
        self._unread: list[tuple[StepRecord, list[Tensor]]] = []
        """The steps of an undisturbed run so far, and their losses on the device."""
        self._evaluated: list[Any] = []
        self._kept: list[tuple[str, Any, Any]] = []
        """Outputs that the user keeps, if the regime asks for that: which one, its tensors, and copies of them."""
        self._returned: list[tuple[str, weakref.ref[Tensor]]] = []
        """The tensors of the same outputs as they were returned, which the user drops: see `TrainingHistory`."""
        self._input_grads: list[Tensor | None] = []
        self._helpers: frozenset[int] = frozenset()
        """Processes of this rank, once the first step has ended."""

    # --- labels and times --------------------------------------------------------------------------------------------

    @contextmanager
    def phase(self, name: str, step: int | None = None) -> Iterator[None]:
        """Label collectives, and accesses on the simulated accelerator."""
        if self.task.conditions.beside:
            name += BESIDE
        with self._log.phase(name, step), self.watch.label(name):
            yield

    @contextmanager
    def observing(self, step: int | None = None) -> Iterator[None]:
        """Reads inside are for the history only: they neither count as training nor order it."""
        with self._log.phase("observe", step), self.watch.suspended():
            yield
        if self.watch.counts_bytes and not self.task.conditions.undisturbed:
            self.watch.reset_peak()

    @contextmanager
    def timed(self, step: int) -> Iterator[None]:
        """Count the time inside the block as training."""
        begin = time.perf_counter()
        try:
            yield
        finally:
            if self.task.reads_values or (self.task.is_last(step) and not self.task.conditions.undisturbed):
                # The observation that follows waits anyway.
                self.watch.synchronise()
            self.history.seconds += time.perf_counter() - begin

    def mark(self, point: Point, step: int | None = None) -> None:
        """Note the bytes that are held, and the peak since the last mark."""
        weighs_host = self.task.conditions.weighs_host
        if not (self.watch.counts_bytes or weighs_host) or self.task.conditions.undisturbed:
            return
        gc.collect()  # Otherwise the count would depend on when Python happened to collect garbage last.
        allocated, peak = self.watch.allocated_bytes(), self.watch.peak_bytes()
        host, helpers = self._on_host(point) if weighs_host else (None, 0)
        self.history.memory.append(
            MemoryMark(point=point, step=step, allocated=allocated, peak=peak, host=host, helpers=helpers)
        )
        self.watch.reset_peak()

    def _on_host(self, point: Point) -> tuple[int, int]:
        """Bytes that this process and its helpers hold on the host: see `MemoryMark`."""
        host_memory.return_large_blocks()
        self.watch.free_unused()
        history_bytes = storage_bytes([*self.history.initial_params.values(), *self.history.initial_buffers.values()])
        held = host_memory.held_bytes() - self.watch.bytes_in_host() - history_bytes
        if point is Point.STEP:
            # Processes count from the end of the first step: before that, a new one may still be loading its code.
            self._helpers |= host_memory.children()
        return held, host_memory.bytes_of(self._helpers)

    # --- values ------------------------------------------------------------------------------------------------------

    def begin_step(self, step: int) -> StepRecord:
        """The record of a step, which is now part of the history."""
        record = StepRecord(step=step, losses=[])
        self.history.steps.append(record)
        return record

    def add_loss(self, loss: Tensor) -> None:
        """Keep a loss of the current step."""
        self._losses.append(_copied(loss))

    def add_output(self, record: StepRecord, output: Any) -> None:
        """Keep an output of a step, if the regime asks for that."""
        if self.task.regime.keep_outputs:
            record.outputs.append(_copied(output))
            self._keep(f"output {len(record.outputs) - 1} of step {record.step}", output, record.outputs[-1])

    def add_evaluation(self, output: Any) -> None:
        """Keep an output of an evaluation."""
        self._evaluated.append(_copied(output))
        if self.task.regime.keep_outputs:
            number = len(self.history.eval_outputs) + len(self._evaluated) - 1
            self._keep(f"evaluation {number}", output, self._evaluated[-1])

    def _keep(self, name: str, output: Any, copied: Any) -> None:
        """Keep the tensors of an output as a user does who collects predictions, without their graph."""

        def detached(tensor: Tensor) -> Tensor:
            self._returned.append((name, weakref.ref(tensor)))
            return tensor.detach()

        self._kept.append((name, map_tensors(output, detached), copied))

    def unsharded(self) -> frozenset[str]:
        """The units that hold full parameters, if the adapter can tell."""
        units = self.units if "sharded_state" in self.declared else ()
        return frozenset(unit or "the root" for unit in units if self.task.adapter.unit_is_unsharded(unit))

    def unsharded_if_known(self) -> list[str] | None:
        """
        The units that hold full parameters, in order; None if the adapter raises.

        Every training asks, also of models whose units the adapter does not know, and few cases need the answer. A
        stage of a pipeline has only some of the units.
        """
        if self.pipeline is not None:
            return None
        try:
            return sorted(self.unsharded())
        except Exception:  # noqa: BLE001 - the check that needs it reports that there is none
            return None

    def add_input_gradients(self, batch: Batch) -> None:
        """Keep the gradients of a micro-batch's inputs, if the regime asks for that."""
        if self.task.regime.keep_input_gradients:
            for value in (*batch.args, *batch.kwargs.values()):
                if isinstance(value, Tensor) and value.requires_grad:
                    self.add_input_gradient(value.grad)

    def add_input_gradient(self, gradient: Tensor | None) -> None:
        """Keep the gradient of an input."""
        self._input_grads.append(_copied(gradient))

    def record_setup(self) -> None:
        """Record the values before training."""
        self.history.requires_grad = self._requires_grad()
        with self.observing():
            if self.history.memory:
                shown = self.task.adapter.local_tensors()
                self.history.wrapped_bytes = {kind: storage_bytes(tensors) for kind, tensors in shown.items()}
            self.history.initial_params = self._whole(self.task.adapter.full_params())
            self.history.initial_buffers = self._buffers()

    def record_gradients(self, record: StepRecord) -> None:
        """Record the gradients of a step, and let the observer see them."""
        task, step = self.task, record.step
        with self.observing(step):
            # With the optimizer in backward, the gradients are gone. Scaled ones are not kept: they may be infinite or
            # NaN, and no two NaNs are equal.
            comparable = not task.regime.optimizer_in_backward and task.regime.init_scale is None
            if task.reads_values and "full_grads" in self.declared and comparable:
                record.grads = self._whole(task.adapter.full_grads())
            task.observer.on_gradients(task.adapter, step)
            if task.is_last(step) and not task.conditions.undisturbed:
                self._weigh(lambda kind: kind in _BEFORE_STEP)

    def record_step(self, record: StepRecord, norm: Any) -> None:
        """Record the values after a step; in an undisturbed run, only after the last one."""
        task, step = self.task, record.step
        if task.conditions.undisturbed:
            self._unread.append((record, self._losses))
            self._losses = []
            if not task.is_last(step):
                return
        with self.observing(step):
            self._fetch(record)
            record.grad_norm = None if norm is None else materialise_norm(torch.as_tensor(norm))
            if task.regime.init_scale is not None:
                record.loss_scale = torch.tensor(task.adapter.loss_scale(), dtype=torch.float64)
            if task.reads_values or task.is_last(step):
                record.params = self._whole(task.adapter.full_params())
                record.buffers = self._buffers()

    def finish(self) -> None:
        """
        Count the bytes this rank holds, and those that an unsharded run would hold.

        Records which outputs have changed since they were returned, and which are still held although the user dropped
        them.
        """
        with self.observing():
            if not self.task.conditions.undisturbed:
                self._weigh(lambda kind: kind not in _BEFORE_STEP)
            changed = [name for name, kept, copied in self._kept if not same_tensors(kept, copied)]
            self.history.changed_outputs += changed
            self._kept = []
            if self._returned:
                gc.collect()
                held = [name for name, tensor in self._returned if tensor() is not None and not self._is_latest(name)]
                self.history.held_outputs += dict.fromkeys(held)
        self.history.final_requires_grad = self._requires_grad()
        with context.working(Part.SUITE):
            self.history.full_bytes = self._unsharded_bytes()

    def _is_latest(self, name: str) -> bool:
        """True for outputs of the last step and of the last evaluation, which an engine may keep until others come."""
        last = self.history.steps[-1].step if self.history.steps else -1
        return name.endswith(f" of step {last}") or name == f"evaluation {len(self.history.eval_outputs) - 1}"

    def close(self) -> None:
        """Record collectives and order, even if the run raised: a failure's report quotes them."""
        if self.watch.checks_order:
            with context.working(Part.SUITE):
                self.history.hazards = self.watch.hazards()
                self.history.checked_accesses = self.watch.accesses()
                self.history.checked_streams = self.watch.streams()
        records = self._log.records[self._begin :]
        beside = self.task.conditions.beside
        self.history.collectives = [
            record for record in records if record.phase != "observe" and record.phase.endswith(BESIDE) == beside
        ]

    def _fetch(self, record: StepRecord) -> None:
        """Copy losses and outputs from the device to the host."""
        record.losses = _fetched(self._losses)
        if self.pipeline is not None:
            record.losses = self.pipeline.losses(record.losses)
        for earlier, losses in self._unread:
            earlier.losses, earlier.outputs = _fetched(losses), _fetched(earlier.outputs)
        record.outputs = _fetched(record.outputs)
        self.history.eval_outputs += _fetched(self._evaluated)
        self.history.input_grads += _fetched(self._input_grads)
        self._losses, self._evaluated, self._unread, self._input_grads = [], [], [], []

    def _whole(self, values: dict[str, Any]) -> dict[str, Any]:
        """Values by name, in a pipeline those of all stages. Collective."""
        return values if self.pipeline is None else self.pipeline.joined(values)

    def _buffers(self) -> dict[str, Tensor]:
        """The buffers as the adapter gives them, or else as user code finds them in the wrapped module."""
        if "full_buffers" in self.declared:
            return self._whole(self.task.adapter.full_buffers())
        try:
            buffers = self.names.buffers_of(self.task.adapter.module())
        except NotImplementedError:
            self.history.shows_buffers = False
            return {}
        return self._whole({name: full_copy(buffer) for name, buffer in buffers.items()})

    def _requires_grad(self) -> dict[str, bool]:
        try:
            parameters = self.task.adapter.parameters()
        except NotImplementedError:
            # An adapter may expose no module; then its flags are unknown.
            return {}
        return {name: parameter.requires_grad for name, parameter in parameters.items()}

    def _weigh(self, is_weighed: Callable[[str], bool]) -> None:
        held = self.task.adapter.local_tensors()
        if self.own_optimizers:
            own = [tensor for optimizer in self.own_optimizers for tensor in state_tensors(optimizer)]
            held["optim"] = [*held.get("optim", ()), *own]
        for kind, tensors in held.items():
            if is_weighed(kind):
                self.history.held_bytes[kind] = storage_bytes(tensors)
                self.history.shown_bytes[kind] = sum(tensor.nbytes for tensor in tensors)

    def _unsharded_bytes(self) -> dict[str, int]:
        """Bytes of parameters, gradients and optimizer state of one unsharded, trained copy."""
        workload, regime = self.task.workload, self.task.regime
        model = workload.build(self.task.world.rank)
        parameters = list(model.parameters())
        trained = [parameter for parameter in parameters if parameter.requires_grad]
        state: list[Tensor] = []
        if trained:
            build = workload.optimizer_sets.get(regime.optimizer)
            optimizers = (
                [workload.optimizers[regime.optimizer](trained)]
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


def storage_bytes(tensors: Iterable[Tensor]) -> int:
    """Bytes of the storages behind `tensors`, counting a storage once however many views it has."""
    storages = {}
    for tensor in tensors:
        storage = tensor.detach().untyped_storage()
        # An empty storage has no unique address.
        if storage.nbytes():
            storages[storage.data_ptr()] = storage.nbytes()
    return sum(storages.values())


def _copied(value: Any) -> Any:
    """A loss or an output with every tensor detached and copied on its device; structure and types are unchanged."""
    return map_tensors(value, lambda tensor: tensor.detach().clone())


def _fetched(value: Any) -> Any:
    """A copy of `value` with all tensors on the CPU."""
    return moved(value, torch.device("cpu"))
