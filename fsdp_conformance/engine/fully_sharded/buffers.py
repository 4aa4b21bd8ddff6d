"""The floating-point buffers of a unit: in the policy's dtype while it trains, in their own on request."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import Tensor

Place = tuple[dict[str, Tensor | None], str]
"""A module's registry of buffers, and a key in it."""


class UnitBuffers:
    """
    Buffers at `places`, and the dtype that floating-point ones are cast to; None: they are not cast.

    A cast registers a new tensor, as `nn.Module.to` does: a graph keeps the one that it has saved.
    """

    def __init__(self, places: Iterable[Place], dtype: torch.dtype | None) -> None:
        self._places = list(places)
        self._dtype = dtype
        self._own: list[torch.dtype | None] = [None] * len(self._places)
        """The original dtypes of buffers that are cast."""

    @property
    def are_cast(self) -> bool:
        """True if any of them is cast."""
        return any(dtype is not None for dtype in self._own)

    def lower(self) -> None:
        """Cast them to the policy's dtype."""
        if self._dtype is None:
            return
        cast: dict[int, Tensor] = {}
        for index, (registry, key) in enumerate(self._places):
            buffer = registry.get(key)
            if buffer is not None and buffer.is_floating_point() and buffer.dtype is not self._dtype:
                self._own[index] = buffer.dtype
                registry[key] = cast.setdefault(id(buffer), buffer.to(self._dtype))

    def restore(self) -> bool:
        """Cast them back to their own dtype. Returns whether any of them was cast."""
        if not self.are_cast:
            return False
        restored = self.in_own_dtype()
        for registry, key in self._places:
            registry[key] = restored.get(id(registry.get(key)), registry.get(key))
        self._own = [None] * len(self._places)
        return True

    def in_own_dtype(self) -> dict[int, Tensor]:
        """The buffers that are cast, converted to their own dtype, by the id of the registered tensor."""
        restored: dict[int, Tensor] = {}
        for (registry, key), dtype in zip(self._places, self._own, strict=True):
            buffer = registry.get(key)
            if buffer is not None and dtype is not None and id(buffer) not in restored:
                restored[id(buffer)] = buffer.detach().to(dtype)
        return restored

    def copied(self, memo: Mapping[int, Any]) -> UnitBuffers:
        """The buffers of a deep copy of the modules."""
        twin = UnitBuffers([(memo[id(registry)], key) for registry, key in self._places], self._dtype)
        twin._own = list(self._own)
        return twin
