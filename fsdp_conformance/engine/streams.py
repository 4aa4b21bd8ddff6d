"""
The streams of one device, or none: what orders work that is issued from several of them.

On the CPU there are no streams and everything here does nothing, at the price of one comparison.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor


class Streams:
    """The current stream of a device, and the order between it and others."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._module: Any = None if device.type in ("cpu", "meta") else torch.get_device_module(device.type)
        self.exist = self._module is not None
        """Whether the device has streams."""

    def current(self) -> Any:
        """The current stream of the device; None where there are none."""
        return None if self._module is None else self._module.current_stream(self._device)

    def follow(self, others: Iterable[Any]) -> None:
        """What is issued on the current stream from now on runs after what `others` have been given so far."""
        if self._module is None:
            return
        current = self.current()
        for stream in others:
            if stream is not None and stream != current:
                current.wait_stream(stream)

    def keep(self, tensor: Tensor, allocated_on: Any) -> None:
        """
        Let the memory of `tensor` not be reused before the current stream is done with it.

        The allocator gives a freed block to the stream that it was allocated on, and knows of no other by itself.
        """
        if self._module is not None:
            current = self.current()
            if current != allocated_on:
                tensor.record_stream(current)
