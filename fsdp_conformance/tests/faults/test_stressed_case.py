"""A stressed case from the settings to the record."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from fsdp_conformance import stress
from fsdp_conformance.outcome.records import CaseRecord
from fsdp_conformance.run_settings import RunSettings
from fsdp_conformance.selftest import bound_case, run_case
from fsdp_conformance.stress import MEASUREMENT, STRUCK, Failure, Provocation
from fsdp_conformance.tests.faults import async_adapters
from fsdp_conformance.verdict import Verdict

pytestmark = pytest.mark.slow

_CASE = "R001/exact-probe-ws2"
_PLAIN = RunSettings()
_STRESSED = replace(_PLAIN, stress_seed=5)


def test_wrong_engine_fails_only_under_stress() -> None:
    """An engine that relies on the order of completion passes; stressed, its gradients are NaN."""
    spec = f"{async_adapters.__name__}:WaitsForTheLast"
    plain, stressed = (run_case(bound_case(_CASE), spec, base=settings) for settings in (_PLAIN, _STRESSED))

    assert (plain.verdict, MEASUREMENT in plain.measurements) == (Verdict.PASS, False)
    assert stressed.verdict is Verdict.FAIL
    assert {finding.got for finding in stressed.findings if finding.check == "gradient parity"} == {"nan"}
    assert stressed.repro == f"fsdp-conformance run --implementation {spec} --stress --stress-seed 5 --case {_CASE}"


def test_right_engine_passes_and_strikes_are_counted() -> None:
    """Each asynchronous collective of the engine was late, and all but the first that it waits for were overtaken."""
    record = run_case(bound_case(_CASE), f"{async_adapters.__name__}:InReverse", base=_STRESSED)
    struck = stress.strikes_of([record])

    assert record.verdict is Verdict.PASS
    assert struck[Provocation.LATE] == struck[Provocation.POISONED] == struck[Provocation.READ_LATE] > 0
    assert 0 < struck[Provocation.OVERTAKEN] < struck[Provocation.LATE]
    assert struck[Provocation.SLOW] > 0
    # It resizes no storage, and gives no memory to a collective that it has not written to.
    assert struck[Provocation.FREED] == struck[Provocation.NEW] == 0


def _made_to_fail(adapter: str, failure: Failure, **changes: Any) -> CaseRecord:
    settings = replace(_STRESSED, stress_failure=failure.value, **changes)
    return run_case(bound_case(_CASE), f"{async_adapters.__name__}:{adapter}", base=settings)


@pytest.mark.parametrize("failure", [Failure.RAISE, Failure.COLLECTIVE, Failure.EXIT, Failure.KILL])
def test_rank_that_fails_is_seen_for_what_it_is(failure: Failure) -> None:
    """The record says where the rank failed, and how to see it again."""
    record = _made_to_fail("InReverse", failure)

    assert (record.verdict, record.reason, record.comparisons) == (Verdict.PASS, "", 4)
    assert record.measurements[STRUCK].startswith("all_gather #")
    assert f" --stress --stress-seed 5 --stress-failure {failure} --case " in record.repro


@pytest.mark.nightly
def test_rank_that_is_stopped() -> None:
    """Its peer waits until the deadline."""
    record = _made_to_fail("InReverse", Failure.STOP, deadline_scale=0.4)

    assert (record.verdict, record.reason) == (Verdict.PASS, "")


@pytest.mark.nightly
def test_engine_that_goes_on_alone() -> None:
    """An engine that loses the exception of a rank fails."""
    record = _made_to_fail("GoesOnAlone", Failure.RAISE)

    assert record.verdict is Verdict.FAIL
    assert "first failure (raise): expected rank" in record.reason or "got no failure" in record.reason
