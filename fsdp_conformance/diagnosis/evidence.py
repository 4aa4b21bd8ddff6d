"""A tensor that differs, with all that may explain it."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from torch import Tensor


@dataclass(frozen=True, kw_only=True, slots=True)
class Evidence:
    """A tensor that differs, with what could explain it. All tensors have the same shape; `expected` is float64."""

    kind: str
    """"gradient", "parameter", "loss", ...; "state": a value of a state dict or a checkpoint."""
    got: Tensor
    expected: Tensor
    tolerance: Tensor | None
    """Per element or 0-dim; None: bitwise."""
    world_size: int
    rank: int
    micro_batches: int = 1
    previous: Tensor | None = None
    """The expected value one step earlier."""
    factors: Mapping[str, float] = field(default_factory=dict)
    """
    Other mistakes that would scale a gradient in this regime, such as a second backward that is missing, or the update
    of a parameter.
    """
    contributions: Sequence[Sequence[Tensor | None]] | None = None
    """By rank and micro-batch: the undivided gradient of that rank's loss alone."""
    others: Mapping[str, Tensor] = field(default_factory=dict)
    """Other expected tensors of the same kind, step and shape."""
    alternatives: Mapping[str, Tensor] = field(default_factory=dict)
    """For a state: the right value of another moment, and other values it may have had, by a phrase for each."""
    unit: tuple[Tensor, Tensor] | None = None
    """The flat values, actual and expected, of all parameters that are sharded together with this one."""
    supposed: Callable[[], Iterable[tuple[str, Tensor]]] = tuple
    """This tensor as it would be with one mistake in the step, each with the mistake in a phrase."""
