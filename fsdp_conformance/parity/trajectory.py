"""How far each tensor is from the reference in each step, beyond the first difference too; and both runs' losses."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from fsdp_conformance.parity.noise import TENSORS, Noise, Select
from fsdp_conformance.parity.runs import Run, TrainingStep
from fsdp_conformance.recordings.fingerprint import relative

#: The kinds that are followed.
KINDS = ("gradient", "parameter", "optimizer state", "buffer")


@dataclass(frozen=True, slots=True)
class Distance:
    """A tensor's distance from the reference at a step, relative to its norm."""

    step: int
    value: float
    """0 if it is equal bit for bit; infinite if its shape or dtype differs, or which elements are finite."""
    bound: float | None
    """The part that rounding explains. None if rounding alone is too large to judge."""

    @property
    def is_beyond(self) -> bool:
        """True if rounding does not explain it."""
        return self.bound is not None and self.value > self.bound


@dataclass(frozen=True, slots=True)
class Trajectory:
    """A tensor over the steps."""

    kind: str
    name: str
    distances: tuple[Distance, ...]

    @property
    def worst(self) -> float:
        """The largest distance in units of its bound."""
        return max((each.value / each.bound for each in self.distances if each.bound), default=0.0)


@dataclass(frozen=True, slots=True)
class Curve:
    """A number of both runs over the steps. None where one has none."""

    name: str
    run: tuple[float | None, ...]
    reference: tuple[float | None, ...]


def trajectories(run: Run, reference: Run, noise: Noise) -> Iterator[Trajectory]:
    """Those of all tensors that both have, the kinds in the order of a step."""
    steps = list(zip(run.steps, reference.steps, strict=False))
    for kind in KINDS:
        select = TENSORS[kind]
        names = dict.fromkeys(name for _, expected in steps for name in select(expected).values)
        for name in names:
            distances = tuple(_distances(kind, select, name, steps, noise))
            if distances:
                yield Trajectory(kind, name, distances)


def _distances(
    kind: str, select: Select, name: str, steps: Sequence[tuple[TrainingStep, TrainingStep]], noise: Noise
) -> Iterator[Distance]:
    for step, expected in steps:
        value, wanted = select(step).values.get(name), select(expected).values.get(name)
        if value is not None and wanted is not None:
            distance = float("inf") if value.dtype != wanted.dtype else relative(value, wanted)
            yield Distance(step.number, distance, noise.bound(kind, select, step.number, name))


def curves(run: Run, reference: Run) -> list[Curve]:
    """The mean loss of the ranks and passes, and the norm of all gradients before clipping."""
    return [
        Curve(name, tuple(map(measure, run.steps)), tuple(map(measure, reference.steps)))
        for name, measure in (("loss", _loss), ("norm of the gradients", _norm))
    ]


def _loss(step: TrainingStep) -> float | None:
    losses = [backward.loss for backwards in step.backwards for backward in backwards]
    known = [loss for loss in losses if loss is not None]
    return sum(known) / len(known) if known and len(known) == len(losses) else None


def _norm(step: TrainingStep) -> float | None:
    values = step.unclipped.values.values()
    if not values or any(value.nonfinite for value in values):
        return None
    return float(sum(value.square for value in values) ** 0.5)
