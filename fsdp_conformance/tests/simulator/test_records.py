"""Records of cases on the simulated accelerator, in certificates and reports."""

from __future__ import annotations

from fsdp_conformance.outcome import case_record_from_json
from fsdp_conformance.report.certificate import certify
from fsdp_conformance.report.terminal import render_record
from fsdp_conformance.tests.report.evidence import a_case, a_finding, a_record
from fsdp_conformance.tests.report.test_certificate import CASES, PARITY, a_profile, a_run, certified, unsupported
from fsdp_conformance.verdict import Verdict


def test_flags_are_those_of_the_device_of_the_case() -> None:
    """A case on the simulated accelerator of a run on the CPU is not excused by what is declined on the CPU."""
    profile = a_profile(*CASES[:2], a_case(requirements=["R001"], needs=("no_sync",), world_size=3))
    record = unsupported("R001/probe-ws3")
    record.device = "sim"
    run = a_run(record, profile=profile)
    run.header["implementation"]["declines_on"] = {"cpu": ["no_sync"]}

    assert not certify(run, profile).certified


def test_simulated_cases_are_remarked() -> None:
    """The record names the missing device."""
    record = a_record(PARITY, device="sim")

    assert certified(record).remarks == ("1 case ran on the simulated accelerator",)
    assert certified(record, settings={"device": "sim"}).remarks == ()


def test_a_reader_sees_the_device_and_the_whole_argument() -> None:
    """The report names the device if it is not the CPU, and keeps a finding's lines unchanged."""
    finding = a_finding("R075", detail="one reads what the other writes\n  first: add_\n  then: all_gather")
    record = a_record("R075/stream-safety-plain-ws2", Verdict.FAIL, finding, device="sim")
    text = render_record(case_record_from_json(record.to_json()))

    assert "R075/stream-safety-plain-ws2 · on sim" in text
    assert "\n        first: add_\n        then: all_gather\n" in text
    assert f"{PARITY} · on" not in render_record(a_record(PARITY, Verdict.FAIL, a_finding()))
