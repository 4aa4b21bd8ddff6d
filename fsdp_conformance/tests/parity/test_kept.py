"""A finding with what the elements of a second run show."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from fsdp_conformance.parity.changed import OF_A_SHARD
from fsdp_conformance.parity.finding import Finding, Whose
from fsdp_conformance.parity.gradients import ROUNDED
from fsdp_conformance.parity.kept import keep_of, with_element
from fsdp_conformance.parity.models import DRAWN, MOVED
from fsdp_conformance.recordings.events import USED, Keep

GUESS = f"{ROUNDED} bfloat16"
OPEN = "the reduction, or a hook"


@pytest.mark.parametrize(
    ("whose", "likely", "name", "expected", "evidence"),
    [
        (Whose.ENGINE, "", "first", "a row is lost", ""),
        (Whose.ENGINE, GUESS, "first", "a row is lost", ""),
        (Whose.EITHER, OPEN, "first", "a row is lost", f"it may be {OPEN}"),
        (Whose.ENGINE, "stale", "first", "stale", "the elements show: a row is lost"),
        (Whose.ENGINE, "backward 1 counts 0.5 times", "first", "backward 1 counts 0.5 times", ""),
        (Whose.SCRIPT, OF_A_SHARD, "first", "a row is lost", ""),
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


def test_elements_show_what_a_script_has_loaded() -> None:
    finding = Finding(
        title="", whose=Whose.SCRIPT, step=0, likely="the script makes the state", kind="loaded state", tensors=("w",)
    )
    element = {"index": [1], "rank": 1, "wrong": 1, "elements": 3, "name": "w", "got": "0", "expected": "2"}

    shown = with_element(finding, {**element, "likely": "rank 1 has rank 0's"})

    assert shown.likely == "the script makes the state: rank 1 has rank 0's"


@pytest.mark.parametrize("guess", [DRAWN, MOVED])
def test_elements_show_where_initial_values_come_from(guess: str) -> None:
    finding = Finding(title="", whose=Whose.SCRIPT, step=0, likely=guess, kind="begin", tensors=("w",))
    element = {"index": [1], "rank": 1, "wrong": 1, "elements": 3, "name": "w", "got": "0", "expected": "2"}

    shown = with_element(finding, {**element, "likely": "rank 1 has rank 0's"})
    unknown = with_element(finding, {**element, "likely": ""})

    assert shown.likely == (
        "rank 1 has rank 0's, as where each rank draws its shard with the same numbers, or loads that of another rank"
    )
    assert unknown.likely == guess


@pytest.mark.parametrize("guess", ["", "the engine has gathered old values"])
def test_the_parameters_that_a_forward_computes_with(guess: str) -> None:
    names = ("large", "w", "tied")
    finding = Finding(
        title="",
        whose=Whose.ENGINE,
        step=2,
        likely=guess,
        kind=USED,
        tensors=names,
        number=1,
        evidence=("inputs agree",),
    )
    values = {
        name: SimpleNamespace(shape=shape, dtype="float32")
        for name, shape in {"large": (1 << 12, 1 << 12), "w": (3,)}.items()
    }
    step = SimpleNamespace(begin=SimpleNamespace(values=values))
    reference: Any = SimpleNamespace(steps=[None, None, step], tied={"w": ("tied",)})

    keep = keep_of(finding, reference)

    # What is too large is left out; the others may still show the reason.
    assert keep == Keep(step=2, kind=USED, names=("w", "tied"), number=1)
    element = {"index": [1], "rank": 1, "wrong": 1, "elements": 3, "name": "w", "got": "0", "expected": "2"}
    shown = with_element(finding, {**element, "likely": "a row is lost"})
    assert shown.likely == "the module computes with other values of 'w' than this parameter has: a row is lost"
    assert shown.evidence[2:] == ((f"it may be {guess}",) if guess else ())


def test_elements_show_what_a_script_has_written() -> None:
    """That it has written is known; what it did is a guess."""
    finding = Finding(
        title="", whose=Whose.SCRIPT, step=0, likely="the script writes to 'w': a guess", kind="begin", tensors=("w",)
    )
    element: dict[str, Any] = {
        "index": [],
        "rank": None,
        "wrong": 1,
        "elements": 1,
        "name": "w",
        "got": "0",
        "expected": "1",
    }

    shown = with_element(finding, {**element, "likely": "shards in the wrong place"})

    assert shown.likely == "the script writes to 'w': shards in the wrong place"


@pytest.mark.parametrize(
    ("first", "kept"), [("a", ("a", "b")), ("c", ("c",)), ("huge", None)], ids=["same shape", "alone", "too large"]
)
def test_tensors_of_the_same_shape_are_kept_as_well(first: str, kept: tuple[str, ...] | None) -> None:
    """Wrong elements may be those of another tensor."""
    shapes = {"a": (3, 4), "b": (3, 4), "c": (12,), "huge": (1 << 12, 1 << 12)}
    values = {name: SimpleNamespace(shape=shape, dtype="float32") for name, shape in shapes.items()}
    reference: Any = SimpleNamespace(steps=[SimpleNamespace(unclipped=SimpleNamespace(values=values))])
    finding = Finding(title="", whose=Whose.ENGINE, step=0, kind="gradient", tensors=(first,))

    keep = keep_of(finding, reference)

    assert (keep.names if keep is not None else None) == kept
