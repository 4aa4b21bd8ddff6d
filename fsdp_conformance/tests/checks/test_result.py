"""A check's result adds to a rank's report, and an empty comparison does not pass."""

from __future__ import annotations

import pytest

from fsdp_conformance.checks.result import CheckResult, Tally
from fsdp_conformance.errors import NothingCompared
from fsdp_conformance.outcome.records import CheckCount, Finding, RankReport

FINDING = Finding(requirement="R003", check="gradient parity", message="gradient: expected 1, got 2")


def result(**fields: object) -> CheckResult:
    """Of gradient parity, with `fields`."""
    return CheckResult(check="gradient parity", requirement="R003", **fields)  # type: ignore[arg-type]


def test_results_add_up() -> None:
    """Counts of one check add up, findings and measurements collect, a note is said once."""
    report = RankReport(rank=1)
    first = result(count=CheckCount(comparisons=2, elements=30), notes=["a"], measurements={"bound": 0.5})
    first.into(report)
    result(count=CheckCount(comparisons=3, elements=4), notes=["a", "b"], findings=[FINDING]).into(report)

    assert report.checks == {"gradient parity": CheckCount(comparisons=5, elements=34)}
    assert report.notes == ["a", "b"]
    assert report.findings == [FINDING]
    assert report.measurements == {"gradient parity": {"bound": 0.5}}
    assert first.count == CheckCount(comparisons=2, elements=30)


def test_nothing_compared_is_an_error() -> None:
    """Without a comparison, a finding or a reason, the suite proves nothing."""
    with pytest.raises(NothingCompared, match=r"comparisons: expected at least 1, got 0 \[gradient parity, rank 1\]"):
        result().into(RankReport(rank=1))


def test_a_finding_or_a_reason_is_enough() -> None:
    """A finding, or a reason not to judge, is accepted without a comparison."""
    report = RankReport(rank=0)
    result(findings=[FINDING]).into(report)
    result(inconclusive="the references differ by 1").into(report)

    assert report.findings == [FINDING]
    assert report.inconclusive == "the references differ by 1"


def test_a_tally_counts_and_finds() -> None:
    """Every expectation counts; one that does not hold becomes a finding with its place."""
    tally = Tally("groups", "R069", rank=3)
    tally.expect(True, "unused", elements=4)
    tally.expect(False, "x: expected 2, got 1", step=1, got="1")
    tally.expect(False, "y: expected 2, got 1", requirement="R033")
    result = tally.result(notes=["n"])

    assert result.count == CheckCount(comparisons=3, elements=6)
    assert [(f.requirement, f.check, f.rank, f.step, f.message) for f in result.findings] == [
        ("R069", "groups", 3, 1, "x: expected 2, got 1"),
        ("R033", "groups", 3, None, "y: expected 2, got 1"),
    ]
    assert result.notes == ["n"]
