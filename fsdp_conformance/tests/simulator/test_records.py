"""Records of cases on the simulated accelerator, in certificates and reports."""

from __future__ import annotations

from typing import Any

import pytest

from fsdp_conformance.outcome.records import UNDECLARED, case_record_from_json
from fsdp_conformance.report.certificate import State
from fsdp_conformance.report.terminal import render_record
from fsdp_conformance.tests.report.certificates import (
    CASES,
    PARITY,
    a_profile,
    a_run,
    certificate_of,
    certified,
    unsupported,
)
from fsdp_conformance.tests.report.evidence import a_case, a_finding, a_record, a_report
from fsdp_conformance.verdict import Verdict

#: Cases that need an accelerator go to the simulated one in a run on the CPU.
ON_SIM = a_case(requirements=["R035"], needs=("sharded_state",), environment=("accelerator",))
FLAGS = "no_sync any_accelerator sharded_state"


@pytest.mark.parametrize(("device", "state"), [("cpu", State.UNJUDGED), ("sim", State.DECLINED)])
def test_flags_are_those_of_the_device_of_the_case(device: str, state: State) -> None:
    """A case on the simulated accelerator of a run on the CPU is not excused by what is declined on the CPU."""
    profile = a_profile(*CASES, ON_SIM)
    record = unsupported(ON_SIM.id, device="sim", measurements={UNDECLARED: ["sharded_state"]})
    run = a_run(record, profile=profile, flags=FLAGS)
    run.header["implementation"]["declines_on"] = {device: ["sharded_state"]}

    assert {scope.title: scope.state for scope in certificate_of(run, profile).scopes}["sharded-state"] is state


def test_simulated_cases_are_remarked() -> None:
    """The record names the missing device."""
    record, profile = a_record(ON_SIM.id, device="sim"), a_profile(*CASES, ON_SIM)

    assert certified(record, profile=profile, flags=FLAGS).remarks == ("1 case ran on the simulated accelerator",)
    assert certified(record, profile=profile, flags=FLAGS, settings={"device": "sim"}).remarks == ()


def test_only_cases_that_compared_something_are_counted() -> None:
    """The remark is in the plural if there are several."""
    cases = [a_case(requirements=["R035"], environment=("accelerator",), world_size=size) for size in (2, 3, 4)]
    one: dict[str, Any] = {"comparisons": 1, "evidence": [a_report(0, comparisons=1)]}
    records = [a_record(cases[0].id, device="sim"), a_record(cases[1].id, device="sim", **one)]
    skipped = a_record(cases[2].id, Verdict.NOT_RUN_ENV, device="sim")
    certificate = certified(*records, skipped, profile=a_profile(*CASES, *cases), flags=FLAGS)

    assert certificate.remarks == ("2 cases ran on the simulated accelerator",)


def test_a_reader_sees_the_device_and_the_whole_argument() -> None:
    """The report names the device if it is not the CPU, and keeps a finding's lines unchanged."""
    finding = a_finding("R075", detail="one reads what the other writes\n  first: add_\n  then: all_gather")
    record = a_record("R075/stream-safety-plain-ws2", Verdict.FAIL, finding, device="sim")
    text = render_record(case_record_from_json(record.to_json()))

    assert "R075/stream-safety-plain-ws2 · on sim" in text
    assert "\n        first: add_\n        then: all_gather\n" in text
    assert f"{PARITY} · on" not in render_record(a_record(PARITY, Verdict.FAIL, a_finding()))
