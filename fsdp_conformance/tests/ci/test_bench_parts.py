"""ci/bench/run parts: how the seconds of a case are split, and the wall time that follows."""

from __future__ import annotations

import runpy
from typing import Any

import pytest

from fsdp_conformance.pytest_plugin.dispatch import Slots
from fsdp_conformance.tests.guards import checkout
from fsdp_conformance.tests.guards.checkout import ROOT

pytestmark = [checkout.required, pytest.mark.nightly]


@pytest.fixture(scope="module")
def script() -> dict[str, Any]:
    """The names that the script defines."""
    return runpy.run_path(str(ROOT / "ci/bench/parts.py"))


def test_the_slowest_rank_counts(script: dict[str, Any]) -> None:
    """The body has the group and the training in it; what no rank accounts for is around them."""
    ranks = [
        {"start": 0.1, "group": 0.5, "training": 0.2, "body": 1.0},
        {"start": 0.2, "group": 0.4, "training": 0.3, "body": 0.9},
    ]
    parts = script["Parts"].of(2.0, ranks)

    assert (parts.start, parts.group, parts.training) == (0.2, 0.5, 0.3)
    assert parts.judging == pytest.approx(0.2)
    assert parts.around == pytest.approx(0.8)


def test_world_sizes_that_were_not_measured(script: dict[str, Any]) -> None:
    """They are on a line through the others, and never quicker than the quickest of these."""
    assert script["durations"]({2: 1.0, 4: 3.0}, [1, 2, 3, 8]) == {1: 1.0, 2: 1.0, 3: 2.0, 8: 7.0}
    assert script["durations"]({2: 1.5}, [1, 8]) == {1: 1.5, 8: 1.5}


def test_the_wall_time_of_a_node(script: dict[str, Any]) -> None:
    """Ten cases of eight ranks one after the other, or two at a time."""
    minutes = script["minutes"]

    assert minutes({8: 6.0}, [8] * 10, Slots(8), 4) == pytest.approx(1.0)
    assert minutes({8: 6.0}, [8] * 10, Slots(8, 2), 8) == pytest.approx(0.5)
