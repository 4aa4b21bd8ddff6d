"""A run in the formats that other programs read: SARIF, CTRF, a badge, a trace."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any
from xml.etree import ElementTree as ET

import pytest

from fsdp_conformance.contract.profile import load_profile
from fsdp_conformance.report.formats import FORMATS, badge, ctrf, sarif, trace
from fsdp_conformance.report.run_content import RunFile
from fsdp_conformance.report.verify import Verification
from fsdp_conformance.tests.cli.cli_runs import answered
from fsdp_conformance.tests.report import test_tally
from fsdp_conformance.tests.report.evidence import a_record, an_exit
from fsdp_conformance.tests.report.test_texts import a_certificate, a_run, failed, hung
from fsdp_conformance.verdict import Verdict


def results(run: RunFile) -> list[dict[str, Any]]:
    """The results of the run in SARIF."""
    content = json.loads(sarif.text(run, a_certificate()))
    assert content["version"] == "2.1.0"
    (only,) = content["runs"]
    assert {result["ruleId"] for result in only["results"]} == {rule["id"] for rule in only["tool"]["driver"]["rules"]}
    entries: list[dict[str, Any]] = only["results"]
    return entries


def placed(result: dict[str, Any]) -> tuple[str, int]:
    """The file and the line of a result."""
    physical = result["locations"][0]["physicalLocation"]
    return physical["artifactLocation"]["uri"], physical["region"]["startLine"]


class TestSarif:
    """One result for each problem."""

    def test_one_result_for_a_problem(self) -> None:
        """The cases that fail in the same way are one alert; what passed is none."""
        entries = results(a_run([a_record(), failed(), failed("R003/rank-coded-ws3"), hung()]))

        assert [(one["ruleId"], one["level"], len(one["properties"]["cases"])) for one in entries] == [
            ("R003", "error", 2), ("R067", "error", 1)
        ]  # fmt: skip
        assert "likely" in entries[0]["message"]["text"]

    def test_the_place_is_the_engines_innermost_frame(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        """Relative to the repository, with the line; a package that is installed is not part of it."""
        monkeypatch.chdir(tmp_path)
        record = failed()
        record.traceback = (
            "Traceback (most recent call last):\n"
            f'  File "{tmp_path}/acme/unit.py", line 212, in unshard\n'
            '  File "/env/lib/python3.12/site-packages/other/x.py", line 3, in y\nValueError: boom\n'
        )

        assert placed(results(a_run([record]))[0]) == ("acme/unit.py", 212)

    def test_without_a_frame_it_is_the_adapter(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        """If that is a file below the working directory; a module or an entry point has no place."""
        monkeypatch.chdir(tmp_path)
        run = a_run([failed()])
        for spec, expected in (
            ("sub/mine.py:Mine", ("sub/mine.py", 1)),
            (f"{tmp_path}/mine.py:Mine", ("mine.py", 1)),
            ("/elsewhere/mine.py:Mine", None),
            ("../mine.py:Mine", None),
            ("my.module:Mine", None),
            ("torch-fsdp2", None),
        ):
            run.header["implementation"]["spec"] = spec
            (result,) = results(run)
            assert (placed(result) if "locations" in result else None) == expected, spec

    def test_an_alert_keeps_its_identity(self) -> None:
        """Another figure is the same alert; another requirement is another one."""
        first, same = (results(a_run([failed(got=got)]))[0] for got in ("0.75", "0.8"))
        other = results(a_run([failed(requirement="R004")]))[0]

        assert first["partialFingerprints"] == same["partialFingerprints"] != other["partialFingerprints"]

    def test_an_unknown_requirement_is_a_rule_all_the_same(self) -> None:
        """A run file of a later version has requirements that this one does not know."""
        assert results(a_run([failed(requirement="R999")]))[0]["ruleId"] == "R999"


class TestCtrf:
    """Cases as tests."""

    def test_every_verdict_has_a_status(self) -> None:
        """Whatever accuses, or shows that the suite failed, has failed; what was not judged has not passed."""
        records = [a_record(f"R001/{verdict.lower()}-ws2", verdict) for verdict in Verdict]
        content = json.loads(ctrf.text(a_run(records), a_certificate()))["results"]
        status = {test["rawStatus"]: test["status"] for test in content["tests"]}

        assert [verdict for verdict, one in status.items() if one == "passed"] == [Verdict.PASS]
        failing = {Verdict.FAIL, Verdict.HANG, Verdict.CRASH, Verdict.XPASS, Verdict.ERROR_ADAPTER, Verdict.ERROR_SUITE}
        assert {verdict for verdict, one in status.items() if one == "failed"} == failing
        assert content["summary"]["tests"] == len(records) == sum(
            content["summary"][name] for name in ("passed", "failed", "skipped", "other", "pending")
        )  # fmt: skip

    def test_times_are_milliseconds(self) -> None:
        """Of each case and of the run; a header without a start begins in 1970."""
        run = a_run([a_record(seconds=0.5)])
        run.header["started"] = "2026-11-22T10:00:00+00:00"
        content = json.loads(ctrf.text(run, a_certificate()))["results"]
        run.header["started"] = "soon"

        assert content["tests"][0]["duration"] == 500
        assert content["summary"]["stop"] - content["summary"]["start"] == run.footer["seconds"] * 1000  # type: ignore[index]
        assert json.loads(ctrf.text(run, a_certificate()))["results"]["summary"]["start"] == 0


class TestBadge:
    """The verdict as a picture."""

    def words(self, **changes: Any) -> tuple[str, str]:
        """The badge's right half: its text and its colour."""
        picture = ET.fromstring(badge.text(a_run([a_record()]), a_certificate(**changes)))
        name = "{http://www.w3.org/2000/svg}"
        return picture.findall(f"{name}g/{name}text")[1].text or "", picture.findall(f"{name}rect")[1].get("fill", "")

    def test_a_certificate_is_shown_with_its_scope(self) -> None:
        """The word alone is not enough."""
        given = {"certified": True, "reasons": (), "counts": {Verdict.PASS: 5}}

        assert self.words(**given) == ("base + offload (1 of 2 extensions)", "#1a7f37")

    def test_a_failure_is_red(self) -> None:
        """The badge has the number of failures."""
        assert self.words() == ("2 of 5 cases failed", "#c62828")

    def test_a_part_of_a_profile_is_grey(self) -> None:
        """Nothing failed, and nothing is claimed."""
        assert self.words(counts={Verdict.PASS: 5}, expected=9) == ("5 of 9 cases ran", "#68707c")

    def test_no_name_is_taken_for_markup(self) -> None:
        """The name of a profile may come from another person's file."""
        assert "&lt;x&gt;" in badge.text(a_run([]), a_certificate(profile="<x>"))


class TestTrace:
    """Collectives for Perfetto."""

    def test_a_case_is_a_process_and_a_rank_a_thread(self) -> None:
        """Rank 0's schedule, and what each rank did before the end of a case that failed."""
        record = hung()
        record.schedule = ["forward all_gather 96B float32 [0,1]", "odd"]
        line = "#7 issued all_gather 96B float32 [0,1] at unit.py:3 in unshard (forward, step 0)"
        record.exits = [an_exit(1, last_collectives=[line, "odd"])]
        events = json.loads(trace.text(a_run([a_record(), record]), a_certificate()))["traceEvents"]

        assert [event["args"]["name"] for event in events if event["ph"] == "M"] == [
            "R067/uneven-ws2 HANG", "rank 0, training", "rank 1, before its end"
        ]  # fmt: skip
        assert [(event["tid"], event["ts"], event["name"]) for event in events if event["ph"] == "X"] == [
            (0, 0, "all_gather 96 B"), (0, 1, "odd"), (2, 7, "all_gather 96 B"), (2, 1, "odd")
        ]  # fmt: skip
        assert [event["args"]["ended"] for event in events if event["tid"] == 2 and event["ph"] == "X"] == [
            False,
            False,
        ]
        assert {event["pid"] for event in events} == {1}

    def test_a_case_that_passed_has_no_ends(self) -> None:
        """Its ranks went home as they should."""
        record = replace(a_record(), exits=[an_exit(0, last_collectives=["odd"])])

        assert json.loads(trace.text(a_run([record]), a_certificate()))["traceEvents"] == []


def smoke_run(directory: Path) -> Verification:
    """A finished run of a profile that everybody has."""
    profile = load_profile("smoke")
    return test_tally.ran(directory, cases=tuple(profile.by_id), profile=profile)


class TestCommand:
    """`fsdp-conformance export`."""

    def test_every_format(self, tmp_path: Path) -> None:
        """On standard output, or in a file in a directory that is made."""
        ran = smoke_run(tmp_path / "run")
        for name in FORMATS:
            shown = answered("export", str(ran.run.path), "--format", name)
            written = answered("export", str(ran.run.path), "--format", name, "-o", str(tmp_path / "out" / name))
            assert (shown.status, written.status, written.out) == (0, 0, "")
            assert shown.out == (tmp_path / "out" / name).read_text(encoding="utf-8") != ""

    def test_cases_can_be_chosen(self, tmp_path: Path) -> None:
        """They are chosen by glob; a glob that matches nothing is a mistake."""
        ran = smoke_run(tmp_path / "run")
        case = ran.run.records[0].case
        document = json.loads(answered("export", str(ran.run.path), "--format", "ctrf", "--case", f"{case[:-1]}*").out)
        lost = answered("export", str(ran.run.path), "--format", "ctrf", "--case", "R777/*")

        assert case in {test["name"] for test in document["results"]["tests"]}
        assert (lost.status, "--case R777/* names no case that has a verdict" in lost.err) == (2, True)

    def test_a_place_that_cannot_be_written(self, tmp_path: Path) -> None:
        """The machine's fault, in one sentence."""
        ran = smoke_run(tmp_path / "run")
        (tmp_path / "file").touch()
        answer = answered("export", str(ran.run.path), "--format", "badge", "-o", str(tmp_path / "file" / "x.svg"))

        assert (answer.status, "Choose another file with --output." in answer.err) == (3, True)

    def test_an_edited_file_is_no_success(self, tmp_path: Path) -> None:
        """The text is written for anyone who wants to look at it, but the status shows that it proves nothing."""
        path = Path(smoke_run(tmp_path / "run").run.path)
        path.write_text(path.read_text().replace('"verdict":"PASS"', '"verdict":"FAIL"', 1))
        answer = answered("export", str(path), "--format", "badge")

        assert answer.out.startswith("<svg")
        assert (answer.status, answer.err) != (0, "")
        assert "hash" in answer.err
