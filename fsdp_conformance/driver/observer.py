"""The functions that the training loop calls on its way."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from fsdp_conformance.adapters.base import Adapter


def _do_nothing(*arguments: object) -> None:
    pass


@dataclass(frozen=True, kw_only=True, slots=True)
class Observer:
    """Functions of the adapter, and of the step. By default they do nothing."""

    on_setup: Callable[[Adapter], object] = _do_nothing
    """After setup, before initial values are recorded."""
    on_loss: Callable[[Adapter, int], object] = _do_nothing
    """Between a loss and its backward, like a user's own code."""
    on_gradients: Callable[[Adapter, int], object] = _do_nothing
    """After a step's gradients are complete, as an observer: its collectives do not count as training."""
    after_step: Callable[[Adapter, int], object] = _do_nothing
    """After a step whose optimizer step has returned and whose values were recorded, like a user's own code."""
