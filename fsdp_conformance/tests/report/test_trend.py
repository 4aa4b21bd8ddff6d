"""Trends over stored runs: since when, what changed, what is slower."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pytest

from fsdp_conformance.outcome.records import CaseRecord
from fsdp_conformance.report import trend
from fsdp_conformance.report.run_content import RunFile
from fsdp_conformance.report.trend import Trend
from fsdp_conformance.tests.report.evidence import LOADED, a_finding, a_record
from fsdp_conformance.verdict import Verdict

PROBE, OTHER = "R001/probe-ws2", "R003/once-ws2"


def a_run(night: int, *records: CaseRecord, finished: bool = True, torch: str = "2.13.0", **settings: Any) -> RunFile:
    """A run of "mine" on that night."""
    header = {
        "implementation": {"name": "mine", "version": "1.0"},
        "environment": {"torch": torch, "python": "3.11.7"},
        "settings": {"device": "cpu", "implementation": "mine", **settings},
        "suite": "0.1.0",
        "suite_sha256": "5" * 64,
        "started": f"2026-11-{night:02}T02:00:00+00:00",
    }
    path, footer = f"night{night}/run.jsonl", dict[str, Any]() if finished else None
    return RunFile(path=path, header=header, records=list(records), footer=footer)


def nights(outcomes: str, **others: Any) -> Trend:
    """Runs of one case: "." passes, "F" fails, "n" is not run, "u" is declined, " " is not in the run."""
    verdicts = {".": Verdict.PASS, "n": Verdict.NOT_RUN_ENV, "u": Verdict.UNSUPPORTED}
    runs = []
    for night, outcome in enumerate(outcomes, start=1):
        records = [a_record(OTHER)]
        if outcome == "F":
            records.append(a_record(PROBE, Verdict.FAIL, a_finding()))
        elif outcome != " ":
            records.append(a_record(PROBE, verdicts[outcome]))
        runs.append(a_run(night, *records, **others))
    (result,) = trend.trends(runs)
    return result


def test_a_new_failure_says_what_changed() -> None:
    """Between the last pass and the first failure, which need not be neighbours."""
    runs = [
        a_run(1, a_record(PROBE), torch="2.12.0"),
        a_run(2, a_record(OTHER), torch="2.12.1"),
        a_run(3, a_record(PROBE, Verdict.FAIL, a_finding(), environment={**LOADED, "adapter": "beef" * 16})),
    ]
    (result,) = trend.trends(runs)
    (failing,) = result.failing

    assert failing.is_new
    assert (failing.since, failing.last_pass) == (runs[2].header["started"], runs[0].header["started"])
    assert failing.changed == (f"adapter {LOADED['adapter'][:8]} -> beefbeef", "torch 2.12.0 -> 2.13.0")
    assert result.new == result.failing
    assert "NEW       R001/probe-ws2: FAIL\n  " in trend.text(result)
    assert trend.text(result).endswith("1 new, 0 known, 0 fixed")


@pytest.mark.parametrize(
    ("outcomes", "new", "runs", "passed"),
    [
        ("..F", True, 1, True),
        (".FF", False, 2, True),
        ("FFF", False, 3, False),
        (".FnF", False, 2, True),
        (".F ", False, 1, True),
        (".Fu", False, 1, True),
        ("F.F", True, 1, True),
        ("F", True, 1, False),
    ],
)
def test_since_when_it_fails(outcomes: str, new: bool, runs: int, passed: bool) -> None:
    """Runs that did not judge the case neither begin nor end a streak."""
    (failing,) = nights(outcomes).failing

    assert (failing.is_new, failing.runs, bool(failing.last_pass)) == (new, runs, passed)


def test_without_a_change_of_versions_it_may_be_chance() -> None:
    """The text says that there is nothing to show."""
    assert "no version: the cause may be chance" in trend.text(nights(".F"))
    assert "never passed" in trend.text(nights("FF"))


@pytest.mark.parametrize(
    ("outcomes", "fixed"), [(".F.", True), ("F..", False), ("Fn.", True), ("F ", False), ("..", False)]
)
def test_what_the_last_run_fixed(outcomes: str, fixed: bool) -> None:
    """A pass in the newest run after a failure in the one that judged it before."""
    assert nights(outcomes).fixed == ((PROBE,) if fixed else ())


@pytest.mark.parametrize(
    ("outcomes", "unsteady"), [(".F.", True), ("F.F", True), (".FF", False), ("F..", False), (".n.", False)]
)
def test_unsteady_cases(outcomes: str, unsteady: bool) -> None:
    """A case is unsteady if it fails and passes in turn."""
    assert (PROBE in nights(outcomes).unsteady) is unsteady


def _timed(seconds: Mapping[str, float]) -> list[CaseRecord]:
    return [a_record(case, seconds=taken) for case, taken in seconds.items()]


def test_a_case_that_became_slower() -> None:
    """Next to the others: a machine that is three times as slow slows all of them."""
    cases = {f"R001/{name}-ws2": 2.0 for name in ("a", "b", "c", "d")}
    before = [a_run(night, *_timed(cases)) for night in (1, 2, 3)]
    slow_machine = dict.fromkeys(cases, 6.0)
    (same,) = trend.trends([*before, a_run(4, *_timed(slow_machine))])
    (one,) = trend.trends([*before, a_run(4, *_timed({**slow_machine, "R001/b-ws2": 13.0}))])

    assert same.slower == ()
    assert [(slow.case, slow.seconds, slow.before) for slow in one.slower] == [("R001/b-ws2", 13.0, 6.0)]
    assert "slower    R001/b-ws2: 13.0 s, usually 6.0 s" in trend.text(one)


def test_short_cases_are_not_slower_by_chance() -> None:
    """Three times a fifth of a second is not worth reporting."""
    before = a_run(1, *_timed({PROBE: 0.2, OTHER: 0.2}))
    (result,) = trend.trends([before, a_run(2, *_timed({PROBE: 0.2, OTHER: 0.6}))])

    assert result.slower == ()


def test_engines_and_devices_have_trends_of_their_own() -> None:
    """A failure on one device is none on the other."""
    failed = a_record(PROBE, Verdict.FAIL, a_finding())
    result = trend.trends([a_run(1, a_record(PROBE)), a_run(1, failed, device="cuda"), a_run(2, a_record(PROBE))])

    assert [(each.device, len(each.nights), len(each.failing)) for each in result] == [("cpu", 2, 0), ("cuda", 1, 1)]


def test_an_unfinished_run_counts_with_what_it_judged() -> None:
    """It is named as such."""
    runs = [a_run(1, a_record(PROBE)), a_run(2, a_record(PROBE, Verdict.HANG, reason="rank 1 hangs"), finished=False)]
    (result,) = trend.trends(runs)

    assert [failing.happened for failing in result.failing] == ["rank 1 hangs"]
    assert "did not finish" in trend.text(result)


def test_annotations_are_one_line_each() -> None:
    """Whatever the text contains, a new failure is one command of the runner, and a known one is none."""
    records = [
        a_record(PROBE, Verdict.FAIL, a_finding(message="50 % off,\nsee: below")),
        a_record(OTHER, Verdict.FAIL, a_finding()),
    ]
    (result,) = trend.trends([a_run(1, a_record(PROBE), records[1]), a_run(2, *records)])
    (line,) = trend.as_annotations(result)

    assert line.startswith("::error title=mine%3A R001/probe-ws2::FAIL: ")
    assert "50 %25 off,%0Asee: below" in line
