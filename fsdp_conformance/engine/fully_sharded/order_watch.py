"""
Checks that peers run the same units, on devices where reading a tensor makes the host wait.

On the CPU every gather and every reduction is checked when it arrives. Elsewhere the tags that arrive are kept and
checked together, at the end of the backward or of a forward without a graph, in the first iteration and in iterations
whose order differs from the previous one. A rank that agreed with its peers once, and whose order never changes, still
agrees with them; if a peer changes its order, that one finds out.

What is gathered ends with the last rank's tag. So the last rank sees its own, and finds out by the average of all,
which it gets with the gradients. Where there are none, in a forward without a graph and for frozen units, nobody
notices if the last rank alone changes its order.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from typing import NamedTuple

import torch
from torch import Tensor

from fsdp_conformance.engine.errors import ExecutionOrderError


class _Arrived(NamedTuple):
    unit: str
    expected: int
    tag: Tensor  # 0-dim
    what: str
    tolerance: float

    def is_refuted_by(self, number: float) -> bool:
        """Whether `number` is not the expected tag. An average that is NaN is none of other tags: it says nothing."""
        return abs(number - self.expected) > self.tolerance or (math.isnan(number) and self.what == "gathered")


class OrderWatch:
    """The tags that arrived in one iteration."""

    def __init__(self) -> None:
        self.is_on = True
        """Whether this iteration is checked."""
        self._arrived: list[_Arrived] = []

    def note(self, unit: str, expected: int, tag: Tensor, *, what: str = "gathered", tolerance: float = 0.0) -> None:
        """
        Keep a tag that has arrived, for the current stream: a copy, because its memory is the unit's.

        `what` was done with it; `tolerance`: how far it may be from `expected`.
        """
        if self.is_on:
            kept = tag.detach().reshape(()).to(torch.float32, copy=True)
            self._arrived.append(_Arrived(unit, expected, kept, what, tolerance))

    def judge(self) -> None:
        """Raise ExecutionOrderError naming every tag of another unit. The host waits if any tag was noted."""
        arrived, self._arrived = self._arrived, []
        if not arrived:
            return
        problems = [
            f"expected unit {each.expected} ({each.unit}), {each.what} unit {number:g}"
            for each, number in _numbers(arrived)
            if each.is_refuted_by(number)
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


def _numbers(arrived: Iterable[_Arrived]) -> Iterator[tuple[_Arrived, float]]:
    """Each with the number that its tag is. The host waits once for each device: offloaded gradients are on the CPU."""
    by_device: dict[torch.device, list[_Arrived]] = {}
    for each in arrived:
        by_device.setdefault(each.tag.device, []).append(each)
    for same in by_device.values():
        yield from zip(same, torch.stack([each.tag for each in same]).tolist(), strict=True)
