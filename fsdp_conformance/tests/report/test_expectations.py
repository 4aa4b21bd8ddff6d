"""The expectations of a run, compared with its results; and the file, as it is written from a run."""

from __future__ import annotations

import datetime as dt
from pathlib import Path
from typing import Any

import pytest

from fsdp_conformance.errors import UsageError
from fsdp_conformance.outcome.records import CaseRecord
from fsdp_conformance.report.baseline import Changes, changes
from fsdp_conformance.report.expectation_writer import updated
from fsdp_conformance.report.expectations import Expectation, judge, load_expectations
from fsdp_conformance.report.run_content import RunFile
from fsdp_conformance.tests.report.evidence import a_finding, a_record
from fsdp_conformance.verdict import Verdict

UNUSED, ORDER, PARITY = "R117/unused-ws2", "R070/order-ws2", "R001/probe-ws2"
TODAY = dt.date(2026, 11, 22)


def a_run(*records: CaseRecord, implementation: str = "mine", torch: str = "2.13.0") -> RunFile:
    """A finished run."""
    header = {
        "settings": {"implementation": f"adapters.py:{implementation}", "device": "cpu"},
        "implementation": {"name": implementation},
        "environment": {"torch": torch},
    }
    return RunFile(path="run.jsonl", header=header, records=list(records), footer={})


def an_entry(case: str = UNUSED, verdict: str = "FAIL", **more: Any) -> Expectation:
    """An entry about the run's own engine."""
    return Expectation(case=case, verdict=verdict, reason="It is so.", **more)


def surprises(run: RunFile, *entries: Expectation) -> list[str]:
    """The kind of each surprise, and its case."""
    comparison = judge(run, entries, profile_cases=(UNUSED, ORDER, PARITY), today=TODAY)
    return [f"{surprise.kind} {surprise.case}" for surprise in comparison.surprises]


@pytest.mark.parametrize(
    ("verdict", "announced", "kind"),
    [
        (Verdict.PASS, None, None),
        (Verdict.UNSUPPORTED, None, None),
        (Verdict.FAIL, "FAIL", None),
        (Verdict.DISABLED, "FAIL", None),
        (Verdict.NOT_RUN_ENV, "FAIL", None),
        (Verdict.UNSUPPORTED, "UNSUPPORTED", None),
        (Verdict.FAIL, None, "NEW"),
        (Verdict.ERROR_SUITE, None, "NEW"),
        (Verdict.INCONCLUSIVE, None, "NEW"),
        (Verdict.HANG, "FAIL", "CHANGED"),
        (Verdict.PASS, "FAIL", "CHANGED"),
        (Verdict.UNSUPPORTED, "FAIL", "CHANGED"),
        (Verdict.PASS, "UNSUPPORTED", "CHANGED"),
    ],
)
def test_what_is_new_and_what_has_changed(verdict: Verdict, announced: str | None, kind: str | None) -> None:
    """A failure without an entry is new, an entry that does not describe what happened has changed."""
    entries = [an_entry(verdict=announced)] if announced else []

    assert surprises(a_run(a_record(UNUSED, verdict)), *entries) == ([f"{kind} {UNUSED}"] if kind else [])


def test_every_failure_has_a_standing() -> None:
    """Next to its verdict; a case that passes has one only if an entry names it."""
    run = a_run(a_record(UNUSED, Verdict.FAIL), a_record(ORDER, Verdict.HANG), a_record(PARITY), a_record("R002/x-ws2"))
    entries = [an_entry(url="https://x"), an_entry(PARITY)]
    marks = judge(run, entries, profile_cases=(UNUSED, ORDER, PARITY), today=TODAY).marks

    assert {case: mark.sentence() for case, mark in marks.items()} == {
        UNUSED: "known: It is so. (https://x)", ORDER: "new", PARITY: "gone: It is so.",
    }  # fmt: skip


def test_a_glob_stands_for_every_case_that_it_matches() -> None:
    """One of them that passes is a surprise; the others stay expected."""
    run = a_run(a_record(UNUSED, Verdict.FAIL), a_record("R117/unused-ws4"), a_record(ORDER, Verdict.FAIL))

    comparison = judge(run, [an_entry("R117/*")], profile_cases=(UNUSED, ORDER), today=TODAY)

    assert [surprise.sentence() for surprise in comparison.surprises] == [
        "CHANGED   R117/unused-ws4: expected FAIL, got PASS; the entry says: It is so.",
        "NEW       R070/order-ws2: FAIL: ",
    ]
    assert (comparison.expected, comparison.as_expected) == (1, False)


@pytest.mark.parametrize(
    ("entry", "applies"),
    [
        (an_entry(implementation="mine"), True),
        (an_entry(implementation="mi*"), True),
        (an_entry(implementation="adapters.py:mine"), True),
        (an_entry(implementation="other"), False),
        (an_entry(device="cpu"), True),
        (an_entry(device="cuda"), False),
        (an_entry(torch=">=2.6,<2.14"), True),
        (an_entry(torch="<2.13"), False),
    ],
)
def test_an_entry_applies_to_the_runs_that_it_describes(entry: Expectation, applies: bool) -> None:
    """For other runs it does not count, so the failure is new."""
    assert surprises(a_run(a_record(UNUSED, Verdict.FAIL)), entry) == ([] if applies else [f"NEW {UNUSED}"])


def test_local_builds_of_torch_satisfy_a_specifier() -> None:
    """2.13.0+cpu is 2.13."""
    run = a_run(a_record(UNUSED, Verdict.FAIL), torch="2.13.0+cpu")

    assert surprises(run, an_entry(torch=">=2.13,<2.14")) == []


def test_an_entry_of_a_case_on_another_device_does_not_cover_it() -> None:
    """A run on the CPU has cases on the simulated accelerator."""
    run = a_run(a_record(UNUSED, Verdict.FAIL, device="sim"))

    assert surprises(run, an_entry(device="sim")) == []
    assert surprises(run, an_entry(device="cpu")) == [f"NEW {UNUSED}"]


def test_an_entry_that_names_no_case_is_a_surprise_with_a_hint() -> None:
    """Otherwise a stale entry would go unnoticed; a case that was left out does not make its entry stale."""
    comparison = judge(a_run(), [an_entry("R117/unsed-ws2"), an_entry()], profile_cases=(UNUSED, ORDER), today=TODAY)

    assert [surprise.sentence() for surprise in comparison.surprises] == [
        "UNMATCHED R117/unsed-ws2: no case of the profile has this id; did you mean 'R117/unused-ws2'?"
    ]


def test_an_entry_expires_on_its_day() -> None:
    """Even if it still holds; entries for other engines do not concern this run."""
    run = a_run(a_record(UNUSED, Verdict.FAIL))

    assert surprises(run, an_entry(expires=TODAY)) == [f"EXPIRED {UNUSED}"]
    assert surprises(run, an_entry(expires=TODAY + dt.timedelta(days=1))) == []
    assert surprises(run, an_entry(), an_entry(implementation="other", expires=TODAY)) == []


def test_a_broken_file_is_refused_with_all_of_its_problems(tmp_path: Path) -> None:
    """One error has all problems, with the number of the entry."""
    path = tmp_path / "conformance.toml"
    path.write_text(
        '[[expect]]\ncase = "R001/x"\n[[expect]]\ncase = "b"\nverdict = "PASS"\nreason = " "\nexpires = "soon"\n'
        'torch = "new"\ndevise = "cpu"\n[[expects]]\n',
        encoding="utf-8",
    )

    with pytest.raises(UsageError) as caught:
        load_expectations(path)

    for part in (
        "entry 1 (R001/x): verdict is missing; entry 1 (R001/x): reason is missing",
        "entry 2 (b): unknown key 'devise'; did you mean 'device'?",
        "entry 2 (b): reason must be a string that is not blank, got ' '",
        "entry 2 (b): expires must be a date such as 2027-01-31, without quotes, got 'soon'",
        "entry 2 (b): torch must be a version specifier such as '>=2.6,<2.14', got 'new'",
        "got 'PASS'",
        "unknown table 'expects'; did you mean 'expect'?",
    ):
        assert part in str(caught.value)


@pytest.mark.parametrize("text", ["expect = 3", "[[expect", "expect = [1]"])
def test_a_file_that_lists_nothing_is_refused(text: str, tmp_path: Path) -> None:
    """An empty list would make every failure new, and hide the mistake."""
    path = tmp_path / "conformance.toml"
    path.write_text(text, encoding="utf-8")

    with pytest.raises(UsageError, match=r"conformance\.toml"):
        load_expectations(path)
    with pytest.raises(UsageError, match="cannot be read"):
        load_expectations(tmp_path / "absent.toml")


def write(path: Path, run: RunFile) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Update the file from the run; what was added and removed."""
    update = updated(path, run, profile_cases=(UNUSED, ORDER, PARITY, "R117/unused-ws4"), today=TODAY)
    path.write_text(update.text, encoding="utf-8")
    return update.added, update.removed


def test_a_run_is_as_expected_once_it_has_been_written(tmp_path: Path) -> None:
    """A second time there is nothing to change; the reason is what the case found."""
    path = tmp_path / "conformance.toml"
    run = a_run(a_record(UNUSED, Verdict.FAIL, a_finding("R117")), a_record(ORDER, Verdict.HANG), a_record())

    assert write(path, run) == ((UNUSED, ORDER), ())
    assert surprises(run, *load_expectations(path)) == []
    assert write(path, run) == ((), ())
    first = load_expectations(path)[0]
    assert (first.implementation, first.device, first.reason[:4]) == ("mine", "cpu", "R117")


@pytest.mark.parametrize("verdict", [Verdict.ERROR_ADAPTER, Verdict.ERROR_SUITE])
def test_what_is_no_failure_of_the_engine_is_left_out(verdict: Verdict, tmp_path: Path) -> None:
    """An entry would make a broken adapter look as expected. One that a person wrote is kept."""
    path = tmp_path / "conformance.toml"
    run = a_run(a_record(UNUSED, verdict, reason="full_params() raised"), a_record(ORDER, Verdict.FAIL))
    update = updated(path, run, profile_cases=(UNUSED, ORDER, PARITY), today=TODAY)

    assert (update.added, update.left_out) == ((ORDER,), (f"{UNUSED}: {verdict}: full_params() raised",))
    path.write_text(f'[[expect]]\ncase = "{UNUSED}"\nverdict = "{verdict}"\nreason = "we know"\n', encoding="utf-8")
    assert updated(path, run, profile_cases=(UNUSED, ORDER, PARITY), today=TODAY).left_out == ()


def test_what_people_wrote_is_kept(tmp_path: Path) -> None:
    """Comments, links, entries of other engines and of cases that did not run; what is fixed goes."""
    path = tmp_path / "conformance.toml"
    path.write_text(
        f'# ours\n[[expect]]\ncase = "{ORDER}"\nverdict = "FAIL"\nreason = "old"\n\n'
        f'[[expect]]\ncase = "{PARITY}"  # of the other\nverdict = "FAIL"\nreason = "b"\nimplementation = "other"\n',
        encoding="utf-8",
    )

    assert write(path, a_run(a_record(ORDER), a_record(UNUSED, Verdict.FAIL))) == ((UNUSED,), (ORDER,))
    assert "# ours" in path.read_text()
    assert "# of the other" in path.read_text()
    assert [entry.case for entry in load_expectations(path)] == [PARITY, UNUSED]


def test_a_glob_that_holds_in_part_is_split(tmp_path: Path) -> None:
    """The cases that still fail keep the words of the entry."""
    path = tmp_path / "conformance.toml"
    path.write_text('[[expect]]\ncase = "R117/*"\nverdict = "FAIL"\nreason = "why"\nurl = "https://x"\n', "utf-8")
    run = a_run(a_record(UNUSED), a_record("R117/unused-ws4", Verdict.FAIL))

    assert write(path, run) == (("R117/unused-ws4",), ("R117/*",))
    (entry,) = load_expectations(path)
    assert (entry.case, entry.reason, entry.url) == ("R117/unused-ws4", "why", "https://x")
    assert surprises(run, entry) == ["UNMATCHED R117/unused-ws4"], "the list of cases above does not have it"


def test_a_verdict_that_changed_replaces_the_entry(tmp_path: Path) -> None:
    """FAIL yesterday, HANG today."""
    path = tmp_path / "conformance.toml"
    write(path, a_run(a_record(UNUSED, Verdict.FAIL)))

    assert write(path, a_run(a_record(UNUSED, Verdict.HANG))) == ((UNUSED,), (UNUSED,))
    assert [entry.verdict for entry in load_expectations(path)] == ["HANG"]


def since(*records: CaseRecord, selected: tuple[str, ...] = (UNUSED, ORDER, PARITY)) -> Changes:
    """The changes since a run in which one case failed, one hung and one passed."""
    before = a_run(a_record(UNUSED, Verdict.FAIL), a_record(ORDER, Verdict.HANG), a_record(PARITY))
    return changes(a_run(*records), before, selected=selected)


def test_a_run_next_to_its_baseline() -> None:
    """New, fixed, unchanged and missing; only new and missing ones make it worse."""
    changes = since(a_record(UNUSED, Verdict.FAIL), a_record(ORDER), a_record(PARITY, Verdict.FAIL, reason="summed"))

    assert changes.lines() == [
        "new      R001/probe-ws2: FAIL, PASS before: summed",
        "fixed    R070/order-ws2: HANG before",
        "1 new, 1 fixed, 1 unchanged, 0 missing",
    ]
    assert changes.worse
    assert not since(a_record(UNUSED, Verdict.FAIL), a_record(ORDER), a_record(PARITY)).worse


def test_another_failure_of_a_case_is_new() -> None:
    """It hung, and now it fails."""
    assert since(a_record(ORDER, Verdict.FAIL, reason="x")).new == ("R070/order-ws2: FAIL, HANG before: x",)


def test_a_case_that_is_no_longer_judged_is_missing() -> None:
    """Declined, not possible on this machine, or without a record; but not one that was not selected."""
    changes = since(a_record(UNUSED, Verdict.UNSUPPORTED), a_record(ORDER, Verdict.DISABLED))

    assert changes.missing == (
        "R117/unused-ws2: FAIL before, UNSUPPORTED now",
        "R001/probe-ws2: PASS before, without a verdict now",
    )
    assert changes.worse
    assert since(a_record(UNUSED, Verdict.FAIL), selected=(UNUSED,)).missing == ()
