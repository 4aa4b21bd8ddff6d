"""With `--json` a command prints one JSON value and nothing else, with the facts and the status of its text."""

from __future__ import annotations

import contextlib
import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import pytest

from fsdp_conformance import contract
from fsdp_conformance.adapters.registry import AdapterDescription
from fsdp_conformance.capability import CAPABILITIES
from fsdp_conformance.cli import arguments, messages
from fsdp_conformance.cli.child import run_job
from fsdp_conformance.cli.command import main
from fsdp_conformance.cli.commands import doctor, explore, plan, selftest
from fsdp_conformance.cli.survey import Machine, Survey
from fsdp_conformance.contract.profile import load_profile
from fsdp_conformance.driver.smoke import SmokeResult
from fsdp_conformance.tests.cli.test_plan import MODEL
from fsdp_conformance.tests.report.test_tally import ran
from fsdp_conformance.verdict import Verdict

SAMPLE = load_profile("sample")

#: Commands that report something, with what they need besides.
REPORTING = {
    "compare": ["a", "b"],
    "doctor": [],
    "explain": ["R003"],
    "explore": [],
    "list": [],
    "plan": ["--model", "a:b", "--world-size", "2"],
    "scoreboard": ["a"],
    "selftest": [],
    "smoke": ["a"],
    "verify": ["a"],
}

MACHINE = Machine(
    torch="2.13.0", device="cpu", backend="gloo", problem="", present=frozenset({"gloo"}), num_devices=2, num_ranks=None
)


def both(capsys: pytest.CaptureFixture[str], *words: str) -> tuple[Any, str]:
    """Run a command with --json and without, and return both outputs; the status must be the same."""
    status = main([*words, "--json"])
    content = json.loads(capsys.readouterr().out)
    assert main([*words]) == status
    assert content.get("status", status) == status
    return content, capsys.readouterr().out


@pytest.mark.parametrize("command", REPORTING)
def test_every_command_that_reports_has_it(command: str) -> None:
    """`--json` is a flag; only `sanitize --json FILE`, which is older, takes a file."""
    assert arguments.parse([command, *REPORTING[command], "--json"]).json is True
    assert arguments.parse([command, *REPORTING[command]]).json is False


@pytest.fixture
def _two_devices(monkeypatch: pytest.MonkeyPatch) -> None:
    described = AdapterDescription(spec="mine", name="mine", version="1", capabilities=("zero3",))
    adapter_survey = Survey(machine=MACHINE, description=described)
    monkeypatch.setattr("fsdp_conformance.cli.commands.listing.survey", lambda device, spec: adapter_survey)
    monkeypatch.setattr("fsdp_conformance.cli.single.survey", lambda device, spec, fork: adapter_survey)


@pytest.mark.usefixtures("_two_devices")
@pytest.mark.parametrize("more", [[], ["--not-run"]])
def test_list(more: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    """The same cases in the same order, with the same verdicts."""
    content, text = both(capsys, "list", "--implementation", "mine", "--profile", "quick", *more)
    lines = [line.split() for line in text.splitlines() if line.startswith("  R")]

    assert [case["id"] for case in content["cases"]] == [line[0] for line in lines]
    assert [case["verdict"] or "runs" for case in content["cases"]] == [line[3] for line in lines]
    assert all(case["reason"] for case in content["cases"] if case["verdict"])
    assert content["implementation"]["name"] == "mine"
    assert len(lines) > 3


def test_list_of_words(capsys: pytest.CaptureFixture[str]) -> None:
    """Requirements and flags are listed in JSON as in the text."""
    requirements, text = both(capsys, "list", "--requirements")
    flags, _ = both(capsys, "list", "--capabilities")

    assert [item["id"] for item in requirements["requirements"]] == list(contract.load().requirements)
    counted = next(item["cases"] for item in requirements["requirements"] if item["id"] == "R003")
    assert any(f"({counted} cases)" in line for line in text.splitlines() if line.startswith("  R003"))
    assert [flag["name"] for flag in flags["capabilities"]] == list(CAPABILITIES)


def test_explain_and_verify(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A requirement and a case with their records; the certificate that the text names."""
    failing = SAMPLE.entries[0]
    ran(tmp_path, cases=tuple(SAMPLE.by_id), profile=SAMPLE, **{failing.primary: Verdict.FAIL})
    of_case, text = both(capsys, "explain", failing.id, "--report", str(tmp_path))
    of_requirement, _ = both(capsys, "explain", "R003", "--report", str(tmp_path))
    certificate, stated = both(capsys, "verify", str(tmp_path))

    assert [record["case"] for record in of_case["records"]] == [failing.id]
    assert (of_case["requirement"], [case["id"] for case in of_case["cases"]]) == (None, [failing.id])
    assert of_case["records"][0]["verdict"] == "FAIL"
    assert "FAIL" in text
    assert of_requirement["requirement"]["id"] == "R003"
    assert failing.id in {record["case"] for record in of_requirement["records"]}
    assert certificate["certificate"]["certified"] is False
    assert f"last hash: {certificate['last_hash']}" in stated
    assert certificate["discrepancies"] == []


def test_verify_tells_of_an_edited_file(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Differences from a list of expectations do not disturb the JSON."""
    ran(tmp_path, cases=tuple(SAMPLE.by_id), profile=SAMPLE, **{SAMPLE.entries[0].primary: Verdict.FAIL})
    file, listed = tmp_path / "run.jsonl", tmp_path / "known.toml"
    listed.touch()
    expected, _ = both(capsys, "verify", str(tmp_path), "--expectations", str(listed))
    file.write_text(file.read_text(encoding="utf-8").replace('"PASS"', '"XPASS"', 1), encoding="utf-8")
    edited, _ = both(capsys, "verify", str(tmp_path))

    assert expected["compared"][0].startswith("not as expected")
    assert any(line.startswith("NEW") for line in expected["compared"])
    assert edited["discrepancies"] != []


@pytest.mark.usefixtures("_two_devices")
@pytest.mark.parametrize("problems", [(), ("the shape is wrong",)])
def test_smoke(problems: tuple[str, ...], capsys: pytest.CaptureFixture[str]) -> None:
    """The JSON has each check with its problems."""
    results = [SmokeResult(check="ADAPTER-01", title="the class", problems=problems)]
    with mock.patch("fsdp_conformance.driver.smoke.smoke", return_value=results):
        content, text = both(capsys, "smoke", "mine.py")

    assert [(check["check"], check["problems"]) for check in content["checks"]] == [("ADAPTER-01", list(problems))]
    assert content["status"] == len(problems)
    assert all(problem in text for problem in problems)


def test_doctor(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """The findings of the lines; what a dead child printed belongs to one of them."""
    died = {"what": "died", "how": "ended with status 1", "output": "no torch"}

    @contextlib.contextmanager
    def answers(job: str, **arguments: Any) -> Iterator[Iterator[dict[str, Any]]]:
        yield iter([dict(died)])

    monkeypatch.setattr(doctor, "answers", answers)
    content, text = both(capsys, "doctor")
    (launch,) = [finding for finding in content["findings"] if finding["what"] == "launch"]

    assert (content["status"], launch["state"], launch["output"]) == (3, "failed", "no torch")
    assert [line.split()[0] for line in text.splitlines() if re.match(r"  \S", line)] == [
        finding["what"].split()[0] for finding in content["findings"]
    ]


def test_plan(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """All candidates, and the one that the table marks."""
    (tmp_path / "my_model.py").write_text(MODEL, encoding="utf-8")
    words = ["plan", "--model", f"{tmp_path / 'my_model.py'}:build", "--world-size", "4", "--memory", "1GiB"]
    words += ["--units", "Block"]

    @contextlib.contextmanager
    def answers(job: str, *, timeout_s: float, order: dict[str, Any]) -> Iterator[Iterator[dict[str, Any]]]:
        content_read: list[dict[str, Any]] = []
        run_job(job, lambda what, **content: content_read.append({"what": what, **content}), {"order": order})
        yield iter(content_read)

    monkeypatch.setattr(plan, "answers", answers)
    assert main([*words, "--json"]) == 0
    content_read = json.loads(capsys.readouterr().out)
    main(words)
    (marked,) = [line.split()[1] for line in capsys.readouterr().out.splitlines() if line.startswith("> ")]
    times = [candidate["time_us"]["step"] for candidate in content_read["candidates"]]

    assert content_read["candidates"][content_read["chosen"]]["strategy"] == marked
    assert content_read["candidates"][content_read["chosen"]]["fits"] is True
    assert times == sorted(times)
    assert (content_read["units"], content_read["numel"]) == (3, 10432)


@pytest.mark.parametrize(("confirmed", "ran", "status"), [(True, 5, 1), (False, 5, 0), (True, 0, 4)])
def test_explore(confirmed: bool, ran: int, status: int, capsys: pytest.CaptureFixture[str]) -> None:
    """Every failure, with its script, and the counts."""
    failure = {"what": "failure", "confirmed": confirmed, "text": "the text", "script": "import torch", "saved": None}
    counts = {"what": "done", "ran": ran, "rejected": {}, "declined": {}}
    returned = explore.follow(
        [{"what": "begin", "name": "mine", "version": "1", "workload": ""}, dict(failure), dict(counts)], as_json=True
    )
    content = json.loads(capsys.readouterr().out)

    assert returned == status == content["status"]
    assert content["counts"]["ran"] == ran
    assert [one["script"] for one in content["failures"]] == ["import torch"]


def test_a_child_that_dies_leaves_no_half_of_a_json(capsys: pytest.CaptureFixture[str]) -> None:
    """Its output goes to stderr, like every error."""
    died = {"what": "died", "how": "was ended by SIGKILL", "output": "said before"}

    assert explore.follow([dict(died)], as_json=True) == 4
    captured = capsys.readouterr()
    assert captured.out == ""
    assert "said before" in captured.err


def test_what_json_does_not_know_is_a_word(capsys: pytest.CaptureFixture[str]) -> None:
    """Ratios of findings can be infinite; no reader but Python's takes a bare NaN."""
    messages.say_json({"ratio": float("inf"), "ulps": [float("nan")]})

    assert json.loads(capsys.readouterr().out) == {"ratio": "inf", "ulps": ["nan"]}


def test_selftest(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """The numbers of the table, and the names of survivors."""
    trials = [
        ("kill", "gradients", "one", True),
        ("kill", "gradients", "two", False),
        ("right", "reference", "r", True),
    ]
    results: list[dict[str, Any]] = [
        {"what": "result", "trial": {"kind": kind, "group": group, "engine": engine, "case": "R003/some-ws2"},
         "good": good, "text": "the text", "strict": False, "failed": False}
        for kind, group, engine, good in trials
    ]  # fmt: skip
    trial_plan: dict[str, Any] = {
        "what": "plan", "trials": [result["trial"] for result in results], "groups": {"gradients": "Wrong"},
        "not_here": {"four": "no C++ compiler"},
    }  # fmt: skip

    @contextlib.contextmanager
    def answers(job: str, **arguments: Any) -> Iterator[Iterator[dict[str, Any]]]:
        yield iter([dict(answer) for answer in (trial_plan, *results)])

    monkeypatch.setattr(selftest, "answers", answers)
    content, text = both(capsys, "selftest")

    assert content["status"] == 1
    assert content["all"]["survivors"] == content["classes"]["gradients"]["survivors"] == ["two"]
    assert content["not_run"] == {"four": "no C++ compiler"}
    assert content["correct_engines"] == {"reference": 1}
    assert "1 of 2" in text
