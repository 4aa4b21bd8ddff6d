"""Gradients that a run has rounded, where the reference has not."""

from __future__ import annotations

from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import pytest

from fsdp_conformance.parity.finding import Whose
from fsdp_conformance.parity.precision import rounded_gradients

NAMES = tuple("abcdef")


class Value:
    def __init__(self, content: str) -> None:
        self.content = content

    def equals(self, other: Value) -> bool:
        return self.content == other.content


def _run(rounded: Sequence[str], content: str, sharding: str = "kept") -> Any:
    step = SimpleNamespace(
        steps=[SimpleNamespace(rounded=tuple(rounded))],
        reduced=SimpleNamespace(values={name: Value(content) for name in NAMES}),
        backward_line="train.py:7",
    )
    return SimpleNamespace(steps=[step], sharding=sharding)


def test_they_are_a_finding_although_their_difference_is_small() -> None:
    (finding,) = rounded_gradients(_run(NAMES, "run"), _run("f", "reference", "taken out"), 0, Whose.ENGINE)

    assert finding.title == "The gradients are rounded to bfloat16"
    assert finding.first.startswith("'a' has only numbers of bfloat16")
    assert finding.evidence == ("5 of 6 tensors differ",)


@pytest.mark.parametrize(
    ("run", "reference"),
    [
        (_run(NAMES, "run"), _run("", "reference")),
        (_run(NAMES, "run"), _run(NAMES, "reference", "taken out")),
        (_run("abc", "run"), _run("", "reference", "taken out")),
        (_run(NAMES, "equal"), _run("", "equal", "taken out")),
    ],
    ids=["another script", "in both runs", "few by chance", "equal tensors"],
)
def test_what_may_be_meant_is_none(run: Any, reference: Any) -> None:
    assert list(rounded_gradients(run, reference, 0, Whose.ENGINE)) == []
