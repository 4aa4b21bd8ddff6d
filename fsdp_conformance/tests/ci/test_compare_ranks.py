"""ci/compare-ranks: the table of verdicts that differ between kinds of ranks, from run files made by hand."""

from __future__ import annotations

import runpy
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from fsdp_conformance.config import RANKS
from fsdp_conformance.errors import ConfigError, RunFileError
from fsdp_conformance.outcome import CaseRecord
from fsdp_conformance.report.runfile import RunFile, RunFileWriter, read
from fsdp_conformance.tests.guards import checkout
from fsdp_conformance.tests.guards.checkout import ROOT
from fsdp_conformance.tests.report.evidence import a_record
from fsdp_conformance.verdict import Verdict

pytestmark = checkout.required

FIRST, SECOND = "R001/exact-probe-ws2", "R001/exact-probe-ws4"


@pytest.fixture(scope="module")
def script() -> dict[str, Any]:
    """The names that the script defines."""
    return runpy.run_path(str(ROOT / "ci/compare_ranks.py"))


def write(directory: Path, *records: CaseRecord, seconds: float | None = 3.0) -> RunFile:
    """A run file with these records; without a footer if `seconds` is None."""
    writer = RunFileWriter(directory)
    writer.header({})
    for record in records:
        writer.case(record)
    if seconds is not None:
        writer.footer({"seconds": seconds})
    writer.close()
    return read(directory)


def test_equal_verdicts(script: dict[str, Any], tmp_path: Path) -> None:
    """Nothing but the seconds and the count."""
    failure = a_record(SECOND, Verdict.FAIL, reason="loss: expected 1, got 3")
    runs = {
        "processes": write(tmp_path / "a", a_record(FIRST), failure, seconds=12.34),
        "simulated": write(tmp_path / "b", failure, a_record(FIRST), seconds=4.0),
    }

    lines, number = script["table"](runs)

    assert 0 == number
    assert [["case", "processes", "simulated"], ["seconds", "12.3", "4.0"]] == [line.split() for line in lines[:2]]
    assert "compare-ranks: 0 of 2 verdicts differ" == lines[-1]


def test_verdicts_that_differ(script: dict[str, Any], tmp_path: Path) -> None:
    """The case, its verdict on each kind, and the reasons; a run without a verdict differs from one that has it."""
    runs = {
        "processes": write(tmp_path / "a", a_record(FIRST), a_record(SECOND)),
        "simulated": write(tmp_path / "b", a_record(FIRST, Verdict.HANG, reason="rank 1 waits"), a_record(SECOND)),
        "torchrun": write(tmp_path / "c", a_record(FIRST)),
    }

    lines, number = script["table"](runs)

    assert 2 == number
    assert [FIRST, "PASS", "HANG", "PASS"] == lines[1].split()
    assert "  simulated: rank 1 waits" == lines[2]
    assert f"{SECOND} PASS PASS no verdict" == " ".join(lines[3].split())
    assert "compare-ranks: 2 of 2 verdicts differ" == lines[-1]


def test_ranks_that_must_be_processes(script: dict[str, Any], tmp_path: Path) -> None:
    """Such a case is counted where it was not run, and differs only between the other kinds."""
    absent = a_record(FIRST, Verdict.NOT_RUN_ENV, measurements={"absent": ["processes"]})
    gone = a_record(SECOND, Verdict.NOT_RUN_ENV, reason="the workers of ranks [1] did not come")
    runs = {
        "processes": write(tmp_path / "a", a_record(FIRST), a_record(SECOND)),
        "simulated": write(tmp_path / "b", absent, a_record(SECOND)),
        "torchrun": write(tmp_path / "c", a_record(FIRST), gone),
    }

    lines, number = script["table"](runs)

    assert 1 == number
    assert [SECOND, "PASS", "PASS", "NOT_RUN_ENV"] == lines[1].split()
    assert "not run on simulated ranks (need processes): 1 case" == lines[-2]


def test_a_run_that_did_not_end(script: dict[str, Any], tmp_path: Path) -> None:
    """A part of a run is not compared."""
    write(tmp_path / "aborted", a_record(FIRST), seconds=None)
    write(tmp_path / "whole", a_record(FIRST))

    assert [FIRST] == [record.case for record in script["finished"](tmp_path / "whole", 1).records]
    with pytest.raises(RunFileError, match="the run did not finish"):
        script["finished"](tmp_path / "aborted", 1)
    with pytest.raises(RunFileError, match="status 130"):
        script["finished"](tmp_path / "whole", 130)
    with pytest.raises(RunFileError, match="cannot be read"):
        script["finished"](tmp_path / "absent", 1)


def test_kinds(script: dict[str, Any]) -> None:
    """Each must be known, and one alone is compared with nothing."""
    assert list(RANKS) == script["kinds_of"](",".join(RANKS))
    with pytest.raises(ConfigError, match=r"one of processes, simulated, torchrun, got 'thread'.*two kinds"):
        script["kinds_of"]("thread")


def test_the_largest_world(script: dict[str, Any]) -> None:
    """Of the cases that are selected: so many workers torchrun starts."""
    assert 4 == script["largest_world"]("torch-fsdp2", ["--case", "R001"])
    assert 2 == script["largest_world"]("torch-fsdp2", ["--case", FIRST, "--deadline-scale", "2"])


@pytest.mark.parametrize(("other", "status"), [(Verdict.PASS, 0), (Verdict.FAIL, 1)])
def test_the_command(
    script: dict[str, Any],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    other: Verdict,
    status: int,
) -> None:
    """A run for each kind, with the options that are its own, then the table."""
    started: list[Sequence[str]] = []

    def run(words: Sequence[str]) -> int:
        started.append(words)
        kind = words[words.index("--ranks") + 1]
        write(tmp_path / kind, a_record(FIRST, other if kind == "simulated" else Verdict.PASS))
        return 1

    monkeypatch.setitem(script["compare"].__globals__, "run", run)
    words = ["torch-fsdp2", "--report", str(tmp_path), "-n", "2", "--case", FIRST]

    assert status == script["main"](words)
    assert f"compare-ranks: {status} of 1 verdicts differ" in capsys.readouterr().out
    assert [True, True, False] == ["-n" in words for words in started]
    assert ["torch.distributed.run", "--standalone", "--nproc-per-node", "2"] == list(started[2][2:6])
    assert all(str(tmp_path / kind) in words for kind, words in zip(RANKS, started, strict=True))


def test_a_run_that_fails_ends_the_comparison(
    script: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """With the run's own status, and no table."""
    monkeypatch.setitem(script["compare"].__globals__, "run", lambda words: 3)

    assert 3 == script["main"](["torch-fsdp2", "--report", str(tmp_path), "--case", FIRST])
    assert "ended with status 3" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["torch-fsdp2", "--ranks", "processes"], "at least two kinds"),
        (["torch-fsdp2", "--case", "R999"], "R999"),
    ],
)
def test_wrong_usage(script: dict[str, Any], words: list[str], said: str, capsys: pytest.CaptureFixture[str]) -> None:
    """Said before anything is run."""
    assert 2 == script["main"](words)
    assert said in capsys.readouterr().err
