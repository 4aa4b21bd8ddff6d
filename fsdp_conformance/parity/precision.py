"""Gradients that are less precise than a script asks for, although no further off than its rounding is."""

from __future__ import annotations

from collections.abc import Iterator

from fsdp_conformance.parity.finding import Finding, Whose
from fsdp_conformance.parity.runs import Run
from fsdp_conformance.parity.words import number_of_tensors

#: So many tensors are not rounded by chance.
_LEAST = 4


def rounded_gradients(run: Run, reference: Run, number: int, whose: Whose) -> Iterator[Finding]:
    """Gradients of a step that only the run has rounded. Another script may ask for another precision."""
    step, expected = run.steps[number], reference.steps[number]
    mine, theirs = (
        {name: dtype for each in both.steps for name, dtype in each.rounded.items()} for both in (step, expected)
    )
    names = [name for name in mine if name not in theirs]
    if len(names) < _LEAST or reference.sharding != "taken out":
        return
    dtype = mine[names[0]]
    yield Finding(
        title=f"The gradients are rounded to {dtype}",
        whose=whose,
        step=number,
        first=f"'{names[0]}' has only numbers of {dtype}, and is kept in float32",
        likely=f"they are reduced in {dtype}, although the script asks for a more precise `reduce_dtype`",
        evidence=number_of_tensors(len(names), len(expected.reduced.values)),
        line=step.backward_line,
    )
