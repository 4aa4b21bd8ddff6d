"""
The order between the streams of one device.

The CPU has no streams: there, everything in this module does nothing, at the price of one comparison.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor


class Streams:
    """The current stream of a device, and its order relative to others."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._module: Any = None if device.type in ("cpu", "meta") else torch.get_device_module(device.type)
        self.exist = self._module is not None
        """Whether the device has streams."""

    def current(self) -> Any:
        """The current stream of the device; None if it has no streams."""
        return None if self._module is None else self._module.current_stream(self.device)

    def follow(self, others: Iterable[Any]) -> None:
        """Make later work on the current stream run after all work issued on `others` so far."""
        if self._module is None:
            return
        current = self.current()
        for stream in others:
            if stream is not None and stream != current:
                current.wait_stream(stream)

    def keep(self, tensor: Tensor, allocated_on: Any = None) -> None:
        """
        Keep the memory of `tensor`, once freed, from being reused before the current stream is done with it.

        The allocator by itself only considers the stream that allocated it. That one needs no keeping, if it is known.
        """
        if self._module is not None:
            current = self.current()
            # torch.Stream answers False to both `== None` and `!= None` (2.13).
            if allocated_on is None or current != allocated_on:
                tensor.record_stream(current)
