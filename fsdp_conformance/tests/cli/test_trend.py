"""`trend`, as a user types it."""

from __future__ import annotations

import json
from pathlib import Path

from fsdp_conformance.report import runfile
from fsdp_conformance.tests.cli.cli_runs import answered
from fsdp_conformance.tests.cli.test_compare import ran
from fsdp_conformance.tests.report.evidence import a_finding, a_record
from fsdp_conformance.verdict import Verdict


def test_a_new_failure_is_status_1(tmp_path: Path) -> None:
    """As text, as JSON and as annotations; in directories of any depth."""
    ran(tmp_path / "a", a_record())
    assert answered("trend", str(tmp_path)).status == 0
    ran(tmp_path / "b" / "mine", a_record(verdict=Verdict.FAIL, findings=[a_finding()]))
    text, data, github = (answered("trend", str(tmp_path), *words) for words in ([], ["--json"], ["--annotations"]))

    assert (text.status, data.status, github.status) == (1, 1, 1)
    assert text.last_line == "1 new, 0 known, 0 fixed"
    assert [each["implementation"] for each in json.loads(data.out)["trends"]] == ["mine"]
    assert github.out.startswith("::error title=mine%3A R001/probe-ws2::FAIL: ")
    assert github.out.count("\n") == 1


def test_a_directory_without_runs_is_status_2(tmp_path: Path) -> None:
    """The message names the directory."""
    result = answered("trend", str(tmp_path))

    assert result.status == 2
    assert f"expected run files (run.jsonl) below {tmp_path}, found none" in result.err


def test_an_edited_run_is_refused(tmp_path: Path) -> None:
    """The history of runs is evidence, too."""
    path = Path(ran(tmp_path / "a", a_record())) / runfile.NAME
    path.write_text(path.read_text(encoding="utf-8").replace("PASS", "FAIL", 1), encoding="utf-8")
    result = answered("trend", str(tmp_path))

    assert result.status == 2
    assert "does not match its hash" in result.err
