"""The forks that tests run commands in behave as fresh processes do."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import psutil
import pytest

from fsdp_conformance.tests import warm_interpreter

_MODULE = """
import os, random, sys

print(os.getcwd(), sys.argv[1:], os.environ.get("MINE"), "PATH" in os.environ, __name__)
print([name for name in sys.modules if name.partition(".")[0] == "fsdp_conformance"], "torch" in sys.modules)
print("to stderr", file=sys.stderr)
print(random.random())
how = sys.argv[1]
if how == "text":
    sys.exit("a reason")
if how == "raise":
    raise ValueError("wrong")
if how == "signal":
    os.kill(os.getpid(), 15)
if how == "sleep":
    import subprocess, time

    subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
    time.sleep(600)
sys.exit(int(how))
"""


@pytest.fixture(name="place")
def _place(tmp_path: Path) -> Path:
    (tmp_path / "acts.py").write_text(_MODULE, encoding="utf-8")
    return tmp_path


def ran(place: Path, how: str, *, merged: bool = False, timeout: float = 120.0) -> subprocess.CompletedProcess[str]:
    """The module, which ends in this way."""
    words = [sys.executable, "-m", "acts", how]
    return warm_interpreter.run(words, cwd=place, env={"MINE": "yes"}, timeout=timeout, merged=merged)


@pytest.mark.slow
def test_it_has_its_own_directory_environment_and_modules(place: Path) -> None:
    """Nothing of this project is imported; torch is."""
    done = ran(place, "0")
    first, second, _ = done.stdout.splitlines()

    assert (done.returncode, done.stderr) == (0, "to stderr\n")
    assert first == f"{place} ['0'] yes False __main__"
    assert second == "[] True"
    assert ran(place, "0").stdout != done.stdout, "two processes drew the same random number"
    assert "to stderr" in ran(place, "0", merged=True).stdout


@pytest.mark.parametrize(
    ("how", "status", "text"),
    [
        ("7", 7, ""),
        ("text", 1, "a reason\n"),
        ("raise", 1, "ValueError: wrong\n"),
        ("signal", -signal.SIGTERM, ""),
    ],
)
def test_it_ends_as_a_process_does(place: Path, how: str, status: int, text: str) -> None:
    """The status, and what an interpreter prints."""
    done = ran(place, how)

    assert done.returncode == status
    assert done.stderr.endswith(text)


@pytest.mark.nightly
def test_a_deadline_ends_it_with_its_children(place: Path) -> None:
    """As for `subprocess.run`, with everything that it has started."""
    with pytest.raises(subprocess.TimeoutExpired):
        ran(place, "sleep", timeout=3.0)
    left = [process for process in psutil.process_iter() if _is_in(process, place)]
    _, alive = psutil.wait_procs(left, timeout=10)

    assert alive == []


def _is_in(process: psutil.Process, place: Path) -> bool:
    try:
        return bool(process.pid != os.getpid() and process.cwd() == str(place))
    except psutil.Error:
        return False


def test_a_command_forks_the_server_of_its_ranks() -> None:
    """A server that is a new process would import torch again, which is most of what a command takes."""
    words = [sys.executable, "-m", "fsdp_conformance.tests.warm_command"]

    assert warm_interpreter.run(words, timeout=120.0).stdout == "True True\n"
