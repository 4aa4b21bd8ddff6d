"""
The hooks by which a parameter says that its gradient is there, and who is told: one reducer at a time.

A hook must not keep the reducer alive: whoever is told holds a weak reference.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, Protocol

from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle


class Owner(Protocol):
    """Who averages the gradients of parameters."""

    def close(self) -> None:
        """Be in charge of them no longer: another one is."""


#: Who averages which parameter (by id: an owner keeps its parameters alive). Two at a time would average twice.
_OWNERS: weakref.WeakValueDictionary[int, Owner] = weakref.WeakValueDictionary()


class GradientHooks:
    """
    Hooks on the parameters that require a gradient, as long as their owner lives. Former owners are closed.

    `on_gradient(index, parameter)` is called when backward has dealt with a parameter, also where it had no gradient
    for it; `on_incoming(index, gradient)` before that, with what comes, which may be undefined (None).
    """

    def __init__(
        self,
        owner: Owner,
        parameters: Sequence[nn.Parameter],
        *,
        on_gradient: Callable[[int, Tensor], None],
        on_incoming: Callable[[int, Tensor | None], None] | None,
    ) -> None:
        # Hooks of the tensors, not of their AccumulateGrad nodes: a parameter that is moved or cast gets another node.
        handles: list[RemovableHandle] = []
        for index, parameter in enumerate(parameters):
            if parameter.requires_grad:
                untyped: Any = parameter
                if on_incoming is not None:
                    handles.append(untyped.register_hook(partial(on_incoming, index)))
                handles.append(untyped.register_post_accumulate_grad_hook(partial(on_gradient, index)))
        # Hooks that a forgotten owner left behind would only cost time.
        self._finalizer = weakref.finalize(owner, remove_hooks, handles)
        self._finalizer.atexit = False
        for parameter in parameters:
            former = _OWNERS.get(id(parameter))
            if former is not None:
                former.close()
            _OWNERS[id(parameter)] = owner

    def remove(self) -> None:
        """Take every hook out of the parameters."""
        self._finalizer()


def remove_hooks(handles: list[RemovableHandle]) -> None:
    """Take out the hooks behind `handles`, and forget them."""
    for handle in handles:
        handle.remove()
    handles.clear()
