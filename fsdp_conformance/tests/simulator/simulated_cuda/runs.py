"""pytest as a user runs it, in a directory with the tests of another project."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType

import pytest

from fsdp_conformance.simulator.device import build

PROJECT = Path(__file__).parent / "project"

#: For a run that takes seconds, on a machine with every core in use.
DEADLINE_S = 500

compiled = pytest.mark.skipif(build.unavailable() is not None, reason=str(build.unavailable()))


@dataclass(frozen=True, slots=True)
class Run:
    """The output of a run, and how it ended."""

    status: int
    out: str
    outcomes: Mapping[str, str]
    """Test to "PASSED", "FAILED", ..., as -rA lists them."""

    def section(self, test: str) -> str:
        """pytest's report of a test that failed."""
        match = re.search(
            rf"^_+ (?:ERROR at setup of )?{re.escape(test)} _+$(.*?)(?=^[_=]{{3}})", self.out, re.MULTILINE | re.DOTALL
        )
        return match[1] if match else ""


def run_pytest(
    directory: Path,
    *typed: str,
    files: Iterable[str] = (),
    texts: Mapping[str, str] = MappingProxyType({}),
    deadline_s: float = DEADLINE_S,
) -> Run:
    """
    Run pytest on copies of the project's `files` and on other files: `test_NAME.py` with each text.

    After `deadline_s` it is ended, with the processes that it has started.
    """
    copies = {name: (PROJECT / f"{name}.py").read_text(encoding="utf-8") for name in files}
    for name, text in {**copies, **texts}.items():
        (directory / f"test_{name}.py").write_text(text, encoding="utf-8")
    (directory / "pytest.ini").write_text("[pytest]\n", encoding="utf-8")
    environment = {name: value for name, value in os.environ.items() if not name.startswith(("PYTEST", "COV_"))}
    process = subprocess.Popen(
        [sys.executable, "-m", "pytest", "-rA", "-p", "no:cacheprovider", *typed],
        cwd=directory,
        env={**environment, "OMP_NUM_THREADS": "1", "COLUMNS": "160", "PYTHONDONTWRITEBYTECODE": "1"},
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        errors="replace",
        start_new_session=True,
    )
    try:
        out, err = process.communicate(timeout=deadline_s)
    except BaseException:
        os.killpg(process.pid, signal.SIGKILL)
        process.communicate()
        raise
    lines = re.findall(r"^(PASSED|FAILED|ERROR|XFAIL|XPASS) (?:\S+::)+([^\s]+)", out, re.MULTILINE)
    return Run(process.returncode, out + err, {test: outcome for outcome, test in lines})
