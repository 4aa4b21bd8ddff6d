"""The comparison of two trainings as one HTML file: the first difference on top, then every tensor over the steps."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from fsdp_conformance.parity.finding import Finding
from fsdp_conformance.parity.result import Comparison
from fsdp_conformance.parity.text import agreement_of, verdict_of
from fsdp_conformance.parity.trajectory import Curve, Distance, Trajectory, curves, trajectories
from fsdp_conformance.report.html.page import rendered
from fsdp_conformance.report.html.pictures import MOST_ROWS, Lane, Mark, Strip

#: The name of the file in a directory of recordings.
NAME = "report.html"

#: More steps than these share a column, which shows the worst of them.
MOST_COLUMNS = 60

#: The size of a plot.
WIDTH, HEIGHT = 640, 160


@dataclass(frozen=True, slots=True)
class Plot:
    """A number of both runs over the steps, as points of an SVG of WIDTH by HEIGHT."""

    name: str
    run: str
    reference: str
    low: str
    high: str
    last: int
    """The number of the last step."""


@dataclass(frozen=True, slots=True)
class TrainingView:
    """The content of the page."""

    title: str
    words: str
    tone: str
    findings: tuple[Finding, ...]
    suspicions: tuple[Finding, ...]
    agreement: tuple[str, ...]
    plots: tuple[Plot, ...]
    strips: tuple[tuple[str, Strip], ...]
    """The tensors of each kind."""


def training_page(comparison: Comparison) -> str:
    """The whole file. Names that come from a recording are escaped."""
    run, reference = comparison.run, comparison.reference
    tensors = list(trajectories(run, reference, comparison.noise))
    by_kind = itertools.groupby(tensors, key=lambda trajectory: trajectory.kind)
    view = TrainingView(
        title=f"{run.script}: {run.name} and {reference.name}",
        words=verdict_of(comparison),
        tone="bad" if comparison.differs else "good" if comparison.steps else "",
        findings=tuple(comparison.findings),
        suspicions=tuple(comparison.suspicions),
        agreement=tuple(text for text, _ in agreement_of(comparison)),
        plots=tuple(plot for plot in map(_plot, curves(run, reference)) if plot is not None),
        strips=tuple((kind, _strip(list(each))) for kind, each in by_kind),
    )
    return rendered("training.html", view=view, width=WIDTH, height=HEIGHT)


def _strip(tensors: Sequence[Trajectory]) -> Strip:
    """A row for each tensor, in the order of the model. Of too many, those that are furthest from the reference."""
    steps = sorted({distance.step for tensor in tensors for distance in tensor.distances})
    shown = sorted(tensors, key=lambda tensor: -tensor.worst)[:MOST_ROWS]
    columns = list(_columns(steps))
    lanes = tuple(
        Lane(tensor.name, tuple(_mark(tensor, column) for column in columns)) for tensor in tensors if tensor in shown
    )
    names = tuple(str(column[0]) if len(column) == 1 else f"{column[0]} to {column[-1]}" for column in columns)
    return Strip(names, lanes, left_out=len(tensors) - len(lanes))


def _columns(steps: Sequence[int]) -> Iterator[Sequence[int]]:
    size = max(1, -(-len(steps) // MOST_COLUMNS))
    return (steps[begin : begin + size] for begin in range(0, len(steps), size))


def _mark(tensor: Trajectory, steps: Sequence[int]) -> Mark | None:
    """The worst of some steps. None if the tensor is equal bit for bit in all of them, or there is none."""
    distances = [distance for distance in tensor.distances if distance.step in steps and distance.value]
    if not distances:
        return None
    worst = max(distances, key=_ratio)
    if worst.bound is None:
        return Mark(f"{_where(tensor, worst)}: rounding alone is too large to judge", kind="unjudged")
    text = f"{_where(tensor, worst)}: relative difference {worst.value:.2g}, rounding explains {worst.bound:.2g}"
    return Mark(text, kind="beyond" if worst.is_beyond else "rounding", share=min(1.0, _ratio(worst)))


def _where(tensor: Trajectory, distance: Distance) -> str:
    return f"{tensor.kind} '{tensor.name}' at step {distance.step}"


def _ratio(distance: Distance) -> float:
    return distance.value / distance.bound if distance.bound else 0.0


def _plot(curve: Curve) -> Plot | None:
    numbers = [number for number in (*curve.run, *curve.reference) if number is not None]
    if not numbers:
        return None
    low, high = min(numbers), max(numbers)
    last = max(len(curve.run), len(curve.reference)) - 1

    def points(values: Sequence[float | None]) -> str:
        spread = (high - low) or 1.0
        return " ".join(
            f"{step / max(last, 1) * WIDTH:.1f},{HEIGHT - (value - low) / spread * HEIGHT:.1f}"
            for step, value in enumerate(values)
            if value is not None
        )

    return Plot(curve.name, points(curve.run), points(curve.reference), f"{low:.4g}", f"{high:.4g}", last)
