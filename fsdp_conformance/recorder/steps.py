"""The steps of optimizers that run at the moment: one may call others, and have its gradients made by a closure."""

from __future__ import annotations

import sys
from dataclasses import dataclass
from types import FrameType

from torch.optim import Optimizer

from fsdp_conformance.recorder.named import Named


@dataclass
class _Running:
    optimizer: Optimizer | None
    """None for an engine's own step."""
    frame: FrameType | None
    """Of the function that calls the hooks before and after the step; None where `end` is called in any case."""
    gradients: Named


class RunningSteps:
    """The steps that have begun and not ended, the outermost first."""

    def __init__(self) -> None:
        self._running: list[_Running] = []

    def begin(self, optimizer: Optimizer | None, frame: FrameType | None) -> bool:
        """
        An optimizer, or an engine, begins a step. Returns True if it is the outermost one.

        A step that has raised never ends: no hook is called. It is dropped here, since its frame no longer runs.
        """
        self._running = [each for each in self._running if each.frame is None or _runs(each.frame)]
        self._running.append(_Running(optimizer, frame, Named({})))
        return len(self._running) == 1

    def is_outermost(self, optimizer: Optimizer) -> bool:
        """True if the outermost step is this optimizer's."""
        return bool(self._running) and self._running[0].optimizer is optimizer

    def use(self, gradients: Named) -> None:
        """Note the gradients of the outermost step."""
        self._running[0].gradients = gradients

    def end(self, optimizer: Optimizer | None) -> Named | None:
        """The innermost step of this optimizer has ended. Returns its gradients if it was the outermost one."""
        ended = self._running.pop()
        while ended.optimizer is not optimizer:
            ended = self._running.pop()
        return None if self._running else ended.gradients


def _runs(frame: FrameType) -> bool:
    """True if this thread is inside the frame."""
    caller: FrameType | None = sys._getframe(1)
    while caller is not None and caller is not frame:
        caller = caller.f_back
    return caller is frame
