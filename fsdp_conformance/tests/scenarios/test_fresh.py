"""Scenarios that are drawn for one run: what they have in common, and that the seed alone decides about the rest."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest

from fsdp_conformance.contract.profile import load_profile
from fsdp_conformance.explore.building import example_of
from fsdp_conformance.explore.example import Example
from fsdp_conformance.scenarios import fresh
from fsdp_conformance.scenarios.axes import SPACE
from fsdp_conformance.scenarios.scenario import Scenario, scenario_from_json

pytestmark = pytest.mark.slow

EVERYTHING = frozenset(flag for value in SPACE.value_of.values() for flag in value.needs)
SEEDS = range(12)

each_case = pytest.mark.parametrize("case", fresh.CASES)


def _drawn(case: str, seed: int, declared: frozenset[str] = EVERYTHING) -> list[Scenario]:
    return list(fresh.candidates(fresh.CASES[case], seed, declared))


def test_each_is_a_case_of_the_profile() -> None:
    """Under the id by which its draw is found again, and on as many ranks."""
    entries = {entry.id: entry for entry in load_profile("core").entries if entry.case().is_fresh}

    assert entries.keys() == fresh.CASES.keys()
    for case, entry in entries.items():
        assert entry.world_size == fresh.world_size(fresh.CASES[case])
        assert {scenario.world_size for scenario in _drawn(case, 0)} == {entry.world_size}


def test_a_base_scenario_counts_for_the_base() -> None:
    """An engine that is wrong in one of them gets no certificate, whatever it declares."""
    scopes = {entry.scope for entry in load_profile("core").entries if entry.id.startswith("R001/fresh")}

    assert scopes == {("base",)}


@pytest.mark.daily(3)
@each_case
def test_the_seed_decides(case: str) -> None:
    """The same seed draws the same scenarios again, and each seed draws others, with other names and numbers."""
    drawn = {seed: _drawn(case, seed) for seed in SEEDS}

    assert all(drawn[seed] == _drawn(case, seed) for seed in SEEDS)
    everything = [scenario for scenarios in drawn.values() for scenario in scenarios]
    assert len(set(everything)) == len(SEEDS) * fresh.CANDIDATES
    assert len({scenario.extent.names for scenario in everything}) == len(everything)
    assert len({scenario.values for scenario in everything}) > len(SEEDS)


@pytest.mark.daily(8)
@each_case
@pytest.mark.parametrize("declared", [frozenset[str](), frozenset({"no_sync", "clip_grad_norm"}), EVERYTHING])
def test_an_engine_is_asked_for_what_it_declares(case: str, declared: frozenset[str]) -> None:
    """A scenario of the base needs nothing that an engine could decline."""
    allowed = frozenset[str]() if fresh.CASES[case].among is not None else declared
    for seed in SEEDS:
        assert all(scenario.needs <= allowed for scenario in _drawn(case, seed, declared))


@pytest.mark.nightly
def test_combinations_that_an_engine_avoids_are_not_drawn() -> None:
    """They are known to fail. What the base asks for cannot be avoided."""
    avoids = ({"rows": "uneven"}, {"optimizer": "adam, foreach", "units": "nested"})
    for draw in fresh.CASES.values():
        drawn = [each for seed in range(8) for each in fresh.candidates(draw, seed, EVERYTHING, avoids)]
        has_them = any(values.items() <= scenario.choice.items() for scenario in drawn for values in avoids)
        assert has_them is (draw.among is not None)


@pytest.mark.parametrize(
    ("case", "size", "threshold"),
    [
        ("R001/fresh-number4-ws2", lambda example: max(map(math.prod, example.model.shapes().values())), 65_536),
        ("R001/fresh-number5-ws2", lambda example: len(example.plan.units), 16),
        ("R001/fresh-number6-ws2", lambda example: example.regime.steps, 12),
        ("R000/fresh-number5-ws9", lambda example: example.world_size, 8),
    ],
)
def test_some_are_larger_than_usual_thresholds(case: str, size: Callable[[Example], int], threshold: int) -> None:
    """Whatever the seed is."""
    for seed in SEEDS:
        for scenario in _drawn(case, seed):
            assert size(example_of(scenario)) > threshold


def test_a_scenario_comes_back_from_its_text() -> None:
    """With its sizes and names; those of other scenarios do not mention theirs."""
    for case in fresh.CASES:
        for scenario in _drawn(case, 3):
            assert scenario_from_json(scenario.to_json()) == scenario
    assert "extent" not in Scenario().to_json()
