"""Several engines side by side."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from fsdp_conformance.contract.profile import profile_of
from fsdp_conformance.errors import RunFileError
from fsdp_conformance.report.recorder import Recorder
from fsdp_conformance.report.scoreboard_page import Cell, markdown, scoreboard
from fsdp_conformance.report.verify import Verification, verify
from fsdp_conformance.run_settings import RunSettings
from fsdp_conformance.tests.cli.cli_runs import answered
from fsdp_conformance.tests.report.evidence import a_case, a_record
from fsdp_conformance.verdict import Verdict

PROFILE = profile_of(
    "some",
    [
        a_case(),
        a_case(id="R001/probe-ws4", world_size=4),
        a_case(id="R070/order-ws2", requirements=("R070",)),
        a_case(id="R117/unused-ws2", requirements=("R117",)),
    ],
)


def ran(directory: Path, name: str, **verdicts: Verdict) -> Path:
    """The run of an engine with that name; cases by requirement, PASS if nothing is said."""
    run = Recorder(RunSettings(report_dir=str(directory)), PROFILE, {"name": name, "version": "1"}, directory)
    for entry in PROFILE.entries:
        run.start(entry.id, world_size=entry.world_size)
        verdict = verdicts.get(entry.id.replace("/", "_").replace("-", "_"), verdicts.get(entry.primary, Verdict.PASS))
        run.case(a_record(entry.id, verdict, requirements=list(entry.requirements), reason="so"))
    run.finish()
    return run.path


def read(path: Path) -> Verification:
    """The run, verified."""
    return verify(path, PROFILE)


def test_each_cell_counts_the_cases_of_its_requirement(tmp_path: Path) -> None:
    """Passed, failed, declined, not judged; and what only one engine gets wrong."""
    one = ran(tmp_path / "one", "one", R001_probe_ws4=Verdict.HANG, R070=Verdict.UNSUPPORTED)
    two = ran(tmp_path / "two", "two", R070=Verdict.NOT_RUN_ENV, R117=Verdict.FAIL)

    board = scoreboard([read(one), read(two)])

    assert [[cell.text() if cell else None for cell in board.row(name)] for name in board.requirements] == [
        ["✗ 1 of 2", "✓ 2"],
        ["declined", "not judged"],
        ["✓ 1", "✗ 1 of 1"],
    ]
    assert board.alone == {"R001": "one", "R117": "two"}
    assert (board.requirements, board.warnings) == (("R001", "R070", "R117"), ())
    assert Cell().text() == ""


def test_what_every_engine_passes_is_only_counted(tmp_path: Path) -> None:
    """Unless the whole table is asked for."""
    board = scoreboard([read(ran(tmp_path / name, name, R117=verdict)) for name, verdict in
                        (("one", Verdict.FAIL), ("two", Verdict.PASS))])  # fmt: skip

    short, whole = markdown(board), markdown(board, whole=True)

    assert "| R117 A parameter that no rank uses (only one) | ✗ 1 of 1 | ✓ 1 |" in short
    assert "R001" not in short
    assert short.endswith("\n2 more requirements are passed by every engine here.\n")
    assert "| R001 Losses equal DDP's | ✓ 2 | ✓ 2 |" in whole
    assert "| requirements failed | 1 | 0 |" in short


def test_runs_that_cannot_be_compared_say_so(tmp_path: Path) -> None:
    """Another profile, for example."""
    other = profile_of("other", [a_case()])
    path = tmp_path / "other"
    run = Recorder(RunSettings(report_dir=str(path)), other, {"name": "three"}, path)
    run.start("R001/probe-ws2", world_size=2)
    run.case(a_record())
    run.finish()

    board = scoreboard([read(ran(tmp_path / "one", "one")), verify(run.path, other)])

    assert board.warnings == ("the runs are of 2 profiles",)
    assert board.row("R117")[1] is None
    assert markdown(board).startswith("note: the runs are of 2 profiles\n\n| | one | three |")


def test_an_edited_run_is_refused(tmp_path: Path) -> None:
    """Its numbers are worth nothing."""
    path = ran(tmp_path / "one", "one", R117=Verdict.FAIL)
    path.write_text(path.read_text().replace('"FAIL"', '"PASS"'), encoding="utf-8")

    with pytest.raises(RunFileError, match=r"needs runs that verify: .*does not match its hash"):
        scoreboard([read(path)])


def test_the_command_prints_a_table_or_json(tmp_path: Path) -> None:
    """A run of a profile that is not shipped cannot be read by name, and the message explains it."""
    answer = answered("scoreboard", str(tmp_path))
    assert (answer.status, "expected a run file" in answer.err) == (2, True)
    lost = answered("scoreboard", str(ran(tmp_path / "one", "one")))
    assert (lost.status, "give its file with --profile" in lost.err) == (2, True)
    profile = tmp_path / "some.json"
    profile.write_text(json.dumps(PROFILE.to_json()), encoding="utf-8")
    settings = RunSettings(report_dir=str(tmp_path / "two"), profile=str(profile))
    run = Recorder(settings, PROFILE, {"name": "two"}, tmp_path / "two")
    run.start("R001/probe-ws2", world_size=2)
    run.case(a_record())
    run.finish()

    text, data = (answered("scoreboard", str(run.path), "--profile", str(profile), *more) for more in ((), ("--json",)))

    assert (text.status, text.out.splitlines()[0]) == (0, "| | two |")
    assert json.loads(data.out)["columns"][0]["cells"]["R001"]["passed"] == 1
