"""The events of a training: user code that runs between the passes of a step."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import save

from fsdp_conformance.adapters.base import PendingSave
from fsdp_conformance.adapters.sharded import full_copy, same_tensors
from fsdp_conformance.adapters.structures import map_tensors
from fsdp_conformance.driver.batches import Batches
from fsdp_conformance.driver.recorder import Recorder
from fsdp_conformance.errors import SuiteError
from fsdp_conformance.history.training import Tensors, random_state
from fsdp_conformance.workload.events import Action, Event, Moment

#: Flags without which an adapter cannot be asked for an action; other actions need none.
EVENT_FLAGS = {
    Action.DIFFERENTIATE: "autograd_grad",
    Action.UNSHARD: "manual_unshard",
    Action.LEARNING_RATE: "learning_rate",
    Action.ZEROS: "zero_grads",
    Action.WRITE: "writeback_in_place",
    Action.ASSIGN: "writeback_direct",
    Action.WRITE_GRADIENT: "writeback_in_place",
    Action.ASSIGN_GRADIENT: "writeback_direct",
    Action.SHOW: "full_params",
    Action.WRITE_SHOWN: "full_params_writeback",
    Action.WRITE_SHOWN_GRADIENT: "full_params_grads",
    Action.CLIP_VALUES: "clip_grad_value",
    Action.CLIP_SOME: "clip_some",
    Action.TAKE_MODEL: "full_state_dict",
    Action.LOAD_MODEL: "full_state_dict",
    Action.TAKE_SHARDS: "sharded_state_dict",
    Action.LOAD_SHARDS: "sharded_state_dict",
    Action.TAKE_OPTIMIZER: "optim_state_dict",
    Action.LOAD_OPTIMIZER: "optim_state_dict",
    Action.MOVE: "move_again",
    Action.CAST: "move_again",
    Action.CAST_BACK: "cast_between_steps",
    Action.SAVE: "checkpoint",
    Action.SAVE_MEANWHILE: "async_checkpoint",
    Action.LOAD: "checkpoint",
    Action.RAISE: "exception_recovery",
}

#: Events in which the model runs in training mode, and may draw random numbers.
_DRAWING = frozenset({Action.FORWARD, Action.DIFFERENTIATE})


class Events:
    """Makes the events of the regime happen on one rank."""

    def __init__(self, recorder: Recorder, batches: Batches) -> None:
        self._task = recorder.task
        self._recorder = recorder
        self._batches = batches
        self._mode = True
        """The mode in which the model trains: True unless the user has switched to eval mode."""
        self._saved: Path | None = None
        """The last checkpoint."""
        self._saving: PendingSave | None = None
        """The checkpoint that is being saved."""
        self._shards: Path | None = None
        """The last sharded state dict."""
        self._taken: dict[Action, dict[str, Any]] = {}
        """The last state dict of each kind, by the action that took it."""
        self._kept: dict[Action, Mapping[str, Any]] = {}
        """The same state dicts as the engine returned them: a user may keep those."""

    def continue_mode(self, step: int) -> None:
        """Switch the model to the mode that earlier steps have left it in."""
        self._mode = not self._task.regime.is_in_eval_mode(step)
        self._task.adapter.train(self._mode)

    def happen(self, moment: Moment, step: int, micro: int = 0) -> None:
        """Make the events at a point happen on this rank."""
        for event in self._task.regime.at(moment, step, micro):
            if event.happens_on(self._task.world.rank):
                unsharded_before, random_before = self._recorder.unsharded(), random_state()
                self._make_happen(event)
                if event.action not in _DRAWING and random_state() != random_before:
                    self._recorder.history.drawn_by.append(event.action.value)
                newly_unsharded = self._recorder.unsharded() - unsharded_before
                self._recorder.history.left_gathered += [(event.action.value, unit) for unit in sorted(newly_unsharded)]

    def _make_happen(self, event: Event) -> None:
        adapter, step = self._task.adapter, event.step
        match event.action:
            case Action.EVALUATE:
                self._evaluate(step, event.micro, torch.no_grad())
            case Action.INFER:
                self._evaluate(step, event.micro, torch.inference_mode())
            case Action.FORWARD:
                batch = self._batches.batch(step, event.micro)
                with self._recorder.phase("forward", step):
                    adapter.forward(*batch.args, **batch.kwargs)
            case Action.DIFFERENTIATE:
                self._differentiate(step, event.micro)
            case Action.READ:
                with self._recorder.observing(step):
                    self._recorder.history.reads.append(adapter.full_params())
            case Action.TOGGLE:
                adapter.train(False)
                adapter.train(self._mode)
            case Action.EVAL_MODE:
                self._mode = False
                adapter.train(self._mode)
            case Action.LEARNING_RATE:
                adapter.set_learning_rate(event.number)
            case Action.FREEZE:
                adapter.set_requires_grad(event.names)
            case Action.ZEROS:
                adapter.keep_zero_grads()
            case Action.SKIP | Action.RAISE:
                pass  # the loop looks for them, in place of the optimizer and before everything else
            case Action.DROP | Action.WRITE | Action.ASSIGN | Action.WRITE_GRADIENT | Action.ASSIGN_GRADIENT:
                self._write(event)
            case Action.SHOW | Action.WRITE_SHOWN | Action.WRITE_SHOWN_GRADIENT:
                self._open(event)
            case Action.CLIP_VALUES | Action.CLIP_SOME:
                self._clip(event)
            case Action.SAVE | Action.SAVE_MEANWHILE | Action.LOAD:
                self._use_checkpoint(event)
            case Action.UNSHARD | Action.MOVE | Action.CAST | Action.CAST_BACK:
                self._place(event)
            case _:
                with self._recorder.phase("event", step):
                    self._exchange(event)

    def _write(self, event: Event) -> None:
        """Change parameters or gradients."""
        adapter = self._task.adapter
        if event.action is Action.DROP:
            adapter.drop_grads(event.names)
            return
        parameters = adapter.parameters()
        for name in event.names:
            _write(parameters[name], event.action, event.number)

    def _open(self, event: Event) -> None:
        """Read or write parameters or gradients in the engine's context for full parameters."""
        adapter, writes = self._task.adapter, event.action is not Action.SHOW
        options: dict[str, Any] = {"writeback": True} if writes else {}
        if event.action is Action.WRITE_SHOWN_GRADIENT:
            options["with_grads"] = True
        with self._recorder.phase("event", event.step), adapter.full_params_context(**options), torch.no_grad():
            parameters = adapter.parameters()
            if not writes:
                values = {name: full_copy(parameter) for name, parameter in parameters.items()}
                self._recorder.history.reads.append(values)
            for name in event.names:
                tensor = parameters[name] if event.action is Action.WRITE_SHOWN else parameters[name].grad
                if tensor is not None:
                    tensor.mul_(event.number)

    def _clip(self, event: Event) -> None:
        """Clip gradients with torch's own functions."""
        parameters = self._task.adapter.parameters()
        with self._recorder.phase("step", event.step):
            if event.action is Action.CLIP_VALUES:
                torch.nn.utils.clip_grad_value_(parameters.values(), event.number)
            else:
                torch.nn.utils.clip_grad_norm_([parameters[name] for name in event.names], event.number)

    def _place(self, event: Event) -> None:
        """Gather and free units, or move or cast the wrapped model."""
        adapter = self._task.adapter
        with self._recorder.phase("event", event.step):
            match event.action:
                case Action.UNSHARD:
                    for unit in event.names:
                        adapter.unshard(unit)
                        adapter.reshard(unit)
                case Action.MOVE:
                    adapter.module().to(self._task.device)
                case Action.CAST:
                    adapter.module().float()
                case Action.CAST_BACK:
                    adapter.module().double().float()

    def _evaluate(self, step: int, micro: int, mode: AbstractContextManager[Any]) -> None:
        batch = self._batches.batch(step, micro)
        self._task.adapter.train(False)
        try:
            with mode, self._recorder.phase("eval", step):
                self._recorder.add_evaluation(self._task.adapter.forward(*batch.args, **batch.kwargs))
        finally:
            self._task.adapter.train(self._mode)

    def _differentiate(self, step: int, micro: int) -> None:
        """Differentiate a loss for the first argument alone, as for adversarial examples."""
        batch = self._batches.batch(step, micro)
        x = batch.args[0].detach().requires_grad_()
        with self._recorder.phase("forward", step):
            loss = self._task.workload.loss(self._task.adapter.forward(x, *batch.args[1:], **batch.kwargs), batch)
        with self._recorder.phase("backward", step):
            (gradient,) = torch.autograd.grad(loss, [x])
        self._recorder.add_input_gradient(gradient)

    def _exchange(self, event: Event) -> None:
        """Take a state dict, or load the last one of its kind."""
        adapter, taken = self._task.adapter, self._taken
        match event.action:
            case Action.TAKE_MODEL | Action.TAKE_OPTIMIZER:
                self._kept[event.action] = self._state(event.action)
                taken[event.action] = _cloned(self._kept[event.action])
                if event.action is Action.TAKE_MODEL:
                    with self._recorder.watch.suspended():
                        self._recorder.history.states.append(_tensors_of(taken[event.action]))
            case Action.LOAD_MODEL:
                adapter.load_full_state_dict(_cloned(taken[Action.TAKE_MODEL]))
            case Action.LOAD_OPTIMIZER:
                adapter.load_optim_state_dict(_cloned(taken[Action.TAKE_OPTIMIZER]))
            case Action.TAKE_SHARDS:
                # Its tensors are live storage: only a saved copy keeps its values.
                self._shards = self._new_directory()
                save(adapter.sharded_state_dict(), checkpoint_id=self._shards)
            case Action.LOAD_SHARDS:
                state = adapter.sharded_state_dict()
                load(state, checkpoint_id=self._shards)
                adapter.load_sharded_state_dict(state)

    def _use_checkpoint(self, event: Event) -> None:
        """Save a checkpoint, or load the last one."""
        adapter = self._task.adapter
        self.finish()
        with self._recorder.phase("event", event.step):
            match event.action:
                case Action.SAVE:
                    self._saved = self._new_directory()
                    adapter.save_checkpoint(self._saved)
                case Action.SAVE_MEANWHILE:
                    self._saved = self._new_directory()
                    self._saving = adapter.save_checkpoint_async(self._saved)
                case _:
                    if self._saved is None:
                        raise SuiteError(f"a checkpoint must be saved before one is loaded: {event.describe()}")
                    adapter.load_checkpoint(self._saved)

    def _state(self, action: Action) -> dict[str, Any]:
        """The state dict that an action takes, as the engine returns it."""
        adapter = self._task.adapter
        return adapter.full_state_dict() if action is Action.TAKE_MODEL else adapter.optim_state_dict()

    def end(self) -> None:
        """
        Finish what the last step has left open, and check that taking another state dict leaves earlier ones unchanged.
        Collective.
        """
        self.finish()
        for action, returned in self._kept.items():
            with self._recorder.phase("event"):
                copied = _cloned(returned)
                # Not freed before the comparison.
                another = self._state(action)
            if not same_tensors(returned, copied):
                self._recorder.history.changed_outputs.append(str(action).replace("take", "state dict of the"))
            del another

    def finish(self) -> None:
        """Wait for the checkpoint that is being saved, if there is one. Collective."""
        saving, self._saving = self._saving, None
        if saving is not None:
            with self._recorder.phase("event"):
                saving.wait()

    def _new_directory(self) -> Path:
        new_directory = self._task.conditions.new_directory
        if new_directory is None:
            raise SuiteError("training must be given `new_directory` for events that save, got None")
        return new_directory()


def _cloned(state: Mapping[str, Any]) -> dict[str, Any]:
    """A copy of a state dict with separate storage."""
    return dict(map_tensors(dict(state), lambda tensor: tensor.detach().clone()))


def _tensors_of(state: Mapping[str, Any]) -> Tensors:
    """The tensors of a state dict, on the CPU."""
    return {name: value.cpu() for name, value in state.items() if isinstance(value, Tensor)}


def _write(parameter: nn.Parameter, action: Action, factor: float) -> None:
    """Write to a parameter or its gradient, as a user may."""
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
