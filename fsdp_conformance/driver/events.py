"""The events of a training: user code that runs between the passes of a step."""

from __future__ import annotations

from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import torch
from torch import nn

from fsdp_conformance.driver.batches import Batches
from fsdp_conformance.driver.recorder import Recorder
from fsdp_conformance.errors import SuiteError
from fsdp_conformance.workload.events import Action, Event, Moment

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


class Events:
    """Makes the events of the regime happen on one rank."""

    def __init__(self, recorder: Recorder, batches: Batches) -> None:
        self._task = recorder.task
        self._recorder = recorder
        self._batches = batches
        self._saved: Path | None = None
        """The last checkpoint."""

    def happen(self, moment: Moment, step: int, micro: int = 0) -> None:
        """Make the events at a point happen on this rank."""
        for event in self._task.regime.at(moment, step, micro):
            if event.happens_on(self._task.world.rank):
                self._make_happen(event)

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
            case Action.READ:
                with self._recorder.observing(step):
                    self._recorder.history.reads.append(adapter.full_params())
            case Action.TOGGLE:
                adapter.train(False)
                adapter.train(True)
            case Action.UNSHARD:
                with self._recorder.phase("event", step):
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
                pass  # the loop looks for them, in place of the optimizer and before everything else
            case Action.ZEROS:
                adapter.keep_zero_grads()
            case Action.WRITE | Action.ASSIGN | Action.WRITE_GRADIENT | Action.ASSIGN_GRADIENT:
                parameters = adapter.parameters()
                for name in event.names:
                    _write(parameters[name], event.action, event.number)
            case Action.SAVE:
                self._save(step)
            case Action.LOAD:
                self._load(event)

    def _evaluate(self, step: int, micro: int, mode: AbstractContextManager[Any]) -> None:
        batch = self._batches.batch(step, micro)
        before = self._recorder.unsharded()
        self._task.adapter.train(False)
        try:
            with mode, self._recorder.phase("eval", step):
                self._recorder.add_evaluation(self._task.adapter.forward(*batch.args, **batch.kwargs))
        finally:
            self._task.adapter.train(True)
        # The root may wait for the next forward, which begins with it.
        left = self._recorder.unsharded() - before - {"the root"}
        self._recorder.history.gathered_by_evaluations += sorted(left)

    def _save(self, step: int) -> None:
        new_directory = self._task.conditions.new_directory
        if new_directory is None:
            raise SuiteError("training must be given `new_directory` for events that save, got None")
        self._saved = new_directory()
        with self._recorder.phase("event", step):
            self._task.adapter.save_checkpoint(self._saved)

    def _load(self, event: Event) -> None:
        if self._saved is None:
            raise SuiteError(f"a checkpoint must be saved before one is loaded, got none: {event.describe()}")
        with self._recorder.phase("event", event.step):
            self._task.adapter.load_checkpoint(self._saved)


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
