"""
Random operations on DTensors under CUDA's names: drawn for the whole tensor, as on CUDA.

On CUDA a generator's state is a seed and an offset. DTensor moves the offset, so that each rank draws the part of the
numbers that belongs to its shard: replicas are equal, and shards differ. It does this only on devices that can set a
generator's state, and without it all ranks draw the same numbers for different shards.

The CPU's generator has no offset. For DTensor alone, its state is shown as a seed and an offset of 0, in which the seed
is a digest of the state; ranks with the same state have the same digest. Setting a seed and an offset moves the
generator to a place that depends on these two and nothing else. With offset 0 this is what `manual_seed` does, and a
generator that was just seeded shows that seed. All other code gets and sets the CPU's states, unchanged.

From the first random operation on a DTensor, the generators of GPUs are their own, so that ranks continue to draw
different numbers on the CPU: see `rng`.
"""

from __future__ import annotations

import functools
import hashlib
import struct
import sys
from collections.abc import Callable
from types import FrameType
from typing import Any

import torch
from torch import Tensor

from fsdp_conformance.simulator.device import SIMULATED, build, rng
from fsdp_conformance.simulator.import_hook import when_imported
from fsdp_conformance.simulator.replacements import Replacements

__all__ = ["install", "place_of", "state_at"]

#: DTensor's module for random numbers.
_CALLER = "torch.distributed.tensor._random"

#: What sees seeds and offsets. Since torch 2.15, an operator carries out DTensor's random operations.
_CALLERS = (_CALLER, "torch._prims.rng_prims")

#: A seed and an offset, as CUDA packs them, and the seed at the start of a CPU generator's state.
_PLACE = struct.Struct("<Qq")
_SEED = struct.Struct("<Q")


def install(replaced: Replacements) -> None:
    """When DTensor is imported, let it move the generators."""
    replaced.on_undo(when_imported(_CALLER, functools.partial(_show_places, replaced)))
    get, put = torch.Generator.get_state, torch.Generator.set_state

    def get_state(self: torch.Generator) -> Tensor:
        state = get(self)
        return place_of(state) if self.device.type == SIMULATED and _asks(sys._getframe(1)) else state

    def set_state(self: torch.Generator, new_state: Tensor) -> torch.Generator:
        if self.device.type == SIMULATED and new_state.numel() == _PLACE.size:
            new_state = state_at(new_state, get(self))
        return put(self, new_state)

    # Generators that a program passes to an operation.
    replaced.set_on_class(torch.Generator, get_state=get_state, set_state=set_state)


def _asks(frame: FrameType) -> bool:
    return frame.f_globals.get("__name__") in _CALLERS


def _show_places(replaced: Replacements) -> None:
    module: Any = sys.modules[_CALLER]
    handle_of: Callable[[str], Any] = module._get_device_handle
    was_separate = build.active().separate_generators()
    replaced.on_undo(functools.partial(rng.separate_generators, was_separate))
    sim = getattr(torch, SIMULATED)

    def get_rng_state(device: Any = None) -> Tensor:
        """For DTensor 16 bytes on the CPU."""
        if not _asks(sys._getframe(1)):
            return rng.get_rng_state(device)
        if not build.active().separate_generators():
            rng.separate_generators()
        return place_of(rng.get_rng_state(device))

    def set_rng_state(new_state: Tensor, device: Any = None) -> None:
        """Set the state, or move the generator to 16 bytes' place."""
        if new_state.numel() == _PLACE.size:
            new_state = state_at(new_state, rng.get_rng_state(device))
        rng.set_rng_state(new_state, device)

    replaced.set(sim, get_rng_state=get_rng_state, set_rng_state=set_rng_state)
    replaced.set(
        module,
        # torch 2.6 asks for "cuda" whatever the mesh is on.
        _get_device_handle=lambda kind: sim if kind in (SIMULATED, "cuda") else handle_of(kind),
        # A tracker of this simulation ends with it.
        _rng_tracker=module._rng_tracker,
    )


def place_of(state: Tensor) -> Tensor:
    """The seed and the offset for a state of the CPU's generator, in 16 bytes."""
    data = state.numpy().tobytes()
    (seed,) = _SEED.unpack_from(data)
    if not torch.equal(state, _seeded(seed)):
        (seed,) = _SEED.unpack(hashlib.blake2b(data, digest_size=_SEED.size).digest())
    return _bytes(_PLACE.pack(seed, 0))


def state_at(place: Tensor, before: Tensor) -> Tensor:
    """
    The state of the CPU's generator at a place, which is a seed and an offset.

    The generator keeps the seed that it names, which is in its state `before`, unless the offset is 0.
    """
    packed = place.cpu().numpy().tobytes()
    seed, offset = _PLACE.unpack(packed)
    if not offset:
        return _seeded(seed)
    (mixed,) = _SEED.unpack(hashlib.blake2b(packed, digest_size=_SEED.size).digest())
    state = _seeded(mixed)
    state[: _SEED.size] = before[: _SEED.size]
    return state


def _seeded(seed: int) -> Tensor:
    return torch.Generator().manual_seed(seed).get_state()


def _bytes(data: bytes) -> Tensor:
    return torch.frombuffer(bytearray(data), dtype=torch.uint8)
