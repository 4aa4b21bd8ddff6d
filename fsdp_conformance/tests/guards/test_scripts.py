"""Guard: the scripts under ci/ run from any directory and reject wrong usage as documented."""

from __future__ import annotations

import os
import re
import subprocess
from pathlib import Path

import pytest

from fsdp_conformance.tests.guards import checkout
from fsdp_conformance.tests.guards.checkout import ROOT

pytestmark = checkout.required


def scripts() -> list[Path]:
    """Every script of the checkout, relative to ROOT."""
    return [file for file in checkout.files() if (ROOT / file).read_bytes().startswith(b"#!")]


#: What a script starts with: its interpreter, and what it is for.
_BEGINNING = re.compile(r'#!/usr/bin/env (bash\n# \S|python3\n"""\n?[A-Za-z`])')


def run(directory: Path, script: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    """Run a script from `directory`."""
    return subprocess.run(
        [ROOT / script, *arguments], cwd=directory, capture_output=True, text=True, timeout=240, check=False
    )


@pytest.mark.parametrize("script", scripts(), ids=str)
def test_a_script_can_be_run(script: Path) -> None:
    """It is executable, its syntax is valid, and its first lines describe it."""
    path = ROOT / script
    text = path.read_text(encoding="utf-8")

    assert os.access(path, os.X_OK)
    assert _BEGINNING.match(text)
    if "bash" in text.partition("\n")[0]:
        assert subprocess.run(["bash", "-n", path], capture_output=True, text=True, check=False).stderr == ""
    else:
        compile(text, script, "exec")


def test_ci_and_a_person_run_the_same_command(tmp_path: Path) -> None:
    """.ci/run is ci/test, from any directory."""
    assert run(tmp_path, ".ci/run", "--help").stdout == run(tmp_path, "ci/test", "--help").stdout != ""


@pytest.mark.parametrize(
    ("script", "arguments"),
    [
        ("ci/setup", ["no-such-extra"]),
        ("ci/setup", ["one", "two"]),
        ("ci/test", ["--only", "no-such-stage"]),
        ("ci/test", ["--repeat", "0"]),
        ("ci/test", ["--repeat"]),
        ("ci/bench/run", ["no-such-benchmark"]),
        ("ci/bench/run", ["run"]),
        ("ci/certify", ["--with"]),
        ("ci/certify", ["--torch", "new"]),
        ("ci/certify", ["--torch", "2.6", "--with", "deepspeed"]),
        ("ci/versions", ["2.6.0"]),
        ("ci/versions", ["--only", "everything"]),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else value,
)
def test_wrong_usage_is_status_2_and_a_message(script: str, arguments: list[str], tmp_path: Path) -> None:
    """A mistake in the arguments gives one line, and nothing is set up."""
    done = run(tmp_path, script, *arguments)

    assert done.returncode == 2
    assert len(done.stderr.strip().splitlines()) == 1


def test_every_workflow_is_bounded_and_asks_for_little() -> None:
    """Each workflow limits its permissions and does not run twice at once, and each of its jobs has a time limit."""
    for workflow in (ROOT / ".github/workflows").glob("*.yml"):
        text = workflow.read_text(encoding="utf-8")
        jobs = re.findall(r"^  (\w+):$", text.partition("\njobs:\n")[2], re.MULTILINE)

        assert re.search(r"^permissions:\n  contents: read$", text, re.MULTILINE), workflow.name
        assert re.search(r"^concurrency:$", text, re.MULTILINE), workflow.name
        assert len(re.findall(r"^    timeout-minutes: \d+$", text, re.MULTILINE)) == len(jobs) > 0, workflow.name
