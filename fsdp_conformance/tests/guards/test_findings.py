"""Guard: ci/known_findings.py tells a new finding from a known one, and a stale entry from a live one."""

from __future__ import annotations

import runpy
from collections.abc import Callable
from typing import Any

import pytest

from fsdp_conformance.outcome import CaseRecord
from fsdp_conformance.tests.guards import checkout
from fsdp_conformance.tests.guards.checkout import ROOT
from fsdp_conformance.verdict import Verdict

pytestmark = checkout.required


@pytest.fixture(scope="module")
def script() -> dict[str, Any]:
    """The names that the script defines."""
    return runpy.run_path(str(ROOT / "ci/known_findings.py"))


def _record(verdict: Verdict) -> CaseRecord:
    return CaseRecord(case="R117/unused-ws2", requirements=["R117"], chapter="N", verdict=verdict, reason="seen")


def _differences(script: dict[str, Any], verdict: Verdict, *, known: str | None) -> list[str]:
    make: Callable[..., Any] = script["Known"]
    entries = [make("some-engine", "cpu", "R117/unused-ws2", known, "It is so.")] if known else []
    return list(script["differences"]("some-engine", "cpu", [_record(verdict)], entries))


def test_the_list_can_be_read(script: dict[str, Any]) -> None:
    """ci/known-findings.toml has no entry that is not as it should be."""
    assert isinstance(script["known_findings"](), list)


def test_an_entry_names_a_case_that_exists(script: dict[str, Any]) -> None:
    """An entry whose case is in no suite would never be found stale."""
    from fsdp_conformance.tests.guards.test_cases import cases

    assert {entry.case for entry in script["known_findings"]()} - {case.id for case in cases()} == set()


@pytest.mark.parametrize(
    ("verdict", "known", "said"),
    [
        (Verdict.PASS, None, []),
        (Verdict.UNSUPPORTED, None, []),
        (Verdict.FAIL, "FAIL", []),
        (Verdict.DISABLED, "FAIL", []),
        (Verdict.FAIL, None, ["NEW"]),
        (Verdict.ERROR_SUITE, None, ["NEW"]),
        (Verdict.HANG, "FAIL", ["GONE"]),
        (Verdict.PASS, "FAIL", ["GONE"]),
        (Verdict.UNSUPPORTED, "FAIL", ["GONE"]),
    ],
)
def test_what_is_new_and_what_is_gone(
    script: dict[str, Any], verdict: Verdict, known: str | None, said: list[str]
) -> None:
    """A finding without entry is new, an entry without its finding is gone, everything else is silent."""
    assert [line.split()[0] for line in _differences(script, verdict, known=known)] == said


def test_a_finding_is_known_on_the_device_of_its_case(script: dict[str, Any]) -> None:
    """A run on the CPU has cases on the simulated accelerator: an entry for the one says nothing of the other."""
    record = _record(Verdict.FAIL)
    record.device = "sim"
    for device, said in (("sim", []), ("cpu", ["NEW"])):
        entry = script["Known"]("some-engine", device, record.case, "FAIL", "It is so.")
        found = list(script["differences"]("some-engine", "cpu", [record], [entry]))
        assert [line.split()[0] for line in found] == said


def test_a_broken_entry_is_refused(script: dict[str, Any], tmp_path: Any) -> None:
    """All problems of the list are named at once."""
    broken = tmp_path / "list.toml"
    broken.write_text('[[finding]]\ncase = "R001/x"\n[[finding]]\nimplementation = "a"\ndevice = "cpu"\ncase = "b"\n'
                      'verdict = "PASS"\nreason = "c"\n', encoding="utf-8")  # fmt: skip

    with pytest.raises(ValueError, match=r"entry 1: missing .*; entry 2: verdict must be .*, got 'PASS'"):
        script["known_findings"](broken)
