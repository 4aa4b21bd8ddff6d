"""A certificate counts the scenarios that the seed of its run draws, and no others."""

from __future__ import annotations

from dataclasses import replace

import pytest

from fsdp_conformance.contract.case import Case
from fsdp_conformance.outcome.records import SCENARIO, CaseRecord
from fsdp_conformance.run_settings import RunSettings, from_words
from fsdp_conformance.scenarios import fresh
from fsdp_conformance.scenarios.scenario import Scenario
from fsdp_conformance.tests.report.certificates import a_profile, a_run, certificate_of, certified, only_reason
from fsdp_conformance.tests.report.evidence import a_record

SEED = 99
ID = "R001/fresh-number1-ws2"
CASE = Case(id=ID, requirements=("R001",), chapter="A", world_size=2, title="It trains what was drawn.")
PROFILE = a_profile(CASE)


def _record(scenario: Scenario | None) -> CaseRecord:
    measurements = {} if scenario is None else {SCENARIO: scenario.to_json()}
    return replace(a_record(ID, requirements=["R001"]), measurements=measurements)


def _drawn(seed: int, number: int = 1) -> list[Scenario]:
    return list(fresh.candidates(fresh.BASE[number - 1], seed, frozenset()))


@pytest.mark.parametrize("attempt", [0, fresh.CANDIDATES - 1])
def test_a_scenario_that_was_drawn_counts(attempt: int) -> None:
    """Which of the candidates is trained depends on what the references can judge."""
    record = _record(_drawn(SEED)[attempt])

    assert certified(record, profile=PROFILE, settings={"drawn_seed": SEED}).certified


@pytest.mark.parametrize(
    "scenario",
    [None, Scenario(), _drawn(SEED + 1)[0], _drawn(SEED, number=2)[0], replace(_drawn(SEED)[0], salt=0)],
    ids=["none", "plain", "of another seed", "of another case", "other numbers"],
)
def test_another_scenario_does_not(scenario: Scenario | None) -> None:
    """Otherwise an engine would be certified for what it has seen before."""
    certificate = certified(_record(scenario), profile=PROFILE, settings={"drawn_seed": SEED})

    assert only_reason(certificate) == (
        "the record contradicts itself (its scenario is none of those that the seed 99 draws for it): "
        "R001/fresh-number1-ws2"
    )


def test_a_seed_that_the_user_chose_certifies_nothing() -> None:
    """It can be one for which an engine is right."""
    run = a_run(_record(_drawn(5)[0]), profile=PROFILE, settings={"fresh_seed": 5})
    certificate = certificate_of(run, PROFILE)

    assert only_reason(certificate) == (
        "incomplete: --fresh-seed, and a certificate needs scenarios that could not be foreseen"
    )


def test_each_run_draws_a_seed() -> None:
    """Unless the user gives one."""
    seeds = {RunSettings().with_drawn_seed().scenario_seed for _ in range(8)}

    assert len(seeds) == 8
    assert from_words(fresh_seed="5").with_drawn_seed().scenario_seed == 5
