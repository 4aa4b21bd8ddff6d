"""
The boundary of a unit in the autograd graph: the nodes through which a gradient enters its backward and leaves it.

Hooks on tensors would not do. If a user changes a view in place, torch gives it a new node, and the gradient reaches
the unit through the node of the view's base instead: the hook on the view is never called, and the unit's parameters
would be used before they are gathered. So the hooks sit on nodes, of everything that the user has after the forward:

    outputs    their own nodes, and those of their bases
    inputs     the nodes that the forward has given them by changing them in place

Nodes that existed before the forward get no hook: a gradient reaches those when it has left the unit.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor
from torch.autograd.graph import Node, register_multi_grad_hook

from fsdp_conformance.engine.fully_sharded.inputs import Arguments
from fsdp_conformance.engine.structures import tensors_in, with_tensors


class Boundary:
    """The boundary of one unit, during a forward."""

    def __init__(self) -> None:
        # Bases of the inputs, not views: torch may refuse to give the node of a view whose base has changed.
        self._inputs: list[Tensor] = []
        # Nodes outside of the unit, and those that have their hook.
        self._known: set[Node | None] = {None}

    def enter(self, arguments: Arguments, on_gradients: Callable[[], None]) -> Arguments:
        """
        The inputs, set up so that `on_gradients` is called in backward once the gradients of all of them are computed.

        Inputs that need a gradient are replaced by views of themselves, so that the hooks see only this use. If no
        input needs one, or the forward changes one in place, `on_gradients` may never be called.
        """
        if not torch.is_grad_enabled():
            return arguments
        inputs = [base_of(tensor) for tensor in tensors_in(arguments)]
        self._inputs += inputs
        self._known.update(tensor.grad_fn for tensor in inputs)
        if not any(tensor.requires_grad for tensor in tensors_in(arguments)):
            return arguments
        watched: list[Tensor] = []

        def watch(tensor: Tensor) -> Tensor:
            if not tensor.requires_grad:
                return tensor
            # A hook on the tensor itself would wait for its other uses, a residual connection around the unit, for
            # example.
            watched.append(tensor.view_as(tensor))
            return watched[-1]

        arguments = with_tensors(arguments, watch)
        if len(watched) == 1:
            watched[0].register_hook(lambda _: on_gradients())  # type: ignore[no-untyped-call]
        elif watched:
            register_multi_grad_hook(watched, lambda _: on_gradients())
        return arguments

    def leave(self, output: object, on_gradient: Callable[[], None]) -> bool:
        """
        Call `on_gradient` in backward before a gradient enters the unit. Returns whether there will be a backward.
        """
        outputs = [tensor for tensor in tensors_in(output) if tensor.requires_grad]
        tensors = [*outputs, *(base_of(tensor) for tensor in outputs), *self._inputs]
        nodes = {tensor.grad_fn for tensor in tensors} - self._known
        for node in nodes:
            assert node is not None, "known from the start"
            node.register_prehook(lambda _: on_gradient())
        self._known |= nodes
        return bool(outputs or nodes)

    def forget(self) -> None:
        """Drop the tensors and the graph of a forward that is over."""
        self._inputs.clear()
        self._known = {None}


def base_of(tensor: Tensor) -> Tensor:
    """The tensor that `tensor` is a view of, or itself."""
    return tensor if tensor._base is None else tensor._base
