"""Bytes that a rank holds on its accelerator and on the host, at points of the training loop."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum


class Point(StrEnum):
    """Points of the training loop at which bytes are counted."""

    BEFORE_SETUP = "before setup"
    SETUP = "setup"
    """The model is wrapped and its optimizer exists."""
    FORWARD = "forward"
    """The loss of a micro-batch is computed, and its graph is alive."""
    BACKWARD = "backward"
    """The last backward of the step has returned, and the loop holds nothing of its graph."""
    STEP = "step"
    """The optimizer has stepped and dropped the gradients."""


@dataclass(frozen=True, kw_only=True, slots=True)
class MemoryMark:
    """
    Bytes on this rank's accelerator, with the batches that the loop itself holds there; on the CPU none.

    Bytes on the host are counted only in a training that weighs it (`Conditions.weighs_host`).
    """

    point: Point
    step: int | None
    allocated: int
    """Bytes allocated now."""
    peak: int
    """The most bytes allocated at once since the previous mark."""
    host: int | None = None
    """
    Bytes that the rank's process holds on the host, pinned or not, whoever allocated them, without what the history
    holds. None: they were not counted.
    """
    helpers: int = 0
    """Bytes on the host that processes of this rank hold which were there after the first step."""
