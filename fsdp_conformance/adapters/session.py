"""
Training an implementation through its adapter, by the regime, and noting what is seen: the subject's history.

The loop is written here for the subject alone; the references have loops of their own (`checks`), so that a mistake in
one does not hide itself in both.

A step, with the labels that its collectives get in the log:

    frozen_at            requires_grad is set
    eval_before          "eval"      eval-mode forward under no_grad
    idle_forwards        "forward"   training-mode forwards without backward
    each micro-batch     "forward", then "backward"; the fault point after_loss lies between them
    gradients            "observe"   full gradients are read, before clipping
    gradient_to_none     gradients are dropped
    eval_between         "eval"
    fault point          before_step
    optimizer            "step"      clipping, update, zero_grad
    parameters           "observe"   full parameters and buffers are read
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor, nn

from fsdp_conformance.adapters.base import Adapter
from fsdp_conformance.adapters.sharded import materialise_norm
from fsdp_conformance.adapters.structures import map_tensors
from fsdp_conformance.adapters.torch_like import compute_device
from fsdp_conformance.config import Plan
from fsdp_conformance.errors import ConfigError, Unsupported
from fsdp_conformance.faults.fault import Fault
from fsdp_conformance.harness import process_group
from fsdp_conformance.history.training import StepRecord, TrainingHistory
from fsdp_conformance.workload import Batch, BatchKey, Regime, Workload

#: Kinds of `Adapter.local_tensors` whose bytes are counted while gradients are alive.
_BEFORE_STEP = frozenset({"grads"})


def plan_for(workload: Workload, regime: Regime, plan: Plan | None = None) -> Plan:
    """
    The plan that tells an engine beforehand what the workload and the regime will ask of it.

    Units, local units and ignored submodules are the workload's where the plan names none.
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
    on_setup: Callable[[Adapter], object] | None = None,
    inputs_on_cpu: bool = False,
) -> TrainingHistory:
    """
    Set the adapter up and train the workload by the regime. Collective.

    What the regime says of micro-batches, clipping and deferred reduction is put into the plan. The adapter must be
    new; it is left open, so that the caller can look at what it holds. Faults are prepared with the model, installed
    after the setup and removed at the end. With `observe=False` only losses, and the parameters at the end, are read.
    `on_setup` is called after the setup and before initial values are noted; with `inputs_on_cpu` batches are left
    there for the engine to move.

    Raises Unsupported for a plan with undeclared flags, or a regime that the adapter has no way to follow.
    """
    plan = _with_regime(plan, workload, regime)
    adapter.refuse_undeclared(plan)
    if regime.norm_type != 2.0 and "clip_norm_type" not in adapter.declared():
        raise Unsupported("clip_norm_type", f"the regime clips by the {regime.norm_type}-norm")
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
        observe=observe,
        input_device=torch.device("cpu") if inputs_on_cpu else compute_device(plan),
    )
    try:
        run.set_up(plan, on_setup)
        with ExitStack() as installed:
            for fault in faults:
                installed.enter_context(fault)
            for step in range(regime.steps):
                run.step(step)
        run.finish()
    finally:
        # Kept up to the end of a run that raised, too: a failure's report quotes it.
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
    input_device: torch.device
    declared: frozenset[str] = field(init=False)

    def __post_init__(self) -> None:
        self.declared = self.adapter.declared()
        self.log = process_group.log()

    def set_up(self, plan: Plan, on_setup: Callable[[Adapter], object] | None) -> None:
        def build() -> nn.Module:
            model = self.workload.build(self.rank)
            for fault in self.faults:
                fault.prepare(model)
            return model

        with self.log.phase("setup"):
            self.adapter.setup(build, self.workload.optimizers[self.regime.optimizer], plan)
            if on_setup is not None:
                on_setup(self.adapter)
        self.history.requires_grad = self._requires_grad()
        with self.log.phase("observe"):
            self.history.initial_params = self.adapter.full_params()
            self.history.initial_buffers = self._buffers()
        self.adapter.train(True)

    def step(self, step: int) -> None:
        for first, names in self.regime.frozen_at:
            if first == step:
                self.adapter.set_requires_grad(names)
        record = StepRecord(step=step, losses=[])
        self.history.steps.append(record)
        with self._timed():
            if step in self.regime.eval_before:
                self._evaluate(step)
            for _ in range(self.regime.idle_forwards):
                self._forward(step, self._batch(step, 0))
            for micro in range(self.regime.micro_batches):
                self._micro_batch(record, micro)
        if self.observe and "full_grads" in self.declared:
            with self.log.phase("observe", step):
                record.grads = self.adapter.full_grads()
        if step == self.regime.steps - 1:
            self._weigh(lambda kind: kind in _BEFORE_STEP)
        with self._timed():
            if self.regime.gradient_to_none:
                self.adapter.drop_grads(self.regime.gradient_to_none)
            if step in self.regime.eval_between:
                self._evaluate(step)
            self._reach("before_step", step)
            with self.log.phase("step", step):
                norm = self.adapter.step(**self._clipping())
        with self.log.phase("observe", step):
            record.grad_norm = None if norm is None else materialise_norm(torch.as_tensor(norm))
            if self.observe or step == self.regime.steps - 1:
                record.params = self.adapter.full_params()
                record.buffers = self._buffers()

    def finish(self) -> None:
        """Count what this rank holds, and what an unsharded run would."""
        self._weigh(lambda kind: kind not in _BEFORE_STEP)
        self.history.full_bytes = self._unsharded_bytes()

    def _micro_batch(self, record: StepRecord, micro: int) -> None:
        batch = self._batch(record.step, micro)
        last = micro == self.regime.micro_batches - 1
        with self.adapter.microbatch(last, reduced=self.regime.is_reduced(micro)):
            output = self._forward(record.step, batch)
            loss = self.workload.loss(output, batch)
            record.losses.append(loss.detach().to("cpu", copy=True))
            if self.regime.keep_outputs:
                record.outputs.append(_noted(output))
            self._reach("after_loss", record.step)
            parts = self.regime.backwards_per_forward
            with self.log.phase("backward", record.step):
                for part in range(parts):
                    self.adapter.backward(loss / parts if parts > 1 else loss, retain_graph=part < parts - 1)

    def _forward(self, step: int, batch: Batch) -> Any:
        with self.log.phase("forward", step):
            return self.adapter.forward(*batch.args, **batch.kwargs)

    def _evaluate(self, step: int) -> None:
        batch = self._batch(step, 0)
        self.adapter.train(False)
        try:
            with torch.no_grad(), self.log.phase("eval", step):
                self.history.eval_outputs.append(_noted(self.adapter.forward(*batch.args, **batch.kwargs)))
        finally:
            self.adapter.train(True)

    def _batch(self, step: int, micro: int) -> Batch:
        key = BatchKey(step=step, micro=micro, rank=self.rank, world_size=self.world_size)
        return self._placed(self.workload.batch(key))

    def _placed(self, batch: Batch) -> Batch:
        """Inputs where the run wants them, the target where the loss is computed."""
        return Batch(
            args=_moved(batch.args, self.input_device),
            kwargs=_moved(batch.kwargs, self.input_device),
            target=_moved(batch.target, self.device),
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
    def _timed(self) -> Iterator[None]:
        begin = time.perf_counter()
        try:
            yield
        finally:
            if self.device.type != "cpu":
                torch.get_device_module(self.device.type).synchronize(self.device)
            self.history.seconds += time.perf_counter() - begin

    def _buffers(self) -> dict[str, Tensor]:
        return self.adapter.full_buffers() if "full_buffers" in self.declared else {}

    def _requires_grad(self) -> dict[str, bool]:
        try:
            parameters = self.adapter.parameters()
        except NotImplementedError:
            # An adapter may have no module to show; then nothing is said about its flags.
            return {}
        return {name: parameter.requires_grad for name, parameter in parameters.items()}

    def _weigh(self, wanted: Callable[[str], bool]) -> None:
        for kind, tensors in self.adapter.local_tensors().items():
            if wanted(kind):
                self.history.held_bytes[kind] = storage_bytes(tensors)

    def _unsharded_bytes(self) -> dict[str, int]:
        """Bytes of parameters, gradients and optimizer state of one unsharded copy, all of it trained."""
        model = self.workload.build(self.rank)
        parameters = list(model.parameters())
        trained = [parameter for parameter in parameters if parameter.requires_grad]
        state: list[Tensor] = []
        if trained:
            optimizer = self.workload.optimizers[self.regime.optimizer](trained)
            for parameter in trained:
                parameter.grad = torch.zeros_like(parameter)
            optimizer.step()
            state = [
                value
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
    """Bytes of the storages behind `tensors`, each storage once: views of one buffer do not add up."""
    storages = {}
    for tensor in tensors:
        storage = tensor.detach().untyped_storage()
        # An empty storage has no address of its own.
        if storage.nbytes():
            storages[storage.data_ptr()] = storage.nbytes()
    return sum(storages.values())


def _with_regime(plan: Plan, workload: Workload, regime: Regime) -> Plan:
    known = sorted(workload.optimizers)
    if regime.optimizer not in known:
        raise ConfigError(
            [f"optimizer={regime.optimizer!r}, but should be one of {', '.join(known)}"],
            where=f"workload {workload.name}",
        )
    return replace(
        plan,
        micro_batches=regime.micro_batches,
        micro_batch_size=workload.micro_batch_size,
        defer_reduction=not all(regime.is_reduced(micro) for micro in range(regime.micro_batches)),
        max_norm=regime.max_norm,
    )


def _moved(value: Any, device: torch.device) -> Any:
    return map_tensors(value, lambda tensor: tensor.to(device))


def _noted(output: Any) -> Any:
    """A model's output with every tensor detached and copied to the CPU; its structure and its types stay."""
    return map_tensors(output, lambda tensor: tensor.detach().to("cpu", copy=True))
