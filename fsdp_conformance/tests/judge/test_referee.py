"""Findings, comparisons and reasons come from the referee; a rank says only what it did and how it ended."""

from __future__ import annotations

import pytest

from fsdp_conformance.judge import refereed_report
from fsdp_conformance.outcome.records import CheckCount, Finding, RankError, RankExit, RankReport

FINDING = Finding(requirement="R003", check="gradient parity", message="gradient: expected 1, got 2")
GOOD_END = RankExit(rank=0, pid=1, exitcode=0, time=1.0, reported=True)


def _error(kind: str, blame: str, message: str = "text") -> RankError:
    return RankError(kind=kind, message=message, traceback="", blame=blame, time=1.0)


ENDED = "fsdp_conformance.harness.observations.ObservationsEnded"
INVALID = "fsdp_conformance.harness.observations.ObservationsInvalid"


def test_a_rank_cannot_speak_for_the_referee() -> None:
    """Its own findings, comparisons, excuses and digests are not used."""
    rank = RankReport(rank=0, not_run="no", inconclusive="maybe", seconds={"body": 1.0}, environment={"torch": "2.13"})
    rank.checks, rank.digests = {"loss parity": CheckCount(comparisons=100)}, {"params": "forged"}
    rank.notes, rank.measurements = ["fine"], {"absent": ["cuda"]}
    judgement = RankReport(rank=0, findings=[FINDING], checks={"gradient parity": CheckCount(comparisons=1)})

    merged = refereed_report(rank, judgement, GOOD_END)

    assert merged is not None
    assert (merged.findings, list(merged.checks)) == ([FINDING], ["gradient parity"])
    assert (merged.not_run, merged.inconclusive) == (None, None)
    assert (merged.digests, merged.notes, merged.measurements) == ({}, [], {})
    assert (merged.environment, merged.seconds["body"]) == ({"torch": "2.13"}, 1.0)


def test_a_rank_without_a_report_stays_without() -> None:
    """Its end says what became of it."""
    assert refereed_report(None, RankReport(rank=0), GOOD_END) is None


@pytest.mark.parametrize(("killed", "words"), [(True, "took too long"), (False, "ended with exit code 1")])
def test_a_referee_that_does_not_judge(killed: bool, words: str) -> None:
    """Nothing passes without a judgement, and the suite is to blame."""
    end = RankExit(rank=0, pid=1, exitcode=1, time=1.0, reported=False, ended_by_controller=killed)

    merged = refereed_report(RankReport(rank=0, checks={"loss parity": CheckCount(comparisons=1)}), None, end)

    assert merged is not None
    assert merged.error is not None
    assert (merged.error.blame, words in merged.error.message) == ("suite", True)


@pytest.mark.parametrize(
    ("blame", "report", "expected"),
    [
        ("suite", RankReport(rank=0, not_run="no gloo"), "no gloo"),
        ("suite later", RankReport(rank=0, not_run="no gloo"), "ended inside the code under test (no gloo)"),
        ("implementation", RankReport(rank=0, not_run="no gloo"), "ended inside the code under test (no gloo)"),
        ("adapter", RankReport(rank=0, inconclusive="they differ"), "ended inside the code under test (they differ)"),
        ("suite", RankReport(rank=0), "reported that its body had ended"),
        ("suite", RankReport(rank=0, error=_error("ValueError", "implementation", "boom")), "boom"),
    ],
)
def test_a_rank_that_ends_early(blame: str, report: RankReport, expected: str) -> None:
    """An excuse counts only outside the code under test; a rank that says it has finished has failed."""
    who, _, later = blame.partition(" ")
    shown = f"rank 0 ended before it had sent observation {1 if later else 0}"
    merged = refereed_report(report, RankReport(rank=0, error=_error(ENDED, who, shown)), GOOD_END)

    assert merged is not None
    if report.not_run is not None and blame == "suite":
        assert (merged.not_run, merged.error) == (expected, None)
        return
    assert merged.error is not None
    assert expected in merged.error.message
    assert (merged.error.blame, merged.not_run, merged.inconclusive) == ("implementation", None, None)


def test_invalid_observations_are_the_ranks_fault() -> None:
    """Whatever the referee was doing when it read them."""
    merged = refereed_report(RankReport(rank=0), RankReport(rank=0, error=_error(INVALID, "suite")), GOOD_END)

    assert merged is not None
    assert merged.error is not None
    assert merged.error.blame == "implementation"


def test_a_rank_that_fails_after_its_body() -> None:
    """Its own error counts where the referee has none, whomever it blames."""
    report = RankReport(rank=0, error=_error("RuntimeError", "environment", "too late"))

    merged = refereed_report(report, RankReport(rank=0), GOOD_END)

    assert merged is not None
    assert merged.error is not None
    assert (merged.error.message, merged.error.blame) == ("too late", "implementation")
