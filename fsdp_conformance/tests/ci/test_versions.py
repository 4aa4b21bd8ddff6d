"""The commands that ci/versions runs on each version of torch, and the table of their results."""

from __future__ import annotations

import runpy
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest

from fsdp_conformance.outcome.records import CaseRecord
from fsdp_conformance.report import runfile
from fsdp_conformance.tests.cli.test_compare import ran
from fsdp_conformance.tests.guards import checkout
from fsdp_conformance.tests.guards.checkout import ROOT
from fsdp_conformance.tests.report.evidence import a_finding, a_record
from fsdp_conformance.verdict import Verdict

pytestmark = checkout.required

Versions = Callable[..., tuple[int, list[str]]]

_XML = '<testsuites><testsuite tests="9" failures="{failed}" errors="0" skipped="2"/></testsuites>'


@pytest.fixture(name="versions")
def _versions(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Versions:
    """Runs it with these arguments. The commands are only noted: 2.7 cannot be set up, and tests fail on 2.8."""
    main = runpy.run_path(str(ROOT / "ci/versions"))["main"]
    driver = main.__globals__["driver"]
    calls: list[str] = []

    def run(command: Sequence[object], **_: object) -> int:
        calls.append(" ".join(map(str, command)))
        return int("-m pytest" in calls[-1] and "/2.8/" in calls[-1])

    def capture(command: Sequence[object], **_: object) -> tuple[int, str]:
        run(command)
        return 3 if command[-1] == "torch-2.7" else 0, f"{tmp_path}/env\n"

    for name, stub in {
        "run": run,
        "capture": capture,
        "enter": lambda: tmp_path,
        "catch_signals": lambda: None,
    }.items():
        monkeypatch.setattr(driver, name, stub)
    monkeypatch.setitem(main.__globals__, "ROOT", tmp_path)

    def versions(*arguments: str) -> tuple[int, list[str]]:
        monkeypatch.setattr(sys, "argv", ["versions", "--output", str(tmp_path / "out"), *arguments])
        return main(), calls

    return versions


def test_each_version_is_set_up_tried_and_removed(tmp_path: Path, versions: Versions) -> None:
    """A missing certificate is not a failure here; the list of known findings decides which failures are new."""
    (tmp_path / ".venvs/torch-2.6").mkdir(parents=True)
    status, calls = versions("2.6")

    assert status == 0
    assert [call for call in calls if "ci/setup" in call] == [f"{tmp_path}/ci/setup torch-2.6"]
    runs = [call.split()[3] for call in calls if "fsdp-conformance run" in call]
    assert runs == ["torch-fsdp2", "torch-fsdp1", "reference"]
    assert sum("-m pytest" in call for call in calls) == 2
    assert not (tmp_path / ".venvs/torch-2.6").exists()


def test_the_lowest_versions_run_the_tests_that_use_them(tmp_path: Path, versions: Versions) -> None:
    """No engine is judged with them, and the table is of versions of torch."""
    (tmp_path / ".venvs/lowest").mkdir(parents=True)
    status, calls = versions("lowest")

    assert status == 0
    assert [call for call in calls if "ci/setup" in call] == [f"{tmp_path}/ci/setup lowest"]
    assert ["fsdp_conformance/tests/pytest_plugin" in call for call in calls if "-m pytest" in call] == [True]
    assert not any("fsdp-conformance run" in call for call in calls)
    assert not (tmp_path / ".venvs/lowest").exists()
    assert table(tmp_path / "out").startswith("| torch |")


@pytest.mark.parametrize("version", ["2.7", "2.8"])
def test_one_version_that_fails_does_not_stop_the_others(version: str, versions: Versions) -> None:
    """One that cannot be installed, and one whose tests fail."""
    status, calls = versions("--only", "tests", version, "2.13")

    assert status == 1
    assert any("torch-2.13" in call for call in calls)
    assert sum("-m pytest" in call for call in calls) == (1 if version == "2.7" else 2)


def test_the_other_parts_of_a_version_keep_their_results(tmp_path: Path, versions: Versions) -> None:
    """Old results are removed before a part is run again, so that they are not taken for new ones."""
    place = tmp_path / "out/2.6"
    ran(place / "torch-fsdp2", a_record())
    for part in ("tests", "simulator"):
        (place / f"{part}.xml").write_text(_XML.format(failed=0), encoding="utf-8")
    versions("--only", "simulator", "2.6")

    assert sorted(path.name for path in place.glob("*.xml")) == ["tests.xml"]
    assert (place / "torch-fsdp2" / runfile.NAME).exists()


def table(place: Path) -> str:
    """The page of these results."""
    done = subprocess.run(
        [sys.executable, ROOT / "ci/versions_table.py", place], capture_output=True, text=True, timeout=120, check=False
    )
    return done.stdout if done.returncode == 0 else done.stderr


def ran_on(place: Path, *records: CaseRecord) -> None:
    """A finished run of torch-fsdp2, and tests, in the directory of a version."""
    ran(place / "torch-fsdp2", *records)
    (place / "tests.xml").write_text(_XML.format(failed=int(place.name == "2.8")), encoding="utf-8")


def test_the_table_names_what_differs(tmp_path: Path) -> None:
    """Versions are in the order of their numbers; parts without a result were not run."""
    ran_on(tmp_path / "2.10", a_record(), a_record("R003/once-ws2"))
    ran_on(tmp_path / "2.8", a_record(verdict=Verdict.FAIL, findings=[a_finding()]), a_record("R003/once-ws2"))
    lines = table(tmp_path).splitlines()

    assert lines[0] == "| torch | tests | simulator | torch-fsdp2, base |"
    assert [line.split("|")[2].strip() for line in lines[2:4]] == [
        "6 passed, 1 failed, 2 skipped",
        "7 passed, 2 skipped",
    ]
    assert [line.split("|")[4].strip() for line in lines[2:4]] == ["1 of 2 PASS, 1 failed", "2 of 2 PASS"]
    assert lines[5] == "1 verdicts differ from those on the newest version:"
    assert lines[6].startswith("- torch-fsdp2, R001/probe-ws2: FAIL on ")


def test_an_edited_run_makes_no_table(tmp_path: Path) -> None:
    """Figures come from intact files."""
    ran_on(tmp_path / "2.8", a_record())
    path = tmp_path / "2.8/torch-fsdp2" / runfile.NAME
    path.write_text(path.read_text(encoding="utf-8").replace("PASS", "FAIL", 1), encoding="utf-8")

    assert "does not match its hash" in table(tmp_path)
