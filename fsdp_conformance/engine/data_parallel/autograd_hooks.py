"""
Where the reducer hooks into autograd: a hook on every parameter, and a callback at the end of backward.

Autograd reports a backward that finishes, but not one that raises. It drops its callbacks in both cases, so a weak
reference to the callback shows whether the backward is still running.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.autograd import Variable
from torch.utils.hooks import RemovableHandle


class Owner(Protocol):
    """An object that averages the gradients of some parameters."""

    def close(self) -> None:
        """Stop averaging them, because another owner has taken over."""


#: The owner of each parameter, by id (an owner keeps its parameters alive). Two owners would average twice.
_OWNERS: weakref.WeakValueDictionary[int, Owner] = weakref.WeakValueDictionary()


class GradientHooks:
    """
    Hooks on the parameters that require a gradient, for as long as their owner lives. Closes their previous owners.

    `on_gradient(index, parameter)` is called when backward has finished with a parameter, even if it produced no
    gradient for it. `on_incoming(index, gradient)` is called before that; the gradient may be undefined (None). Neither
    may keep the owner alive: they hold a weak reference to it.
    """

    def __init__(
        self,
        owner: Owner,
        parameters: Sequence[nn.Parameter],
        *,
        on_gradient: Callable[[int, Tensor], None],
        on_incoming: Callable[[int, Tensor | None], None] | None,
    ) -> None:
        # Hooks on the tensors, not on their AccumulateGrad nodes: moving or casting a parameter gives it a new node.
        handles: list[RemovableHandle] = []
        for index, parameter in enumerate(parameters):
            if parameter.requires_grad:
                untyped: Any = parameter
                if on_incoming is not None:
                    handles.append(untyped.register_hook(partial(on_incoming, index)))
                handles.append(untyped.register_post_accumulate_grad_hook(partial(on_gradient, index)))
        # The hooks of a collected owner would do nothing, but cost time in every backward.
        self._finalizer = weakref.finalize(owner, remove_hooks, handles)
        self._finalizer.atexit = False
        for parameter in parameters:
            previous = _OWNERS.get(id(parameter))
            if previous is not None:
                previous.close()
            _OWNERS[id(parameter)] = owner

    def remove(self) -> None:
        """Remove every hook."""
        self._finalizer()


def remove_hooks(handles: list[RemovableHandle]) -> None:
    """Remove the hooks behind `handles` and empty the list."""
    for handle in handles:
        handle.remove()
    handles.clear()


class _EndOfBackward:
    """The callable that autograd holds while a backward runs. Unlike a function, it can be weakly referenced."""

    def __init__(self, then: Callable[[], None]) -> None:
        self._then = then

    def __call__(self) -> None:
        self._then()


class BackwardWatch:
    """Follows backwards, one at a time: calls back at the end of each, and knows whether one has raised."""

    def __init__(self) -> None:
        self._end: weakref.ref[_EndOfBackward] | None = None

    def begin(self, then: Callable[[], None]) -> None:
        """Call `then` at the end of the current backward, on the stream that called it; not if the backward raises."""
        end = _EndOfBackward(then)
        self._end = weakref.ref(end)
        Variable._execution_engine.queue_callback(end)

    def end(self) -> None:
        """Stop watching: the backward is over or was given up."""
        self._end = None

    @property
    def is_open(self) -> bool:
        """True if a backward began and has not ended: it is running, or it raised."""
        return self._end is not None

    @property
    def is_under_way(self) -> bool:
        """True if the watched backward is running."""
        return self._end is not None and self._end() is not None

    @property
    def is_inside(self) -> bool:
        """True if the caller runs inside the watched backward, as a recomputed forward does."""
        return self.is_under_way and torch._C._current_graph_task_id() != -1
