"""One defect is one problem in a report, and different defects stay apart."""

from __future__ import annotations

import pytest

from fsdp_conformance.diagnosis.grouping import grouped, may_follow
from fsdp_conformance.outcome.records import CaseRecord
from fsdp_conformance.report.terminal import render_findings
from fsdp_conformance.tests.report.evidence import a_finding, a_record
from fsdp_conformance.verdict import Verdict

SUMMED, TWICE, STALE = "summed instead of averaged", "counted twice", "no update: its value from before the step"


def failed(case: str, likely: str = "", check: str = "gradient parity", **changes: object) -> CaseRecord:
    """A failure of the requirement that its case is named after."""
    finding = a_finding(case.partition("/")[0], likely=likely, check=check)
    return a_record(case, Verdict.FAIL, finding, **changes)


def raised(case: str, line: int, verdict: Verdict = Verdict.FAIL) -> CaseRecord:
    """A case in which the engine raised at one of its own lines."""
    traceback = (
        "Traceback (most recent call last):\n"
        '  File "/x/site-packages/fsdp_conformance/driver/session.py", line 7, in run\n'
        f'  File "/x/acme/unit.py", line {line}, in reduce\nValueError: no\n'
    )
    finding = a_finding(case.partition("/")[0], check="training", likely="")
    return a_record(case, verdict, finding, traceback=traceback)


def cases(records: list[CaseRecord]) -> list[list[str]]:
    """The cases of each group, in their order."""
    return [[record.case for record in group.cases] for group in grouped(records)]


def test_a_cause_is_one_problem_whatever_it_violates() -> None:
    """A case of another requirement that may have the same cause belongs to it; one whose cause differs does not."""
    records = [
        failed("R101/a-ws2", f"{SUMMED}: got / expected = 2", check="norm parity"),
        failed("R003/b-ws4", f"{SUMMED}, or {TWICE}: got / expected = 2"),
        failed("R003/c-ws2", f"{TWICE}, or {SUMMED}: got / expected = 2"),
        failed("R005/d-ws2", STALE),
    ]

    assert cases(records) == [["R003/c-ws2", "R003/b-ws4", "R101/a-ws2"], ["R005/d-ws2"]]


def test_the_cause_that_explains_most_takes_a_case_that_may_have_either() -> None:
    """Whatever order the cases are in, each is in one group."""
    records = [
        failed("R003/a-ws2", f"{TWICE}: 2"),
        failed("R003/b-ws2", f"{TWICE}, or {SUMMED}: 2"),
        failed("R003/c-ws2", f"{SUMMED}: 2"),
        failed("R003/d-ws2", f"{SUMMED}: 2"),
    ]
    expected = [["R003/c-ws2", "R003/d-ws2", "R003/b-ws2"], ["R003/a-ws2"]]

    assert cases(records) == expected
    assert cases(records[::-1]) == expected


def test_a_line_of_the_engine_is_one_problem() -> None:
    """Two cases in which the same line raised are one; another line, or another ending, is another."""
    records = [
        raised("R001/a-ws2", 7),
        raised("R130/b-ws4", 7),
        raised("R001/c-ws2", 8),
        raised("R001/d-ws2", 7, Verdict.CRASH),
    ]

    assert cases(records) == [["R001/a-ws2", "R130/b-ws4"], ["R001/c-ws2"], ["R001/d-ws2"]]


def test_frames_of_test_frameworks_are_not_the_engines() -> None:
    """Every parameterised case goes through the same line of them."""
    text = (
        "Traceback (most recent call last):\n"
        '  File "/x/site-packages/parameterized/parameterized.py", line 620, in standalone_func\nValueError: no\n'
    )
    records = [
        failed("R001/a-ws2", check="training", traceback=text),
        failed("R103/b-ws2", check="loss parity", traceback=text),
    ]

    assert cases(records) == [["R103/b-ws2"], ["R001/a-ws2"]]


def test_exceptions_without_a_line_of_the_engine_go_by_what_they_say() -> None:
    """The same exception on every rank is not a cause: two exceptions are two problems, one is one."""
    likely = "every rank raised: the same exception"
    says = ["rank 0 raised RuntimeError: mixed", "rank 1 raised RuntimeError: mixed", "rank 0 raised KeyError: 'x'"]
    records = [
        a_record(
            f"R{number}/x-ws2", Verdict.FAIL, a_finding(f"R{number}", check="training", likely=likely, message=text)
        )
        for number, text in zip((134, 135, 136), says, strict=True)
    ]

    assert cases(records) == [["R134/x-ws2", "R135/x-ws2"], ["R136/x-ws2"]]
    assert may_follow(grouped(records)) == []


def test_failures_without_a_cause_come_briefly_after_a_common_one() -> None:
    """They may follow from it, but nothing proves it: each one takes two lines, and stays a failure."""
    common = [failed(f"R003/{name}-ws2", f"{SUMMED}: 2") for name in "abc"]
    alone = failed("R109/state-dict-ws2", check="parameters after a load")
    text = render_findings([*common, alone])

    assert [group.first.case for group in may_follow(grouped([*common, alone]))] == ["R109/state-dict-ws2"]
    assert "1 more failure without a known cause, which may follow from the above:\n✗ R109" in text
    assert "R109/state-dict-ws2: gradient of '0.weight'" in text
    assert text.count("\n    repro ") == 1


@pytest.mark.parametrize(
    "others",
    [
        [failed(f"R003/{name}-ws2", f"{SUMMED}: 2") for name in "ab"],
        [failed(f"R{number}/x-ws2", check=f"check {number}") for number in range(110, 116)],
    ],
    ids=["too few", "most have none"],
)
def test_without_a_common_cause_every_failure_is_told_in_full(others: list[CaseRecord]) -> None:
    """Nothing suggests that one follows from another."""
    records = [*others, failed("R109/state-dict-ws2", check="parameters after a load")]

    assert may_follow(grouped(records)) == []
    assert "may follow" not in render_findings(records)


def test_what_cannot_follow_is_told_in_full() -> None:
    """The death of a rank is a separate problem, and wrong values before training have no earlier cause."""
    common = [failed(f"R003/{name}-ws2", f"{SUMMED}: 2") for name in "abc"]
    crash = a_record("R145/x-ws2", Verdict.CRASH, a_finding("R145", check="process end", likely=""))
    before = a_record("R019/x-ws2", Verdict.FAIL, a_finding("R001", check="initial parity", phase="init", likely=""))

    assert may_follow(grouped([*common, crash, before])) == []
