"""Fresh scenarios fail engines that are right in every case which is the same in all runs."""

from __future__ import annotations

from pathlib import Path

import pytest

from fsdp_conformance.adapters import registry
from fsdp_conformance.outcome.records import SCENARIO
from fsdp_conformance.run_settings import RunSettings
from fsdp_conformance.scenarios import fresh
from fsdp_conformance.scenarios.scenario import scenario_from_json
from fsdp_conformance.selftest import bound_case, run_case
from fsdp_conformance.tests.cases import threshold_engines
from fsdp_conformance.verdict import Verdict

pytestmark = pytest.mark.slow

FILE = Path(threshold_engines.__file__)

#: Engine, to the case that fails it.
FAILED_BY = {
    "ManyElements": "R001/fresh-number4-ws2",
    "ManyUnits": "R001/fresh-number5-ws2",
    "RefusesUnknownSizes": "R001/fresh-number5-ws2",
    "ManySteps": "R001/fresh-number6-ws2",
    "ManyRanks": "R000/fresh-number5-ws9",
    "KnownModelsAlone": "R001/fresh-number1-ws2",
}

#: Each shows what another one shows, and takes longer.
_NIGHTLY = {"KnownModelsAlone", "ManyElements", "ManyUnits", "ManySteps", "ManyRanks"}


@pytest.mark.nightly
@pytest.mark.parametrize(
    "engine", [pytest.param(name, marks=[pytest.mark.nightly] if name in _NIGHTLY else []) for name in FAILED_BY]
)
def test_a_trigger_is_reached(engine: str) -> None:
    """The same engine passes what every run has."""
    implementation = f"{FILE}:{engine}"
    usual = run_case(bound_case("R001/exact-probe-ws2"), implementation, base=RunSettings())
    record = run_case(bound_case(FAILED_BY[engine]), implementation, base=RunSettings(drawn_seed=7))

    assert usual.verdict is Verdict.PASS, usual.reason
    assert record.verdict is Verdict.FAIL, record.reason
    assert record.refereed


@pytest.mark.nightly
def test_the_run_decides_what_is_trained() -> None:
    """The record names a scenario that the seed of the run draws, and how to run it again."""
    case = "R000/fresh-number1-ws2"
    records = [run_case(bound_case(case), "reference", base=RunSettings(drawn_seed=seed)) for seed in (1, 2)]

    for seed, record in zip((1, 2), records, strict=True):
        assert record.verdict is Verdict.PASS, record.reason
        scenario = scenario_from_json(record.measurements[SCENARIO])
        described = registry.describe_once("reference")
        assert scenario in fresh.candidates(fresh.CASES[case], seed, described.declared("cpu"), described.avoids)
        assert f"--fresh-seed {seed} " in record.repro
    assert records[0].measurements[SCENARIO] != records[1].measurements[SCENARIO]
