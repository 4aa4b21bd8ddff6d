"""Two values that differ are shown as different."""

from __future__ import annotations

import pytest

from fsdp_conformance.checks.comparison import numbers


@pytest.mark.parametrize(
    ("got", "expected", "shown"),
    [
        (0.1, 0.3, ("0.1", "0.3")),
        (1.00000012, 1.0, ("1.00000012", "1")),
        (1.0, 1 + 2**-40, ("1", "1.0000000000009095")),
        (float("nan"), 1.0, ("nan", "1")),
    ],
)
def test_digits(got: float, expected: float, shown: tuple[str, str]) -> None:
    assert numbers(got, expected) == shown
