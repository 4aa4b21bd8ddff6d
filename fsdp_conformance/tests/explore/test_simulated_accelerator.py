"""Scenarios on the simulated accelerator: the reference engine has no race and reads nothing too early in any row."""

from __future__ import annotations

import pytest

from fsdp_conformance.adapters import registry
from fsdp_conformance.explore.case import run_on
from fsdp_conformance.outcome.records import CaseRecord
from fsdp_conformance.plan import SIMULATED
from fsdp_conformance.run_settings import RunSettings
from fsdp_conformance.scenarios import rows
from fsdp_conformance.scenarios.scenario import Scenario
from fsdp_conformance.simulator.device import build
from fsdp_conformance.verdict import Verdict

pytestmark = pytest.mark.skipif(build.unavailable() is not None, reason=str(build.unavailable()))


def _record(scenario: Scenario) -> CaseRecord:
    return run_on(scenario, "reference", base=RunSettings(device=SIMULATED))


@pytest.mark.nightly
@pytest.mark.slow
def test_a_fused_optimizer_on_the_host_waits_for_the_scale() -> None:
    """A scaler hands its tensors over by copies that torch's fused optimizers do not wait for."""
    record = _record(Scenario.of({"offload": "CPU", "optimizer": "adamw, fused", "loss scaling": "dynamic"}))

    assert record.verdict is Verdict.PASS, record.findings


@pytest.mark.nightly
@pytest.mark.parametrize("number", range(1, len(rows.pairs()) + 1))
def test_every_row_is_clean(number: int) -> None:
    """Among them writes to shards that a gather that nothing needed may still read."""
    description = registry.describe("reference")
    record = _record(rows.for_engine(number, description.declared(SIMULATED), description.avoids).scenario)

    assert record.verdict is Verdict.PASS, record.findings
