"""A training of one rank: the implementation, the workload, the circumstances, and the observer."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from fsdp_conformance.adapters.base import Adapter
from fsdp_conformance.workload.definition import Regime, Workload

if TYPE_CHECKING:
    from fsdp_conformance.faults.fault import Fault


@dataclass(frozen=True, kw_only=True, slots=True)
class World:
    """The place of this rank among those that train together."""

    rank: int
    size: int


def _do_nothing(*arguments: object) -> None:
    pass


@dataclass(frozen=True, kw_only=True, slots=True)
class Observer:
    """Functions that are called with the adapter and, except for `on_setup`, the step. By default they do nothing."""

    on_setup: Callable[[Adapter], object] = _do_nothing
    """Called after setup, before initial values are recorded."""
    on_loss: Callable[[Adapter, int], object] = _do_nothing
    """Called between a loss and its backward, like a user's own code."""
    on_gradients: Callable[[Adapter, int], object] = _do_nothing
    """Called when a step's gradients are complete, as an observer: its collectives do not count as training."""
    after_step: Callable[[Adapter, int], object] = _do_nothing
    """Called when a step is over and its values were recorded, like a user's own code."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Conditions:
    """The circumstances of a training that neither plan nor regime names."""

    faults: Sequence[Fault] = ()
    """Prepared with the model, installed after setup and removed at the end."""
    observe: bool = True
    """False: only losses and the final parameters are read."""
    undisturbed: bool = False
    """
    True: everything is read at the end, and from the first forward on the loop itself neither waits for the device, nor
    reads from it, nor collects garbage.
    """
    inputs_on_cpu: bool = False
    """True: batches stay on the CPU for the engine to move."""
    first_step: int = 0
    """Above 0 for a run that continues another one: its hook `on_setup` loads what the other one has saved."""
    new_directory: Callable[[], Path] | None = None
    """Makes a directory that all ranks see, for a regime that saves checkpoints; collective."""
    weighs_host: bool = False
    """True: memory on the host is counted wherever bytes on the device are. Nothing else may run in this process."""
    beside: bool = False
    """True: another training is going on, which is judged by the collectives and the memory of this rank."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Task:
    """One training of one rank."""

    adapter: Adapter
    workload: Workload
    regime: Regime
    world: World
    device: torch.device
    """The device that the model computes on."""
    observer: Observer
    conditions: Conditions

    @property
    def reads_values(self) -> bool:
        """True if the values of each step are read."""
        return self.conditions.observe and not self.conditions.undisturbed

    def is_last(self, step: int) -> bool:
        """True for the last step of the regime."""
        return step == self.regime.steps - 1
