"""What ci/versions runs on each version of torch, and the table that it makes of it."""

from __future__ import annotations

import shutil
import subprocess
import sys
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

_XML = '<testsuites><testsuite tests="9" failures="{failed}" errors="0" skipped="2"/></testsuites>'

#: Stands for Python: pytest fails on 2.8, and everything else goes to the real one.
_PYTHON = """#!/bin/sh
echo "$@" >>"{place}/calls"
case "$*" in
    *"-m pytest"*2.8*) exit 1 ;;
    *"-m pytest"* | *known_findings*) exit 0 ;;
esac
exec {python} "$@"
"""

#: Stands for ci/setup: 2.7 cannot be installed.
_SETUP = """#!/bin/sh
echo "setup $*" >>"{place}/calls"
[ "$1" != torch-2.7 ] || exit 3
echo {place}/env
"""


def versions(place: Path, *arguments: str) -> tuple[int, list[str], str]:
    """Run it with stand-ins. Returns the exit status, the calls, and stdout."""
    (place / "ci").mkdir()
    (place / "env/bin").mkdir(parents=True)
    for name in ("versions", "versions.py", "children.sh"):
        shutil.copy(ROOT / "ci" / name, place / "ci")
    scripts = {
        place / "ci/setup": _SETUP.format(place=place),
        place / "env/bin/python": _PYTHON.format(place=place, python=sys.executable),
        place / "env/bin/fsdp-conformance": f'#!/bin/sh\necho "$@" >>"{place}/calls"\nexit 1\n',
    }
    for path, text in scripts.items():
        path.write_text(text, encoding="utf-8")
        path.chmod(0o755)
    done = subprocess.run(
        [place / "ci/versions", "--output", place / "out", *arguments],
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    return done.returncode, (place / "calls").read_text(encoding="utf-8").splitlines(), done.stdout


def test_each_version_is_set_up_tried_and_removed(tmp_path: Path) -> None:
    """Certified or not is no failure here; what is new is asked of the list of known findings."""
    (tmp_path / ".venvs/torch-2.6").mkdir(parents=True)
    status, calls, _ = versions(tmp_path, "2.6")

    assert status == 0
    assert [call for call in calls if call.startswith("setup")] == ["setup ", "setup torch-2.6"]
    assert [call.split()[2] for call in calls if call.startswith("run")] == ["torch-fsdp2", "torch-fsdp1", "reference"]
    assert sum("-m pytest" in call for call in calls) == 2
    assert not (tmp_path / ".venvs/torch-2.6").exists()


@pytest.mark.parametrize("version", ["2.7", "2.8"])
def test_one_version_that_fails_does_not_stop_the_others(version: str, tmp_path: Path) -> None:
    """One that cannot be installed, and one whose tests fail."""
    status, calls, _ = versions(tmp_path, "--only", "tests", version, "2.13")

    assert status == 1
    assert any("torch-2.13" in call for call in calls)
    assert sum("-m pytest" in call for call in calls) == (1 if version == "2.7" else 2)


def test_the_other_parts_of_a_version_keep_their_results(tmp_path: Path) -> None:
    """What is run again is removed first, so that nothing old is taken for new."""
    place = tmp_path / "out/2.6"
    ran(place / "torch-fsdp2", a_record())
    for part in ("tests", "simulator"):
        (place / f"{part}.xml").write_text(_XML.format(failed=0), encoding="utf-8")
    versions(tmp_path, "--only", "simulator", "2.6")

    assert sorted(path.name for path in place.glob("*.xml")) == ["tests.xml"]
    assert (place / "torch-fsdp2" / runfile.NAME).exists()


def table(place: Path) -> str:
    """The page of these results."""
    done = subprocess.run(
        [sys.executable, ROOT / "ci/versions.py", place], capture_output=True, text=True, timeout=120, check=False
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
