"""A signal to ci/test, ci/certify or ci/nightly ends everything that they started, and is their exit status."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from fsdp_conformance.cli.child import end_family, family
from fsdp_conformance.tests.guards import checkout
from fsdp_conformance.tests.guards.checkout import ROOT

pytestmark = [checkout.required, pytest.mark.slow]

#: For what must happen, and happens in seconds; nothing is judged by it.
DEADLINE_S = 240.0

#: Stands for every command that the scripts run: it has a child in its own session, as ranks are.
WAITING = """#!{python}
import os, signal, subprocess, sys, threading

if sys.argv[1:] and ("/ci/" in sys.argv[1] or sys.argv[1] == "-c"):  # a script that goes on in the environment
    os.execv({python!r}, [{python!r}, *sys.argv[1:]])
if os.environ.get("DEAF"):
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
code = "import os, threading; open(os.environ['REACHED'], 'w').close(); threading.Event().wait(600)"
subprocess.Popen([{python!r}, "-c", code], start_new_session=True)
threading.Event().wait(600)
"""


@pytest.fixture(name="stubs")
def _stubs(tmp_path: Path) -> Path:
    """A checkout with the real scripts, whose environment has nothing but commands that wait."""
    (tmp_path / "ci").mkdir()
    for name in ("test", "certify", "nightly", "driver.py", "components.py", "constraints-deepspeed.txt"):
        shutil.copy(ROOT / "ci" / name, tmp_path / "ci")
    environment = tmp_path / "env"
    (environment / "bin").mkdir(parents=True)
    for path in (tmp_path / "ci/types", environment / "bin/python", environment / "bin/fsdp-conformance"):
        path.write_text(WAITING.format(python=sys.executable), encoding="utf-8")
        path.chmod(0o755)
    setup = tmp_path / "ci/setup"
    setup.write_text(f"#!/bin/sh\necho {environment}\n", encoding="utf-8")
    setup.chmod(0o755)
    return tmp_path


def wait_until(happened: object, what: str) -> None:
    """Return when it has happened; fail the test after the deadline."""
    deadline = time.monotonic() + DEADLINE_S
    while not happened():  # type: ignore[operator]
        assert time.monotonic() < deadline, f"{what} did not happen in {DEADLINE_S} s"
        threading.Event().wait(0.05)


def alive(pids: set[int]) -> set[int]:
    """Those that have not ended; a zombie has."""
    return {pid for pid in pids if pid in family(pid)}


@pytest.fixture(name="started")
def _started(stubs: Path, request: pytest.FixtureRequest) -> Iterator[subprocess.Popen[str]]:
    """A script in the middle of what it waits for. The parameter: its command line, and more variables."""
    command, variables = request.param
    environment = {**os.environ, **variables, "REACHED": str(stubs / "reached")}
    # A signal that is ignored at the start stays ignored, such as SIGHUP under nohup.
    caught = ["env", "--default-signal=HUP,INT"]
    process = subprocess.Popen(
        [*caught, stubs / command[0], *command[1:]],
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    try:
        wait_until(lambda: (stubs / "reached").exists() or process.poll() is not None, "the command that waits")
        yield process
    finally:
        if process.poll() is None:
            end_family(process.pid)
        process.communicate(timeout=DEADLINE_S)


NO_VARIABLES: dict[str, str] = {}
TEST = (["ci/test", "--only", "types"], NO_VARIABLES)
CERTIFY = (["ci/certify", "--implementation", "x"], NO_VARIABLES)


@pytest.mark.daily(2)
@pytest.mark.nightly_params("certify TERM deaf")
@pytest.mark.parametrize(
    ("started", "number"),
    [
        (TEST, signal.SIGTERM),
        (TEST, signal.SIGINT),
        ((["ci/test", "--only", "types", "--busy"], NO_VARIABLES), signal.SIGHUP),
        (CERTIFY, signal.SIGTERM),
        (CERTIFY, signal.SIGINT),
        ((CERTIFY[0], {"DEAF": "yes", "FSDP_CONFORMANCE_GRACE_S": "1"}), signal.SIGTERM),
        ((["ci/nightly", "--without", "deepspeed"], NO_VARIABLES), signal.SIGTERM),
    ],
    ids=["test TERM", "test INT", "test HUP busy", "certify TERM", "certify INT", "certify TERM deaf", "nightly TERM"],
    indirect=["started"],
)
def test_a_signal_ends_everything(started: subprocess.Popen[str], number: signal.Signals) -> None:
    """The status is 128 and the signal, and no process is left, in whatever session it is."""
    before = family(started.pid)
    started.send_signal(number)
    output, _ = started.communicate(timeout=DEADLINE_S)

    assert started.returncode == 128 + number, output
    assert len(before) >= 3, before
    assert alive(before) == set(), output
    assert "Terminated" not in output
