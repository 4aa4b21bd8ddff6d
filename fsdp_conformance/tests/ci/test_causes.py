"""The study of causes: how answers are scored, and that its engine is right where it has no defect."""

from __future__ import annotations

import pytest

from fsdp_conformance.selftest import bound_case, run_case
from fsdp_conformance.verdict import Verdict
from studies import small_engine
from studies.causes import TRUTHS, Score, defects, scored
from studies.small_defects import CLIP_2, NESTED_2, PROBE_3, THREE_DEFERRED, THREE_MICRO

pytestmark = pytest.mark.nightly


@pytest.mark.parametrize(
    ("truth", "likely", "score"),
    [
        ("summed", "summed over ranks instead of averaged: got / expected = 3", Score.RIGHT),
        ("summed", "summed over ranks instead of averaged, or counted twice: got / expected = 2", Score.BOTH),
        ("summed", "averaged twice: got / expected = 0.5", Score.WRONG),
        ("summed", "scaled: got / expected = 3.1", Score.UNKNOWN),
        ("summed", None, Score.UNKNOWN),
        ("no cause", "dropped: every element is zero", Score.WRONG),
        ("lost accumulation", "overwritten instead of accumulated, or micro-batch 0 missing: it", Score.RIGHT),
    ],
)
def test_answers_are_scored(truth: str, likely: str | None, score: Score) -> None:
    """A cause that is named among others counts separately, and a description is not a cause."""
    assert scored(truth, likely) is score


def test_every_defect_has_a_truth_and_cases() -> None:
    """At least fifty known-wrong implementations, each once, in cases that exist."""
    all_defects = defects()

    assert len({defect.name for defect in all_defects}) == len(all_defects) >= 50
    assert {defect.truth for defect in all_defects} <= TRUTHS.keys()
    for case in {case for defect in all_defects for case in defect.cases}:
        assert bound_case(case).case.id == case


@pytest.mark.parametrize("case", [PROBE_3, NESTED_2, THREE_MICRO, THREE_DEFERRED, CLIP_2])
def test_the_small_engine_is_right(case: str) -> None:
    """The engine without a defect passes, so a failure is due to the defect."""
    spec = f"{small_engine.__file__}:{small_engine.SmallEngine.__name__}"

    record = run_case(bound_case(case), spec)

    assert record.verdict is Verdict.PASS, record.reason
