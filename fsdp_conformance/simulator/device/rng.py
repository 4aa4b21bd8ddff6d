"""
Random numbers on the simulated accelerator: the CPU's.

By default every device uses the CPU's default generator. A program draws the same numbers in the same order, whichever
of its tensors are on the device, so dropout after `torch.manual_seed(s)` equals the CPU's bit for bit. Ranks that are
threads of one process would consume each other's numbers; `separate_generators()` gives each device its own generator,
which yields the CPU's sequence for its seed. Seeding then affects the current device only, and drawing on the CPU does
not advance it. Dropout inside a recurrent network still uses the CPU's default generator.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from fsdp_conformance.simulator.device import build
from fsdp_conformance.simulator.device.devices import current_device, device_count, index_of

__all__ = [
    "default_generator",
    "get_rng_state",
    "get_rng_state_all",
    "initial_seed",
    "manual_seed",
    "manual_seed_all",
    "seed",
    "seed_all",
    "separate_generators",
    "set_rng_state",
    "set_rng_state_all",
]


def default_generator(device: Any = None) -> torch.Generator:
    """The generator that operations on a device draw from by default."""
    generator: torch.Generator = build.load().default_generator(index_of(device))
    return generator


def get_rng_state(device: Any = None) -> Tensor:
    """The state of a device's default generator, in the format of the CPU's: a ByteTensor on the CPU."""
    return default_generator(device).get_state()


def get_rng_state_all() -> list[Tensor]:
    """The state for every device."""
    return [get_rng_state(index) for index in range(device_count())]


def set_rng_state(new_state: Tensor, device: Any = None) -> None:
    """Set the state of a device's default generator."""
    default_generator(device).set_state(new_state)


def set_rng_state_all(new_states: list[Tensor]) -> None:
    """Set the state for every device."""
    for index, state in enumerate(new_states):
        set_rng_state(state, index)


def manual_seed(seed: int) -> None:
    """Seed the current device's default generator."""
    default_generator().manual_seed(int(seed))


def manual_seed_all(seed: int) -> None:
    """Seed every device; with separate generators only the current one, as the others belong to other ranks."""
    for index in [current_device()] if build.load().separate_generators() else range(device_count()):
        default_generator(index).manual_seed(int(seed))


def seed() -> None:
    """Seed the current device with a number from the operating system."""
    default_generator().seed()


def seed_all() -> None:
    """Seed every device with one number from the operating system."""
    manual_seed_all(default_generator().seed())


def initial_seed() -> int:
    """The seed of the current device's default generator."""
    return default_generator().initial_seed()


def separate_generators(on: bool = True) -> None:
    """Set whether each device has its own default generator, which starts in the CPU generator's current state."""
    build.load().set_separate_generators(on)
