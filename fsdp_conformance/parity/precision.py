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
    mine, theirs = (dict.fromkeys(name for each in both.steps for name in each.rounded) for both in (step, expected))
    names = [name for name in mine if name not in theirs]
    if len(names) < _LEAST or reference.sharding != "taken out":
        return
    values, others = step.reduced.values, expected.reduced.values
    # Ranks look at some of the elements that they hold: equal tensors may look rounded in one run alone, by chance.
    names = [name for name in names if name in others and not values[name].equals(others[name])]
    if len(names) < _LEAST:
        return
    yield Finding(
        title="The gradients are rounded to bfloat16",
        whose=whose,
        step=number,
        first=f"'{names[0]}' has only numbers of bfloat16, and is kept in float32",
        likely="they are reduced in bfloat16, although the script asks for a more precise `reduce_dtype`",
        evidence=number_of_tensors(len(names), len(others)),
        line=step.backward_line,
    )
