"""
Whether peers run the same units, on devices where looking makes the host wait.

On the CPU every gather is looked at when it arrives. Elsewhere what arrived is kept and looked at once, at the end of
the backward, or of a forward that keeps no graph: in the first iteration, and in those whose order is not that of the
last one. A rank whose order never changes, and that agreed with its peers once, agrees with them still.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from fsdp_conformance.engine.errors import ExecutionOrderError


class _Arrived(NamedTuple):
    unit: str
    expected: int
    tag: Tensor  # 0-dim, on the device


class OrderWatch:
    """The tags that arrived in one iteration."""

    def __init__(self) -> None:
        self.is_on = True
        """Whether this iteration is looked at."""
        self._arrived: list[_Arrived] = []

    def note(self, unit: str, expected: int, tag: Tensor) -> None:
        """A tag has arrived, for the current stream. Its memory is the unit's, so it is copied."""
        if self.is_on:
            self._arrived.append(_Arrived(unit, expected, tag.detach().to(torch.float32, copy=True)))

    def judge(self) -> None:
        """Raise ExecutionOrderError if one was another unit's, naming all of them. The host waits if there are any."""
        arrived, self._arrived = self._arrived, []
        if not arrived:
            return
        found = torch.stack([each.tag for each in arrived]).tolist()
        problems = [
            f"unit {number:g} was gathered, but should be {each.expected}: {each.unit}"
            for each, number in zip(arrived, found, strict=True)
            if number != each.expected
        ]
        if problems:
            raise ExecutionOrderError(
                problems,
                where=f"rank {torch.distributed.get_rank()}",
                hint="All ranks must run the same units in the same order.",
            )

    def forget(self) -> None:
        """Drop what arrived: after an exception."""
        self._arrived.clear()
