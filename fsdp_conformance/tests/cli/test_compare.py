"""`compare`, as a user types it: texts, JSON, exit statuses."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from fsdp_conformance.contract.profile import profile_of
from fsdp_conformance.outcome.records import CaseRecord
from fsdp_conformance.report.recorder import Recorder
from fsdp_conformance.run_settings import RunSettings
from fsdp_conformance.tests.cli.cli_runs import answered
from fsdp_conformance.tests.report.evidence import a_case, a_record
from fsdp_conformance.verdict import Verdict


def ran(directory: Path, *records: CaseRecord, finish: bool = True, **settings: Any) -> str:
    """A run file with these records; its directory."""
    made = replace(RunSettings(implementation="mine", report_dir=str(directory)), **settings)
    recorder = Recorder(made, profile_of("some", [a_case()]), {"name": "mine"}, directory)
    for record in records:
        recorder.case(record)
    if finish:
        recorder.finish()
    else:
        recorder.abort()
    return str(directory)


@pytest.fixture(name="old")
def _old(tmp_path: Path) -> str:
    return ran(tmp_path / "old", a_record(), a_record("R003/once-ws2"))


def test_equal_verdicts_are_status_0(old: str, tmp_path: Path) -> None:
    """Whatever else is in the files."""
    new = ran(tmp_path / "new", a_record("R003/once-ws2", seconds=9.0), a_record())
    result = answered("compare", old, new)

    assert (result.status, result.last_line) == (0, "0 of 2 verdicts differ")


def test_a_verdict_that_differs_is_status_1(old: str, tmp_path: Path) -> None:
    """A different verdict is reported as text and as JSON."""
    new = ran(tmp_path / "new", a_record(verdict=Verdict.FAIL, reason="gradients are summed"))
    text, data = answered("compare", old, new), answered("compare", old, new, "--json")

    assert (text.status, data.status) == (1, 1)
    assert "R001/probe-ws2: PASS -> FAIL\n  new: gradients are summed\n" in text.out
    assert "R003/once-ws2: only in the old run" in text.out
    assert text.last_line == "1 of 1 verdicts differ; 1 case is in only one of the runs"
    assert json.loads(data.out)["only_old"] == ["R003/once-ws2"]


def test_a_case_that_only_one_run_has_does_not_differ(old: str, tmp_path: Path) -> None:
    """It is reported all the same."""
    result = answered("compare", ran(tmp_path / "new", a_record()), old)

    assert (result.status, result.last_line) == (0, "0 of 1 verdicts differ; 1 case is in only one of the runs")


@pytest.mark.parametrize("name", ["implementation", "device"])
def test_runs_of_different_things_are_status_2(name: str, old: str, tmp_path: Path) -> None:
    """Unless they are forced to be compared."""
    records = a_record(), a_record("R003/once-ws2")
    new = ran(tmp_path / "new", *records, **{name: "other"})  # type: ignore[arg-type]
    refused, forced = answered("compare", old, new), answered("compare", old, new, "--force")

    assert (refused.status, forced.status) == (2, 0)
    assert f"the runs have different {name}s" in refused.err


def test_files_that_are_not_finished_runs_are_status_2(old: str, tmp_path: Path) -> None:
    """A file that is missing, foreign, aborted or edited is refused."""
    (tmp_path / "foreign").write_text("{}", encoding="utf-8")
    edited = tmp_path / "edited"
    edited.write_text((Path(old) / "run.jsonl").read_text(encoding="utf-8").replace("R003", "R004"), encoding="utf-8")
    aborted = ran(tmp_path / "aborted", a_record(), finish=False)

    for path, problem in (
        (str(tmp_path / "missing"), "expected a run file"),
        (str(tmp_path / "foreign"), "is not a run file"),
        (str(edited), "the file was edited"),
        (aborted, "the run did not finish"),
    ):
        result = answered("compare", old, path)
        assert (result.status, problem in result.err) == (2, True), result.err
