"""The command `replay`: the same case with the same settings, and what differs."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest

from fsdp_conformance.cli.arguments import parse
from fsdp_conformance.cli.commands import replay
from fsdp_conformance.errors import ConfigError, RunFileError, UsageError
from fsdp_conformance.outcome.records import CaseRecord, Finding
from fsdp_conformance.report.repeated import differences, text
from fsdp_conformance.report.runfile import RunFileWriter
from fsdp_conformance.run_settings import RunSettings
from fsdp_conformance.tests.cli.cli_runs import said
from fsdp_conformance.verdict import Verdict

_CASE = "R001/exact-probe-ws2"

_FINDING = Finding(
    requirement="R002",
    check="parameter parity",
    message="parameter: expected 1, got 2",
    step=0,
    fqn="0.weight",
    got="2",
    expected="1",
)


def _record(verdict: Verdict, *findings: Finding, reason: str = "") -> CaseRecord:
    return CaseRecord(
        case=_CASE, requirements=["R001"], chapter="A", verdict=verdict, findings=list(findings), reason=reason
    )


_PASS, _FAIL = _record(Verdict.PASS), _record(Verdict.FAIL, _FINDING)


def _run(directory: Path, record: CaseRecord = _FAIL, **changes: Any) -> str:
    """A run file with one record."""
    writer = RunFileWriter(directory)
    writer.header({"settings": asdict(replace(RunSettings(implementation="torch-ddp", world_sizes=(4,)), **changes))})
    writer.case(record)
    writer.close()
    return str(directory)


def _replayed(
    monkeypatch: pytest.MonkeyPatch, again: Sequence[CaseRecord], *words: str
) -> tuple[int, list[RunSettings]]:
    """Replay with these records instead of ranks. Returns the exit status, and the settings of each time."""
    used: list[RunSettings] = []
    records = iter(again)

    def record_of(test: object, settings: RunSettings) -> CaseRecord:
        used.append(settings)
        return next(records)

    monkeypatch.setattr("fsdp_conformance.cli.single.prepare", lambda device, implementation: None)
    monkeypatch.setattr("fsdp_conformance.selftest.cases.record_of", record_of)
    return replay.main(parse(["replay", *words])), used


def test_the_same_is_the_same() -> None:
    """No line for a record that is equal in what is compared."""
    assert differences(_FAIL, replace(_FAIL, seconds=9.0)) == []
    assert differences(_PASS, _PASS) == []


@pytest.mark.parametrize(
    ("changes", "line"),
    [
        ({"step": 2}, "step: 0, now 2"),
        ({"fqn": "2.bias"}, "parameter: 0.weight, now 2.bias"),
        ({"got": "3", "message": "parameter: expected 1, got 3"}, "value: 2, now 3"),
        ({"message": "shapes differ"}, "message: parameter: expected 1, got 2, now shapes differ"),
    ],
    ids=["step", "parameter", "value", "message"],
)
def test_what_differs_is_named(changes: dict[str, Any], line: str) -> None:
    """The step, the parameter, the value; the message only if nothing else says it."""
    assert differences(_FAIL, _record(Verdict.FAIL, replace(_FINDING, **changes))) == [line]


def test_a_verdict_and_a_finding_that_are_gone() -> None:
    """The report mentions both."""
    verdict, finding = differences(_FAIL, _PASS)

    assert verdict == "verdict: FAIL, now PASS"
    assert finding.startswith("finding: R002 (parameter parity)")
    assert finding.endswith("now none")


@pytest.mark.parametrize(
    ("then", "again", "word"),
    [
        (_FAIL, [_FAIL, _FAIL], "deterministic: it failed 2 of 2"),
        (_FAIL, [_FAIL, _PASS], "flaky: 1 FAIL, 1 PASS"),
        (_FAIL, [_PASS, _PASS], "not reproduced:"),
        (_PASS, [_FAIL, _FAIL], "new:"),
        (_FAIL, [_FAIL], "--times 10"),
    ],
    ids=["deterministic", "flaky", "gone", "new", "once"],
)
def test_flaky_is_told_from_deterministic(then: CaseRecord, again: list[CaseRecord], word: str) -> None:
    """The last line says which it is; the one before has the counts."""
    report = text(then, again)

    assert word in report.splitlines()[-1]
    failed = sum(record.verdict is Verdict.FAIL for record in again)
    assert f"failed {failed} of {len(again)} times" in report


@pytest.mark.parametrize(
    ("again", "status"), [([_FAIL, _FAIL], 0), ([_FAIL, _PASS], 1), ([_PASS, _PASS], 1)], ids=["same", "flaky", "gone"]
)
def test_it_is_run_as_in_the_run(
    again: list[CaseRecord], status: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With the run's settings, but not its selection, which may leave out the case by now."""
    path = _run(tmp_path, stress_seed=7, num_threads=3)
    returned, used = _replayed(monkeypatch, again, path, _CASE, "--times", "2")

    assert returned == status
    assert [(each.implementation, each.stress_seed, each.num_threads, each.world_sizes) for each in used] == [
        ("torch-ddp", 7, 3, ())
    ] * 2


def test_a_run_that_was_edited_is_refused(tmp_path: Path) -> None:
    """Its settings are not to be trusted."""
    file = Path(_run(tmp_path)) / "run.jsonl"
    file.write_text(file.read_text(encoding="utf-8").replace("torch-ddp", "torch-fsdp2"), encoding="utf-8")

    with pytest.raises(RunFileError, match="cannot be replayed"):
        replay.main(parse(["replay", str(tmp_path), _CASE]))


def test_what_cannot_be_replayed_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A case that the run does not have, no earlier run, torchrun's ranks, no number of times."""
    monkeypatch.chdir(tmp_path)
    path = _run(tmp_path / "one")
    with pytest.raises(UsageError, match=f"Did you mean '{_CASE}'"):
        replay.main(parse(["replay", path, "R001/exact-probe-ws3"]))
    with pytest.raises(UsageError, match="does not exist"):
        replay.main(parse(["replay", _CASE]))
    with pytest.raises(UsageError, match="torchrun's workers"):
        replay.main(parse(["replay", _run(tmp_path / "two", ranks="torchrun"), _CASE]))
    with pytest.raises(ConfigError, match="--times must be"):
        replay.main(parse(["replay", path, _CASE, "--times", "0"]))


def test_code_that_only_the_file_names_is_not_imported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """All such options are asked for at once; what the user names is used, whatever the file says."""
    path = _run(tmp_path, implementation="engines/mine.py", workload="my model.py:build")
    asked = "--implementation engines/mine.py --workload 'my model.py:build'"

    with pytest.raises(UsageError, match=f"names it: add {asked}$"):
        replay.main(parse(["replay", path, _CASE]))
    with pytest.raises(UsageError, match=r"names it: add --workload 'my model.py:build'$"):
        replay.main(parse(["replay", path, _CASE, "--implementation", "torch-ddp"]))

    words = (path, _CASE, "--implementation", "torch-ddp", "--workload", "other.py:build")
    _, used = _replayed(monkeypatch, [_FAIL], *words)
    assert [(each.implementation, each.workload) for each in used] == [("torch-ddp", "other.py:build")]


@pytest.mark.nightly
def test_a_failure_that_is_gone_is_told(tmp_path: Path) -> None:
    """On real ranks, torch's DDP passes a case that it failed according to the run."""
    done = said("replay", _run(tmp_path), _CASE)

    assert done.status == 1, done.err
    assert "differs  verdict: FAIL, now PASS" in done.out
    assert "not reproduced" in done.last_line
    assert [path.name for path in tmp_path.iterdir()] == ["run.jsonl"]
