"""Handling the inputs and outputs of a unit's forward: move, cast, and watch for their gradients."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import register_multi_grad_hook

from fsdp_conformance.engine.structures import tensors_in, with_tensors

Arguments = tuple[tuple[Any, ...], dict[str, Any]]


def placed_inputs(arguments: Arguments, device: torch.device, dtype: torch.dtype | None) -> Arguments:
    """
    Positional and keyword inputs with every tensor on `device`, and floating-point ones in `dtype` (None: unchanged).

    Returns the very same containers if there is nothing to do.
    """

    def is_placed(tensor: Tensor) -> bool:
        return tensor.device == device and (
            dtype is None or tensor.dtype is dtype or not tensor.dtype.is_floating_point
        )

    if all(is_placed(tensor) for tensor in tensors_in(arguments)):
        return arguments
    return with_tensors(arguments, partial(_placed, device=device, dtype=dtype))  # type: ignore[no-any-return]


def watched_inputs(arguments: Arguments, on_gradients: Callable[[], None]) -> Arguments:
    """
    The inputs, set up so that `on_gradients` is called in backward once the gradients of all of them are computed.

    Inputs that need a gradient are replaced by views of themselves, so that the hooks see only this use. If no input
    needs one, `on_gradients` is never called.
    """
    if not torch.is_grad_enabled() or not any(tensor.requires_grad for tensor in tensors_in(arguments)):
        return arguments
    watched: list[Tensor] = []

    def watch(tensor: Tensor) -> Tensor:
        if not tensor.requires_grad:
            return tensor
        watched.append(tensor.view_as(tensor))
        return watched[-1]

    arguments = with_tensors(arguments, watch)
    if len(watched) == 1:
        watched[0].register_hook(lambda _: on_gradients())  # type: ignore[no-untyped-call]
    elif watched:
        register_multi_grad_hook(watched, lambda _: on_gradients())
    return arguments


def watch_outputs(output: object, on_gradient: Callable[[], None]) -> bool:
    """Call `on_gradient` in backward before a gradient of an output propagates. Returns whether any output has one."""
    found = False
    for tensor in tensors_in(output):
        if tensor.requires_grad:
            tensor.register_hook(lambda _: on_gradient())  # type: ignore[no-untyped-call]
            found = True
    return found


def _placed(tensor: Tensor, *, device: torch.device, dtype: torch.dtype | None) -> Tensor:
    # A stream orders its work after a copy to the device. Nothing orders the host after a copy to the CPU.
    overlaps = device.type != "cpu"
    if dtype is not None and tensor.dtype.is_floating_point:
        return tensor.to(device, dtype, non_blocking=overlaps)
    return tensor.to(device, non_blocking=overlaps)
