"""Bytes have a cause if they are those of something whole, and none if they are not, or of several things."""

from __future__ import annotations

import pytest

from fsdp_conformance.diagnosis import amounts

UNITS = {"a": 1000, "b": 1000, "c": 3000}
FLOAT32, BFLOAT16 = "torch.float32", "torch.bfloat16"


@pytest.mark.parametrize(
    ("excess", "units"),
    [
        (5000, "all 3 units"),
        (5003, "all 3 units"),
        (3000, "c"),
        (2000, "a, b"),
        # One of two of equal size.
        (1000, "1 of 3 units"),
        (4000, "2 of 3 units"),
        (2500, None),
        (5100, None),
        (7, None),
        (-3000, None),
    ],
)
def test_units_that_are_held(excess: int, units: str | None) -> None:
    """Named if the bytes fit, up to a few scalars."""
    assert amounts.units_held(excess, UNITS, slack=8) == units


def test_units_of_which_different_numbers_fit() -> None:
    """Two small units, or a large one: nothing is named."""
    assert amounts.units_held(2000, {"a": 1000, "b": 1000, "c": 2000}, slack=0) is None


def test_growth() -> None:
    """In every step, or in one; anything else has no cause."""
    assert str(amounts.growth({1: 100, 2: 112, 3: 124})).startswith("kept in every step: ")
    assert str(amounts.growth({1: 100, 2: 100, 3: 124})) == "kept once: only step 3 adds 24 B"
    assert amounts.growth({1: 100, 2: 112, 3: 118}) is None
    assert amounts.growth({1: 100, 2: 112}) is None
    assert amounts.growth({1: 100, 2: 100, 3: 88}) is None


def test_left_over() -> None:
    """The one sum of parts that fits."""
    parts = {"the parameters": 1000, "the optimizer's state": 2000}

    assert str(amounts.left_over(3000, parts, slack=8)).startswith("the parameters and the optimizer's state stay: ")
    assert str(amounts.left_over(2000, parts, slack=8)).startswith("the optimizer's state stay")
    assert amounts.left_over(2500, parts, slack=8) is None
    assert amounts.left_over(1000, {"the parameters": 1000, "the optimizer's state": 1000}, slack=8) is None


def _volume(calls: list[tuple[int, str]], *, dtype: str = "float32", ideal: float = 4000) -> str | None:
    return amounts.volume(calls, ideal, dtypes={dtype}, units=2, padding=0.1)


def test_volume() -> None:
    """A wide dtype, repeated calls, larger calls."""
    assert str(_volume([(2000, FLOAT32), (2000, FLOAT32)], dtype="bfloat16", ideal=2000)).startswith(
        "sent in float32 instead of bfloat16: 2 times"
    )
    assert str(_volume([(1000, FLOAT32), (3000, FLOAT32)] * 2)).startswith("every unit is sent 2 times: 4 calls for 2 ")
    assert str(_volume([(2000, FLOAT32), (6000, FLOAT32)])).startswith("every call carries 2 times")


@pytest.mark.parametrize(
    "calls",
    [
        [(1000, FLOAT32), (3000, FLOAT32)],
        # Half of it twice, and a multiple that is not whole.
        [(1000, FLOAT32), (1000, FLOAT32), (3000, FLOAT32)],
        [(1500, FLOAT32), (4500, FLOAT32)],
        # Other calls than the planned ones.
        [(1000, FLOAT32), (3000, FLOAT32), (4000, FLOAT32)],
        [(4000, FLOAT32), (2000, BFLOAT16), (1000, FLOAT32), (1000, FLOAT32)],
    ],
)
def test_volume_without_a_cause(calls: list[tuple[int, str]]) -> None:
    """Numbers that only look like one of them."""
    assert _volume(calls) is None
