"""The advice belongs to the finding that is shown: to its cause, to the kind of its value, to its requirement."""

from __future__ import annotations

import pytest

from fsdp_conformance import contract
from fsdp_conformance.diagnosis.advice import look_at
from fsdp_conformance.outcome.records import CaseRecord, Finding
from fsdp_conformance.verdict import Verdict


def _advice(requirement: str, check: str, likely: str | None) -> str:
    finding = Finding(requirement=requirement, check=check, message="value: expected 1, got 2", likely=likely)
    # The case is named after another requirement.
    record = CaseRecord(case="R008/some-ws2", requirements=["R008"], chapter="A", verdict=Verdict.FAIL)
    record.findings = [finding]
    return look_at(record, finding)


def _of(requirement: str) -> str:
    return contract.load()[requirement].look_at


@pytest.mark.parametrize("likely", [None, "scaled: got / expected = 0.9", "summed over ranks instead of averaged: x"])
def test_the_requirement_of_the_finding_advises(likely: str | None) -> None:
    """Not that of the case, where the cause says nothing more."""
    assert _advice("R003", "gradient parity", likely) == _of("R003")


@pytest.mark.parametrize(
    ("likely", "words"),
    [
        ("stale: from an earlier save, as it was after step 0", "What the first save made"),
        ("stale parameters: forward saw those of the previous step", "gathered again"),
        ("of a later step than the save: as it was after step 3", "asynchronous save"),
        ("the optimizer's step counter was lost: it starts again from zero", "counter `step`"),
        ("every group has the settings of group 0: the value is exactly what that gives", "parameter groups"),
        ("padding was saved as data: the last 1 of 8 rows", "cut off"),
        ("the norm of this rank's shards alone: the value is exactly what that gives", "reduction of the norm"),
        ("before unscaling: the norm is that of the scaled gradients", "order of unscaling"),
        ("kept in every step: each of 3 steps adds 12 B", "each step appends"),
        ("not in the list, or rows of a shard lost: row 3", "uneven shards"),
    ],
)
def test_a_cause_advises_where_it_says_more(likely: str, words: str) -> None:
    """Whatever the requirement."""
    assert words in _advice("R149", "continuation", likely)


@pytest.mark.parametrize("likely", ["stale by one step: x", "zeros were seen: x"])
def test_other_causes_do_not_get_that_advice(likely: str) -> None:
    """A cause that only begins alike."""
    assert _advice("R149", "continuation", likely) == _of("R149")


def test_values_at_the_start_are_no_losses() -> None:
    """A buffer that was not broadcast says nothing about the first loss."""
    advice = _advice("R001", "initial parity", None)

    assert advice != _of("R001")
    assert "buffers" in advice


def test_padding_is_no_general_advice() -> None:
    """It is a cause, which needs proof."""
    mentioned = [item.id for item in contract.load().requirements.values() if "saved as data" in item.look_at]

    assert mentioned == []
