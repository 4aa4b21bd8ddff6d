"""The states of a unit in training, each by what is in memory then, and the moves between them that are legal."""

from __future__ import annotations

from enum import Enum
from types import MappingProxyType


class TrainingState(Enum):
    """Where a unit is in the training step."""

    # Members are single objects. Enum hashes their names, in Python, and states are looked up all the time.
    __hash__ = object.__hash__

    IDLE = "idle"
    """Modules see the originals. Between forward and backward the whole parameters may be there all the same."""
    FORWARD = "forward"
    """In its forward: unsharded, and modules see whole parameters."""
    BACKWARD = "backward"
    """From the gradient of its output to those of its inputs: unsharded, and modules see whole parameters."""
    SUMMONED = "summoned"
    """A user looks at whole parameters, outside of a step."""


#: FORWARD to BACKWARD does not exist: a unit leaves its forward before a gradient reaches it.
TRAINING_TRANSITIONS = MappingProxyType(
    {
        TrainingState.IDLE: frozenset({TrainingState.FORWARD, TrainingState.BACKWARD, TrainingState.SUMMONED}),
        TrainingState.FORWARD: frozenset({TrainingState.IDLE}),
        TrainingState.BACKWARD: frozenset({TrainingState.IDLE}),
        TrainingState.SUMMONED: frozenset({TrainingState.IDLE}),
    }
)
