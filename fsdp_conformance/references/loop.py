"""
The training loop of the references: runs a regime for one rank, or for all ranks in one process.

A *replica* is one rank's model with its optimizer and its history. A distributed reference holds one replica, the
single-process reference one per virtual rank. References differ in how they reduce gradients: `Reference.call`,
`Reference.accumulate` and `Reference.reduce`.

The implementation under test runs a separately written loop (`driver.session`): a mistake in shared code would be
judged correct.
"""

from __future__ import annotations

import copy
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from functools import partial
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from fsdp_conformance.errors import ConfigError, SuiteError
from fsdp_conformance.history.training import Gradients, StepRecord, TrainingHistory, random_state
from fsdp_conformance.references.structures import note, noted, placed
from fsdp_conformance.workload.definition import Batch, BatchKey, Fuse, Regime, Workload
from fsdp_conformance.workload.events import LOADED_BY, Action, Event, Moment
from fsdp_conformance.workload.units import local_names

#: What torch adds to the total norm before dividing by it (torch.nn.utils.clip_grad_norm_).
CLIP_EPSILON = 1e-6

#: What users do to gradients before the optimizer steps.
_OF_GRADIENTS = frozenset({
    Action.DROP, Action.WRITE_GRADIENT, Action.ASSIGN_GRADIENT, Action.WRITE_SHOWN_GRADIENT, Action.CLIP_VALUES,
    Action.CLIP_SOME,
})  # fmt: skip


@dataclass(slots=True)
class Replica:
    """One rank's model during training."""

    rank: int
    module: nn.Module
    params: dict[str, nn.Parameter]
    local: frozenset[str]
    """FQNs of parameters that only this rank has."""
    optimizers: list[Optimizer]
    history: TrainingHistory
    contributions: list[list[Gradients]] = field(default_factory=list)
    """The gradients of this rank's loss alone, by step and micro-batch, if requested."""
    scale: float = 1.0
    """The factor of the next loss."""
    num_good: int = 0
    """Steps since the scale last changed, all of them without an overflow."""
    saved: dict[Action, tuple[dict[str, Any], list[dict[str, Any]]]] = field(default_factory=dict)
    """The states of the module and the optimizers when they were last saved or taken, by the action that loads them."""
    left: Gradients = field(default_factory=dict)
    """Gradients that were not cleared after the last step."""


class Reference(ABC):
    """One way to train replicated models. `name` appears in histories and reports."""

    name: ClassVar[str]
    sums_gradients: ClassVar[bool] = False
    """True if it can sum gradients over the ranks instead of averaging them."""

    def __init__(
        self,
        workload: Workload,
        regime: Regime,
        *,
        ranks: Iterable[int],
        world_size: int,
        device: torch.device | str = "cpu",
        dtype: torch.dtype | None = None,
        source: str | None = None,
    ) -> None:
        if regime.optimizer not in {*workload.optimizers, *workload.optimizer_sets}:
            names = ", ".join(sorted({*workload.optimizers, *workload.optimizer_sets}))
            raise ConfigError([f"optimizer must be one of {names}, got {regime.optimizer!r}"], where=workload.name)
        if regime.sums and not self.sums_gradients:
            raise ConfigError([f"sums must be False for the reference {self.name}, got True"], where=workload.name)
        self.workload = workload
        self.regime = regime
        self.world_size = world_size
        self.device = torch.device(device)
        self.dtype = dtype or getattr(torch, workload.dtype)
        self.sets_to_none = True
        """True if gradients are None after a step, and not zero."""
        self.replicas = [self._replica(rank, source or self.name) for rank in ranks]
        self.local_norms: list[Tensor] = []
        """Norms of the gradients that only one rank has, by rank, before the step."""

    def train(self) -> list[TrainingHistory]:
        """Train as the regime says. Returns the histories of all replicas."""
        begin = time.perf_counter()
        for replica in self.replicas:
            self._note_start(replica)
        for step in range(self.regime.steps):
            self._step(step)
        for replica in self.replicas:
            replica.history.optimizer_state = noted_state(replica)
            replica.history.seconds = time.perf_counter() - begin
        return [replica.history for replica in self.replicas]

    # What differs between references.

    def call(self, replica: Replica) -> Callable[..., Any]:
        """The callable for a training forward that is followed by a backward."""
        return replica.module

    def call_alone(self, replica: Replica) -> Callable[..., Any]:
        """The callable for a training forward that no backward follows: not DDP's, whose reducer would wait for it."""
        return replica.module

    def call_in_eval(self, replica: Replica) -> Callable[..., Any]:
        """The callable for a forward in eval mode."""
        return replica.module

    def accumulate(self, replica: Replica, reduced: bool) -> AbstractContextManager[Any]:
        """The context around forward and backward of a micro-batch."""
        return nullcontext()

    @abstractmethod
    def reduce(self, micro: int, reduced: bool) -> None:
        """Called after the backward of a micro-batch on every replica; averages the gradients if `reduced`."""

    def refrozen(self) -> None:
        """Called after requires_grad of some parameters has changed."""

    def total_norm(self, replica: Replica) -> Tensor:
        """The norm of all gradients as one vector, every rank's experts included, from full gradients in float64."""
        shared = [name for name in replica.params if name not in self.workload.local_params]
        norms = [self.norm_of(replica, shared)]
        if self.workload.local_params:
            norms += self.local_norms
        total: Tensor = torch.linalg.vector_norm(torch.stack(norms), self.regime.norm_type)
        return total

    def norm_of(self, replica: Replica, names: Iterable[str], norm_type: float | None = None) -> Tensor:
        """The norm of some full gradients of a replica, in float64. `norm_type` is by default the regime's."""
        norm_type = self.regime.norm_type if norm_type is None else norm_type
        grads = [grad.double() for name in names if (grad := replica.params[name].grad) is not None]
        norms = [torch.linalg.vector_norm(grad, norm_type) for grad in grads]
        zero = torch.zeros((), dtype=torch.float64, device=self.device)
        total: Tensor = torch.linalg.vector_norm(torch.stack(norms or [zero]), norm_type)
        return total

    def gather_norms(self, norms: list[Tensor]) -> list[Tensor]:
        """The norms of all ranks, given those of this process's replicas."""
        return norms

    def clip(self, replica: Replica, max_norm: float) -> Tensor:
        """Scale gradients down to `max_norm`; returns the total norm before scaling."""
        norm = self.total_norm(replica)
        coefficient = float(torch.clamp(max_norm / (norm + CLIP_EPSILON), max=1.0))
        for param in replica.params.values():
            if param.grad is not None:
                param.grad.mul_(coefficient)
        return norm

    def scaled(self, replica: Replica, loss: Tensor) -> Tensor:
        """The loss of a backward under dynamic loss scaling."""
        return loss * replica.scale

    def scaled_update(self, replica: Replica) -> None:
        """Clip and step with scaled gradients, or skip the step if any is infinite or NaN; then adapt the scale."""
        grads = [param.grad for param in replica.params.values() if param.grad is not None]
        for grad in grads:
            grad.div_(replica.scale)
        finite = all(bool(grad.isfinite().all()) for grad in grads)
        self._clip(replica)
        if finite:
            for optimizer in replica.optimizers:
                optimizer.step()
            replica.num_good += 1
        if not finite or replica.num_good == self.regime.growth_interval:
            replica.scale *= 2.0 if finite else 0.5
            replica.num_good = 0

    # The loop.

    def _replica(self, rank: int, source: str) -> Replica:
        module = self.workload.build(rank).to(self.device)
        if self.dtype is not getattr(torch, self.workload.dtype):
            # In its own dtype, a model may also have parameters of other dtypes, which they keep.
            module.to(self.dtype)
        params = dict(module.named_parameters())
        return Replica(
            rank=rank,
            module=module,
            params=params,
            local=local_names(self.workload, params),
            optimizers=self._optimizers(params),
            history=TrainingHistory(source=source, rank=rank, world_size=self.world_size),
            scale=1.0 if self.regime.init_scale is None else self.regime.init_scale,
        )

    def _optimizers(self, params: dict[str, nn.Parameter]) -> list[Optimizer]:
        build = self.workload.optimizer_sets.get(self.regime.optimizer)
        if build is not None:
            return build(params)
        return [self.workload.optimizers[self.regime.optimizer](list(params.values()))]

    def _note_start(self, replica: Replica) -> None:
        history = replica.history
        history.initial_params = {name: note(param) for name, param in replica.params.items()}
        history.initial_buffers = {name: note(buffer) for name, buffer in replica.module.named_buffers()}
        history.requires_grad = {name: param.requires_grad for name, param in replica.params.items()}

    def _step(self, step: int) -> None:
        for replica in self.replicas:
            replica.history.steps.append(StepRecord(step=step, losses=[]))
            replica.contributions.append([])
            for event, begun in self.regime.attempts(step):
                self._attempt(replica, event, begun)
        self._happen(Moment.STEP, step)
        for micro in range(self.regime.micro_batches):
            reduced = self.regime.is_reduced(micro)
            self._happen(Moment.FORWARD, step, micro)
            for replica in self.replicas:
                self._micro_batch(replica, step, micro, reduced)
            self.reduce(micro, reduced)
            self._happen(Moment.BACKWARD, step, micro)
        for replica in self.replicas:
            _add_left(replica)
        for replica in self.replicas if self.regime.init_scale is None else ():
            replica.history.steps[step].grads = noted_gradients(replica.params)
        self._happen(Moment.OPTIMIZER, step)
        if self.workload.local_params and self.regime.max_norm is not None:
            # Taken here, because clipping the first replica already needs the norms of all ranks.
            own = [self.norm_of(replica, self.workload.local_params) for replica in self.replicas]
            self.local_norms = self.gather_norms(own)
        for replica in self.replicas:
            self._update(replica, step)
        self._happen(Moment.END, step)
        for replica in self.replicas:
            record = replica.history.steps[step]
            record.params = {name: note(param) for name, param in replica.params.items()}
            record.buffers = {name: note(buffer) for name, buffer in replica.module.named_buffers()}

    def _happen(self, moment: Moment, step: int, micro: int = 0) -> None:
        """Apply the events at a point of the loop to every replica."""
        for event in self.regime.at(moment, step, micro):
            for replica in self.replicas:
                self._apply(event, replica)
            if event.action is Action.FREEZE:
                self.refrozen()

    def _apply(self, event: Event, replica: Replica) -> None:
        match event.action:
            case Action.EVALUATE | Action.INFER:
                self._evaluate(replica, self._batch(replica, event.step, event.micro))
            case Action.FORWARD:
                batch = self._batch(replica, event.step, event.micro)
                self.call_alone(replica)(*batch.args, **batch.kwargs)
            case Action.DIFFERENTIATE:
                self._differentiate(replica, self._batch(replica, event.step, event.micro))
            case Action.READ | Action.SHOW:
                replica.history.reads.append({name: note(param) for name, param in replica.params.items()})
            case Action.EVAL_MODE:
                replica.module.eval()
            case Action.LEARNING_RATE:
                self._set_rate(replica, event.number)
            case Action.FREEZE:
                for name, param in replica.params.items():
                    param.requires_grad_(name not in event.names)
            case Action.ZEROS:
                self.sets_to_none = False
            case Action.WRITE | Action.ASSIGN | Action.WRITE_SHOWN:
                for name in event.names:
                    replica.params[name].data = replica.params[name].data * event.number
            case action if action in LOADED_BY.values():
                self._load(replica, action)
            case action if action in LOADED_BY:
                self._save(replica, LOADED_BY[action])
                if action is Action.TAKE_MODEL:
                    state = replica.module.state_dict()
                    replica.history.states.append({name: note(value) for name, value in state.items()})
            case action if action in _OF_GRADIENTS:
                self._change_gradients(event, replica)
            case _:
                """Skipping is up to `_update`, attempts to `_step`; the rest does nothing to a replicated model."""

    def _change_gradients(self, event: Event, replica: Replica) -> None:
        """Do what a user does to gradients before the optimizer steps."""
        grads = [grad for name in event.names or replica.params if (grad := replica.params[name].grad) is not None]
        match event.action:
            case Action.DROP:
                for name in event.names:
                    replica.params[name].grad = None
            case Action.WRITE_GRADIENT | Action.ASSIGN_GRADIENT | Action.WRITE_SHOWN_GRADIENT:
                for grad in grads:
                    grad.mul_(event.number)
            case Action.CLIP_VALUES:
                for grad in grads:
                    grad.clamp_(-event.number, event.number)
            case Action.CLIP_SOME:
                norm = self.norm_of(replica, event.names, 2.0)
                coefficient = float(torch.clamp(event.number / (norm + CLIP_EPSILON), max=1.0))
                for grad in grads:
                    grad.mul_(coefficient)

    def _set_rate(self, replica: Replica, value: float) -> None:
        for group in (group for optimizer in replica.optimizers for group in optimizer.param_groups):
            group["lr"] = value

    def _save(self, replica: Replica, loading: Action) -> None:
        """Save the states that the action `loading` restores."""
        states = [optimizer.state_dict() for optimizer in replica.optimizers]
        replica.saved[loading] = copy.deepcopy((replica.module.state_dict(), states))

    def _load(self, replica: Replica, action: Action) -> None:
        """Restore what `action` loads from what was saved for it last. Raises SuiteError if nothing was saved."""
        if action not in replica.saved:
            raise SuiteError(f"a checkpoint must be saved before one is loaded, got none [{self.workload.name}]")
        module, states = copy.deepcopy(replica.saved[action])
        if action is not Action.LOAD_OPTIMIZER:
            replica.module.load_state_dict(module)
        if action in (Action.LOAD, Action.LOAD_OPTIMIZER):
            for optimizer, state in zip(replica.optimizers, states, strict=True):
                optimizer.load_state_dict(state)

    def _attempt(self, replica: Replica, event: Event, begun: int) -> None:
        """
        Run an attempt that an exception interrupts. Its passes, and what they recompute, may change buffers, which stay
        changed. Its gradients are dropped, with those that an earlier step has left, and no reducer sees it.
        """
        if self.workload.fuse is None:
            raise SuiteError(f"{self.workload.name} must have a fuse for an event that raises, got None")
        fuse, code = self.workload.fuse(replica.module), 100 * event.step + event.micro
        last = begun - 1
        for micro in range(begun):
            batch = self._batch(replica, event.step, micro)
            if event.moment is Moment.FORWARD and micro == last:
                fuse.arm("forward", code)
                text = _raised_by(fuse, partial(self.call_alone(replica), *batch.args, **batch.kwargs))
                replica.history.caught.append(text)
                continue
            raises = event.moment is Moment.LOSS and micro == last
            if raises:
                fuse.arm("backward", code)
            loss = self.workload.loss(self.call_alone(replica)(*batch.args, **batch.kwargs), batch)
            if raises:
                replica.history.caught.append(_raised_by(fuse, partial(self._backward, loss)))
            else:
                self._backward(loss)
        for param in replica.params.values():
            param.grad = None
        replica.left = {}

    def _micro_batch(self, replica: Replica, step: int, micro: int, reduced: bool) -> None:
        batch = self._batch(replica, step, micro)
        record = replica.history.steps[step]
        with self.accumulate(replica, reduced):
            output = self.call(replica)(*batch.args, **batch.kwargs)
            loss = self.workload.loss(output, batch)
            record.random_states.append(random_state())
            record.losses.append(note(loss))
            if self.regime.keep_outputs:
                record.outputs.append(noted(output))
            for event in self.regime.at(Moment.LOSS, step, micro):
                self._apply(event, replica)
            if self.regime.init_scale is not None:
                loss = self.scaled(replica, loss)
            if self.regime.backward_from == "output":
                self._backward_from(output, batch)
            else:
                self._backward(loss)
        if self.regime.keep_input_gradients:
            replica.history.input_grads += [None if x.grad is None else note(x.grad) for x in _differentiable(batch)]

    def _backward_from(self, output: Any, batch: Batch) -> None:
        """A backward that begins at the output."""
        leaf = output.detach().requires_grad_()
        (gradient,) = torch.autograd.grad(self.workload.loss(leaf, batch), [leaf])
        torch.autograd.backward([output], [gradient])

    def _backward(self, loss: Tensor) -> None:
        parts = self.regime.backwards_per_forward
        for part in range(parts):
            torch.autograd.backward(loss / parts if parts > 1 else loss, retain_graph=part < parts - 1)

    def _update(self, replica: Replica, step: int) -> None:
        record = replica.history.steps[step]
        if self.regime.skips(step):
            for param in replica.params.values():
                param.grad = None
            return
        if self.regime.init_scale is None:
            self._clip(replica)
            for optimizer in replica.optimizers:
                optimizer.step()
        else:
            self.scaled_update(replica)
            record.loss_scale = torch.tensor(replica.scale, dtype=torch.float64)
        if not self.regime.clears(step):
            # Set aside until the gradients of the next step are reduced: the reduction must not see these.
            replica.left = {name: param.grad for name, param in replica.params.items()}
        for optimizer in replica.optimizers:
            optimizer.zero_grad(set_to_none=self.sets_to_none)

    def _clip(self, replica: Replica) -> None:
        if self.regime.max_norm is not None:
            record = replica.history.steps[-1]
            record.grad_norm = note(self.clip(replica, self.regime.max_norm))
            record.clipped_grads = noted_gradients(replica.params)

    def _differentiate(self, replica: Replica, batch: Batch) -> None:
        """Note the gradient of a loss for the first argument alone."""
        x = batch.args[0].detach().requires_grad_()
        loss = self.workload.loss(self.call_alone(replica)(x, *batch.args[1:], **batch.kwargs), batch)
        replica.history.input_grads += [note(gradient) for gradient in torch.autograd.grad(loss, [x])]

    def _evaluate(self, replica: Replica, batch: Batch) -> None:
        mode = replica.module.training
        replica.module.eval()
        with torch.no_grad():
            replica.history.eval_outputs.append(noted(self.call_in_eval(replica)(*batch.args, **batch.kwargs)))
        replica.module.train(mode)

    def _batch(self, replica: Replica, step: int, micro: int) -> Batch:
        key = BatchKey(step=step, micro=micro, rank=replica.rank, world_size=self.world_size)
        return placed(self.workload.batch(key), self.device, self.dtype)


def _add_left(replica: Replica) -> None:
    """Add the gradients that were not cleared to those of a step."""
    for name, old_grad in replica.left.items():
        param = replica.params[name]
        if old_grad is not None:
            param.grad = old_grad if param.grad is None else old_grad + param.grad
    replica.left = {}


def _differentiable(batch: Batch) -> list[Tensor]:
    """The arguments that require a gradient."""
    values = [*batch.args, *batch.kwargs.values()]
    return [value for value in values if isinstance(value, Tensor) and value.requires_grad]


def _raised_by(fuse: Fuse, run: Callable[[], object]) -> str:
    """
    Run a function that a fuse must end by an exception. Returns the exception's class and text.

    Raises SuiteError if nothing was raised.
    """
    try:
        run()
    except Exception as error:
        if fuse.place:
            raise
        return f"{type(error).__name__}: {error}"
    raise SuiteError("the fuse of a model must raise where it is armed, got nothing")


def noted_gradients(params: dict[str, nn.Parameter]) -> Gradients:
    """Copies of the gradients on the CPU; None for a parameter without one."""
    return {name: None if param.grad is None else note(param.grad) for name, param in params.items()}


def noted_state(replica: Replica) -> dict[str, dict[str, Tensor]]:
    """Copies of the optimizers' state on the CPU, by parameter and by name."""
    states = {param: state for optimizer in replica.optimizers for param, state in optimizer.state.items()}
    return {
        name: {key: note(value) for key, value in states[param].items() if isinstance(value, Tensor)}
        for name, param in replica.params.items()
        if param in states
    }
