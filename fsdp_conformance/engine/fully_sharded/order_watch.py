"""
Checks that peers run the same units, on devices where reading a tensor makes the host wait.

On the CPU every gather is checked when it arrives. Elsewhere the tags that arrive are kept and checked together, at the
end of the backward or of a forward without a graph, in the first iteration and in iterations whose order differs from
the previous one. A rank that agreed with its peers once, and whose order never changes, still agrees with them.
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
        """Whether this iteration is checked."""
        self._arrived: list[_Arrived] = []

    def note(self, unit: str, expected: int, tag: Tensor) -> None:
        """Keep a tag that has arrived, for the current stream: a copy, because its memory is the unit's."""
        if self.is_on:
            self._arrived.append(_Arrived(unit, expected, tag.detach().to(torch.float32, copy=True)))

    def judge(self) -> None:
        """Raise ExecutionOrderError naming every tag of another unit. The host waits if any tag was noted."""
        arrived, self._arrived = self._arrived, []
        if not arrived:
            return
        found = torch.stack([each.tag for each in arrived]).tolist()
        problems = [
            f"expected unit {each.expected} ({each.unit}), gathered unit {number:g}"
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
        """Drop what has arrived, after an exception."""
        self._arrived.clear()
