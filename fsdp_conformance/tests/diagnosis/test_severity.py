"""The harm of a failure: from how it ended, from its check and from its requirement."""

from __future__ import annotations

from typing import Any

import pytest

from fsdp_conformance.diagnosis.grouping import grouped
from fsdp_conformance.diagnosis.severity import Severity, count_by_severity, severities_in, severity_of
from fsdp_conformance.errors import UsageError
from fsdp_conformance.outcome.records import CaseRecord, Finding
from fsdp_conformance.tests.report.evidence import a_finding, a_record
from fsdp_conformance.verdict import Verdict


def harm(requirement: str, check: str, **fields: Any) -> Severity | None:
    """The severity of a case with this one finding."""
    return severity_of(failed(a_finding(requirement=requirement, check=check, **{**PLAIN, **fields})))


def failed(*findings: Finding, case: str = "R001/probe-ws2") -> CaseRecord:
    """A record of a case that failed with these findings."""
    return a_record(case, Verdict.FAIL, findings=list(findings))


#: A finding that compares no values.
PLAIN: dict[str, Any] = {"bound": None, "differing": None, "phase": None, "likely": None}


@pytest.mark.parametrize(
    ("requirement", "check", "fields", "expected"),
    [
        ("R003", "gradient parity", {"bound": "bitwise"}, Severity.SILENT),
        ("R010", "parameter parity", {"differing": 3}, Severity.SILENT),
        ("R075", "stream safety", {}, Severity.SILENT),
        ("R000", "loud refusal", {}, Severity.SILENT),
        ("R140", "stepped once", {}, Severity.SILENT),
        ("R146", "state dict", {"bound": "bitwise"}, Severity.STATE),
        ("R147", "keys", {}, Severity.STATE),
        ("R148", "state dict", {}, Severity.STATE),
        ("R144", "optimizer state dict", {}, Severity.STATE),
        ("R001", "parameters after a load", {"phase": "checkpoint", "bound": "bitwise"}, Severity.STATE),
        ("R001", "deadline", {}, Severity.HANG),
        ("R067", "schedule equality", {}, Severity.HANG),
        ("R003", "training", {}, Severity.RAISES),
        ("R003", "process end", {}, Severity.RAISES),
        ("R033", "bytes between steps", {}, Severity.WASTE),
        ("R068", "wire volume", {}, Severity.WASTE),
        ("R148", "collectives", {}, Severity.WASTE),
        ("R054", "refusal", {}, Severity.PROMISE),
        ("R060", "reported names", {}, Severity.PROMISE),
        ("R999", "of a later version", {}, Severity.PROMISE),
    ],
)
def test_the_severity_of_a_finding(requirement: str, check: str, fields: dict[str, Any], expected: Severity) -> None:
    """A value that differs is worse than what is held and sent, and that worse than a name."""
    assert harm(requirement, check, **fields) is expected


@pytest.mark.parametrize("verdict", sorted(set(Verdict) - {Verdict.FAIL, Verdict.HANG, Verdict.CRASH}))
def test_what_accuses_no_engine_has_none(verdict: Verdict) -> None:
    """Also a broken adapter, of whose engine nothing is known."""
    assert severity_of(a_record("R001/probe-ws2", verdict)) is None


def test_the_worst_finding_decides() -> None:
    """A case that wastes memory and computes wrong gradients trains silently wrong; a hang is always a hang."""
    memory = a_finding(requirement="R033", check="bytes between steps", **PLAIN)
    gradient = a_finding(requirement="R003", check="gradient parity", **{**PLAIN, "bound": "bitwise"})

    assert severity_of(failed(memory, gradient)) is Severity.SILENT
    assert severity_of(a_record("R033/x-ws2", Verdict.HANG, findings=[memory])) is Severity.HANG
    assert severity_of(failed()) is Severity.PROMISE


def test_what_harms_most_comes_first() -> None:
    """Before what more cases have; and each case is counted once, by its worst harm."""
    wasteful = [
        failed(a_finding(requirement="R033", check="bytes between steps", **PLAIN), case=f"R033/{name}-ws2")
        for name in ("a", "b", "c")
    ]
    wrong = failed(a_finding(requirement="R003", check="gradient parity", **{**PLAIN, "bound": "bitwise"}))

    assert [group.severity for group in grouped([*wasteful, wrong])] == [Severity.SILENT, Severity.WASTE]
    assert list(count_by_severity([*wasteful, wrong, a_record()]).items()) == [
        (Severity.SILENT, 1),
        (Severity.WASTE, 3),
    ]


def test_a_list_of_severities() -> None:
    """Separated by commas; a word that is none is named with all that are."""
    assert severities_in("silent, state") == {Severity.SILENT, Severity.STATE}
    for wrong in ("", "silent,", "loud", "SILENT"):
        with pytest.raises(UsageError, match="severities must be among silent, state, hang, raises, waste, promise"):
            severities_in(wrong)
