"""Bytes allocated on a rank's accelerator at points of the training loop."""

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
    """Bytes of tensors on this rank's accelerator, without those that the loop itself holds (batches)."""

    point: Point
    step: int | None
    allocated: int
    """Bytes allocated now."""
    peak: int
    """The most bytes allocated at once since the previous mark."""
