"""
Points of a training loop that does not announce them: the beginning of a backward pass, and an optimizer's step.

Watchers are called in every rank of a process, so each has to check the context that it was made for.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.optim import optimizer
from torch.utils.hooks import RemovableHandle

#: Takes the name of a point.
Watcher = Callable[[str], None]

_watchers: list[Watcher] = []
_backward: Callable[..., None] = torch.autograd.backward
_step_hook: RemovableHandle | None = None


def watch(watcher: Watcher) -> None:
    """Call `watcher` at every point from now on."""
    global _backward, _step_hook
    if not _watchers:
        _backward = torch.autograd.backward
        torch.autograd.backward = _announced_backward
        _step_hook = optimizer.register_optimizer_step_pre_hook(_announce_step)
    _watchers.append(watcher)


def unwatch(watcher: Watcher) -> None:
    """Stop calling `watcher`."""
    _watchers.remove(watcher)
    if not _watchers and _step_hook is not None:
        torch.autograd.backward = _backward
        _step_hook.remove()


def _announced_backward(*args: Any, **kwargs: Any) -> None:
    """Announce the point and call torch's function. `Tensor.backward` calls this one, too."""
    _announce("after_loss")
    _backward(*args, **kwargs)


def _announce_step(_optimizer: Any, _args: Any, _kwargs: Any) -> None:
    _announce("before_step")


def _announce(point: str) -> None:
    for watcher in tuple(_watchers):
        watcher(point)
