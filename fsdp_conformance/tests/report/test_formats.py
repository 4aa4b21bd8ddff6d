"""A run in the formats that other programs read: SARIF, JUnit, CTRF, a badge, a trace."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any
from xml.etree import ElementTree as ET

import pytest

from fsdp_conformance.contract.profile import load_profile
from fsdp_conformance.report.expectations import NO_LIST, Judged, Mark, Standing
from fsdp_conformance.report.formats import FORMATS, badge, ctrf, junit, sarif, trace
from fsdp_conformance.report.html.page import page
from fsdp_conformance.report.markdown import summary
from fsdp_conformance.report.run_content import RunFile
from fsdp_conformance.report.verify import Verification
from fsdp_conformance.tests.cli.cli_runs import answered
from fsdp_conformance.tests.report import test_tally
from fsdp_conformance.tests.report.evidence import a_record, an_exit
from fsdp_conformance.tests.report.test_texts import a_certificate, a_run, failed, hung
from fsdp_conformance.verdict import Verdict

KNOWN = Mark(standing=Standing.KNOWN, reason="It is so.", url="https://example.org/1")
GONE = Mark(standing=Standing.GONE, reason="It was so.")
NEW = Mark(standing=Standing.NEW)


def listed(**marks: Mark) -> Judged:
    """A list of known failures of `failed` ("first"), of the same with three ranks ("second") and of R001's."""
    cases = {"first": "R003/rank-coded-ws2", "second": "R003/rank-coded-ws3", "passed": "R001/probe-ws2"}
    return Judged(marks={cases[name]: mark for name, mark in marks.items()})


def results(run: RunFile, judged: Judged = NO_LIST) -> list[dict[str, Any]]:
    """The results of the run in SARIF."""
    content = json.loads(sarif.text(run, a_certificate(), judged))
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
        """If that is a file below the working directory; else it is the run file: hosts drop alerts without one."""
        monkeypatch.chdir(tmp_path)
        run = a_run([failed()])
        for spec, expected in (
            ("sub/mine.py:Mine", ("sub/mine.py", 1)),
            (f"{tmp_path}/mine.py:Mine", ("mine.py", 1)),
            ("/elsewhere/mine.py:Mine", ("run.jsonl", 1)),
            ("../mine.py:Mine", ("run.jsonl", 1)),
            ("my.module:Mine", ("run.jsonl", 1)),
            ("torch-fsdp2", ("run.jsonl", 1)),
        ):
            run.header["implementation"]["spec"] = spec
            (result,) = results(run)
            assert placed(result) == expected, spec
        run.path = "/results/of/last/night/run.jsonl"
        assert placed(results(run)[0]) == ("run.jsonl", 1)

    def test_known_failures_are_suppressed(self) -> None:
        """If all cases of the alert are known; with a new one among them it stays, and says which is which."""
        run = a_run([failed(), failed("R003/rank-coded-ws3")])
        (known,) = results(run, listed(first=KNOWN, second=KNOWN))
        (mixed,) = results(run, listed(first=KNOWN, second=NEW))

        assert known["suppressions"] == [{"kind": "external", "justification": "It is so."}]
        assert known["properties"]["severity"] == "silent"
        assert "suppressions" not in mixed
        assert mixed["properties"]["expectations"] == {
            "R003/rank-coded-ws2": "known: It is so. (https://example.org/1)", "R003/rank-coded-ws3": "new",
        }  # fmt: skip

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

    def test_known_and_gone_failures(self) -> None:
        """A known failure has not failed, and an entry whose failure is gone has: as in the exit status."""
        run = a_run([a_record(), failed()])
        content = json.loads(ctrf.text(run, a_certificate(), listed(first=KNOWN, passed=GONE)))["results"]

        assert [(test["status"], test["extra"]) for test in content["tests"]] == [
            ("failed", {"expectation": "gone: It was so."}),
            ("other", {"severity": "silent", "expectation": "known: It is so. (https://example.org/1)"}),
        ]
        assert content["summary"]["failed"] == content["summary"]["other"] == 1


class TestJunit:
    """Cases as tests for a CI system."""

    def test_every_verdict_has_an_ending(self) -> None:
        """The name is the case; requirement, verdict and file are where the user's own tests have them."""
        records = [a_record(f"R001/{verdict.lower()}-ws2", verdict, reason="so") for verdict in Verdict]
        suite = ET.fromstring(junit.text(a_run(records), a_certificate(), NO_LIST))[0]
        endings = {test.get("name"): [ending.tag for ending in test[1:]] for test in suite.iter("testcase")}

        assert endings["R001/pass-ws2"] == []
        assert endings["R001/unsupported-ws2"] == endings["R001/not_run_env-ws2"] == ["skipped"]
        assert endings["R001/fail-ws2"] == endings["R001/inconclusive-ws2"] == endings["R001/xpass-ws2"] == ["failure"]
        assert endings["R001/error_suite-ws2"] == endings["R001/error_adapter-ws2"] == ["error"]
        assert int(suite.get("tests", 0)) == len(Verdict)
        assert {name: int(suite.get(name, 0)) for name in ("failures", "errors", "skipped")} == {
            name: sum(endings == [tag] for endings in endings.values())
            for name, tag in (("failures", "failure"), ("errors", "error"), ("skipped", "skipped"))
        }

    def test_the_facts_of_a_failure(self) -> None:
        """The properties, the file, the headline as message and the block of the case as text."""
        run = a_run([failed()])
        run.header["implementation"]["spec"] = "sub/mine.py:Mine"
        (test,) = ET.fromstring(junit.text(run, a_certificate(), NO_LIST)).iter("testcase")
        properties = {one.get("name"): one.get("value") for one in test.iter("property")}
        (ending,) = test.iter("failure")

        assert (test.get("file"), test.get("classname")) == ("sub/mine.py", "A. Numerical parity with DDP")
        assert properties == {
            "conformance_case": "R003/rank-coded-ws2", "conformance_requirements": "R003",
            "conformance_verdict": "FAIL", "conformance_severity": "silent",
        }  # fmt: skip
        assert (ending.get("message") or "").startswith("R003 (gradient parity)")
        assert "likely" in (ending.text or "")

    def test_known_and_gone_failures(self) -> None:
        """A known failure is skipped with its reason; an entry whose failure is gone fails."""
        run = a_run([a_record(), failed()])
        tests = list(ET.fromstring(junit.text(run, a_certificate(), listed(first=KNOWN, passed=GONE))).iter("testcase"))

        assert [(test[1].tag, test[1].get("message")) for test in tests] == [
            ("failure", "PASS, but its entry expects a failure: It was so."),
            ("skipped", "FAIL, as expected: It is so."),
        ]

    def test_any_text_can_be_written(self) -> None:
        """XML has no way to write most control characters, and an engine's message may have any."""
        ET.fromstring(junit.text(a_run([failed(got="\x00\x1b[31m\ufffe")]), a_certificate(), NO_LIST))


def test_pages_for_people_mark_what_is_known() -> None:
    """The summary begins with the worst problem that is not known; the page dots the border of what is."""
    run = a_run([failed(), hung()])
    judged = listed(first=KNOWN)
    text, html = summary(run, a_certificate(), judged), page(run, a_certificate(), judged)

    lines = [line for line in text.splitlines() if line.startswith(">")]
    assert "R067" in lines[0]
    assert "hangs" in lines[0]
    assert any("likely" in line for line in lines)
    assert "(1 case; known: It is so. (https" in text
    assert '<article class="silent known">' in html
    assert '<article class="hang">' in html
    assert "known: It is so." in html


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
    profile = load_profile("sample")
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
