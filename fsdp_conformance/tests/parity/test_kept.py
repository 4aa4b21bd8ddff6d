"""A finding with what the elements of a second run show."""

from __future__ import annotations

import pytest

from fsdp_conformance.parity.finding import Finding, Whose
from fsdp_conformance.parity.gradients import ROUNDED
from fsdp_conformance.parity.kept import with_element

GUESS = f"{ROUNDED} bfloat16"
OPEN = "the reduction, or a hook"


@pytest.mark.parametrize(
    ("whose", "likely", "name", "expected", "evidence"),
    [
        (Whose.ENGINE, "", "first", "a row is lost", ""),
        (Whose.ENGINE, GUESS, "first", "a row is lost", ""),
        (Whose.EITHER, OPEN, "first", "a row is lost", f"it may be {OPEN}"),
        (Whose.ENGINE, "stale", "first", "stale", "the elements show: a row is lost"),
        (Whose.ENGINE, "", "second", "", "its elements show: a row is lost"),
    ],
)
def test_the_cause_that_elements_show(whose: Whose, likely: str, name: str, expected: str, evidence: str) -> None:
    """It replaces a guess, but not a known cause. If the elements are of a later tensor, it is only evidence."""
    finding = Finding(title="The gradients differ", whose=whose, step=0, likely=likely, tensors=("first", "second"))
    element = {"index": [3, 0], "rank": 1, "wrong": 4, "elements": 8, "name": name}

    shown = with_element(finding, {**element, "got": "0", "expected": "0.5", "likely": "a row is lost"})

    assert shown.likely == expected
    assert shown.evidence == (
        f"in '{name}', element [3, 0] of rank 1 is the first wrong one: 0 instead of 0.5; 4 of 8 are wrong",
        *([evidence] if evidence else []),
    )
