"""What the allocator of a rank's accelerator had given out at the border of two phases of training."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum


class Point(StrEnum):
    """Places of the training loop at which bytes are counted."""

    BEFORE_SETUP = "before setup"
    SETUP = "setup"
    """The model is wrapped, and its optimizer made."""
    FORWARD = "forward"
    """The loss of a micro-batch is there, and its graph is alive."""
    BACKWARD = "backward"
    """The last backward of the step has returned, and nothing of its graph is held by the loop."""
    STEP = "step"
    """The optimizer has stepped and dropped the gradients."""


@dataclass(frozen=True, kw_only=True, slots=True)
class MemoryMark:
    """Bytes of tensors on this rank's accelerator. What the loop itself holds there (batches) is left out."""

    point: Point
    step: int | None
    allocated: int
    """Given out now."""
    peak: int
    """The most that was given out at once since the mark before."""
