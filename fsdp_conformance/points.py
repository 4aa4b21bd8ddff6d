"""Every point of a step at which an action is legal, as regimes that have the action there."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

from fsdp_conformance.events import LEGAL, PER_MICRO_BATCH, Action, Event, Moment
from fsdp_conformance.workload import Regime


def every_point(
    regime: Regime, action: Action, *, runs: int | None = None, pending: bool | None = None, **fields: Any
) -> Iterator[tuple[str, Regime]]:
    """
    Regimes that together have the action at each legal point of a step, each with a description of its points.

    The points of a step are its moments, with each micro-batch where a moment has one. A regime has the action at its
    points in every step, so that a trace that reaches the next step is seen there. Without `runs`, each point has a
    regime of its own; with it, the points are dealt to that many regimes in turn, so that neighbours are apart.

    `pending`: only the points at which a step's gradients are complete and wait for the optimizer, or all but these.
    `fields` are further fields of the events.
    """
    last = regime.micro_batches - 1
    points = [
        (moment, micro)
        for moment in Moment
        for micro in (range(regime.micro_batches) if moment in PER_MICRO_BATCH else (0,))
        if moment in LEGAL[action]
        and pending in (None, moment is Moment.OPTIMIZER or (moment is Moment.BACKWARD and micro == last))
    ]
    for dealt in (points[start :: runs or len(points)] for start in range(min(runs or len(points), len(points)))):
        events = tuple(
            Event(action=action, moment=moment, step=step, micro=micro, **fields)
            for step in range(regime.steps)
            for moment, micro in dealt
        )
        where = (f"{moment} of micro-batch {micro}" if moment in PER_MICRO_BATCH else moment for moment, micro in dealt)
        yield f"{action} {', '.join(where)}", replace(regime, events=(*regime.events, *events))
