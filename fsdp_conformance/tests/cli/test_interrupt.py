"""Ctrl-C: the run file stays intact, the status says it, and no process is left."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from unittest import mock

import pytest

from fsdp_conformance.cli.child import end_family, family
from fsdp_conformance.cli.pytest_process import PytestProcess
from fsdp_conformance.report import runfile
from fsdp_conformance.tests.cli.cli_runs import ADAPTER, children_of, with_adapter, with_quick_survey, words
from fsdp_conformance.tests.pytest_plugin import mini_suite

#: Each test is a run in its own processes.
pytestmark = pytest.mark.slow

#: For what must happen, and happens in a second.
_DEADLINE_S = 240.0


def wait_for(happened: Callable[[], bool], what: str) -> None:
    """Return when it has happened; fail the test after the deadline."""
    deadline = time.monotonic() + _DEADLINE_S
    pause = threading.Event()
    while not happened():
        assert time.monotonic() < deadline, f"{what} did not happen in {_DEADLINE_S} s"
        pause.wait(0.05)


@pytest.fixture(name="run")
def _run(tmp_path: Path, request: pytest.FixtureRequest) -> Iterator[subprocess.Popen[str]]:
    """A run in the middle of a case that waits; one case has been judged before. The parameter are more arguments."""
    suite = mini_suite.write(tmp_path)
    reached = tmp_path / "reached"
    env = suite.environment(
        {"R093/deferred-ws2": "wait"}, MINI_SUITE_FLAGS="zero3 no_sync", MINI_SUITE_REACHED=str(reached)
    )
    command = words(
        "run", "--profile", str(suite.profile_path), "--suites", mini_suite.PACKAGE, "--implementation", "mine.py",
        "--report", str(tmp_path / "report"), *request.param,
    )  # fmt: skip
    child = subprocess.Popen(
        command, cwd=tmp_path, env=with_quick_survey(env, tmp_path), stdout=subprocess.PIPE, stderr=subprocess.PIPE,
        text=True,
    )  # fmt: skip
    try:
        wait_for(lambda: reached.exists() or child.poll() is not None, "the case that waits")
        yield child
    finally:
        if child.poll() is None:
            end_family(child.pid)
        child.communicate(timeout=_DEADLINE_S)


@pytest.mark.nightly
@pytest.mark.parametrize(
    ("run", "number", "status"),
    [
        pytest.param([], signal.SIGINT, 130, marks=pytest.mark.nightly),
        pytest.param(["-n", "2"], signal.SIGINT, 130, marks=pytest.mark.nightly),
        ([], signal.SIGTERM, 143),
        pytest.param([], signal.SIGHUP, 129, marks=pytest.mark.nightly),
    ],
    ids=["Ctrl-C", "Ctrl-C with workers", "SIGTERM", "SIGHUP"],
    indirect=["run"],
)
def test_an_interrupted_run_leaves_its_file_intact_and_no_process(
    run: subprocess.Popen[str], number: signal.Signals, status: int, tmp_path: Path
) -> None:
    """The status is 128 and the signal; what was judged is in the run file, which has no footer."""
    (session,) = children_of(run.pid)
    before = family(session)
    run.send_signal(number)
    out, err = run.communicate(timeout=_DEADLINE_S)

    assert status == run.returncode, out + err
    assert f"interrupted by {number.name}" in err
    assert f"run file: {tmp_path / 'report' / 'run.jsonl'}" == out.rstrip().rpartition("\n")[2]
    assert "Traceback" not in out + err
    assert session in before
    assert family(session) == set()
    left = runfile.read(tmp_path / "report")
    assert left.aborted
    assert left.problems == []
    assert "R001/probe-ws4" in [record.case for record in left.records]
    for line in (tmp_path / "report" / "run.jsonl").read_text(encoding="utf-8").splitlines():
        json.loads(line)


#: A compiler that starts a process with its own session, and does not end.
_ENDLESS_COMPILER = """#!/usr/bin/env python3
import os, subprocess, sys, time

if "--version" in sys.argv:
    sys.exit(0)
child = subprocess.Popen(["sleep", "600"], start_new_session=True)
with open(os.environ["REACHED"] + ".part", "w") as file:
    file.write(f"{os.getpid()} {child.pid}")
os.replace(os.environ["REACHED"] + ".part", os.environ["REACHED"])
time.sleep(600)
"""


@pytest.mark.nightly
@pytest.mark.parametrize(
    ("number", "status"), [(signal.SIGTERM, 143), (signal.SIGINT, 130), (signal.SIGHUP, 129)], ids=str
)
def test_a_run_that_is_ended_while_it_compiles_leaves_no_process(
    number: signal.Signals, status: int, tmp_path: Path
) -> None:
    """The compiler of the simulated accelerator ends with everything that it has started."""
    reached = tmp_path / "reached"
    compiler = tmp_path / "compiler"
    compiler.write_text(_ENDLESS_COMPILER, encoding="utf-8")
    compiler.chmod(0o755)
    adapter = ADAPTER.replace('{"zero3"}', '{"zero3", "init_before", "any_accelerator"}')
    env = {
        **os.environ, "CXX": str(compiler), "REACHED": str(reached), "FSDP_CONFORMANCE_CACHE": str(tmp_path / "cache"),
    }  # fmt: skip
    run = subprocess.Popen(
        words("run", "--implementation", with_adapter(tmp_path, adapter), "--case", "R012/before-ws2"),
        cwd=tmp_path, env=env, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
    )  # fmt: skip
    try:
        wait_for(lambda: reached.exists() or run.poll() is not None, "the compiler")
        assert run.poll() is None, run.communicate()
        pids = {int(word) for word in reached.read_text(encoding="utf-8").split()}
        before = family(run.pid)
        run.send_signal(number)
        out, err = run.communicate(timeout=_DEADLINE_S)
    finally:
        if run.poll() is None:
            end_family(run.pid)
            run.wait()

    assert (run.returncode, pids <= before) == (status, True), out + err
    assert f"interrupted by {number.name}" in err
    assert "Traceback" not in out + err
    assert [pid for pid in before if family(pid)] == []


#: Takes no notice of SIGINT; neither does the process that it has started, which has its own session, as ranks do.
_STUBBORN = """
import os, signal, subprocess, sys, threading

def test_stubborn():
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    waits = "import threading; threading.Event().wait(300)"
    child = subprocess.Popen([sys.executable, "-c", waits], start_new_session=True)
    with open(os.environ["REACHED"] + ".part", "w") as file:
        file.write(str(child.pid))
    os.replace(os.environ["REACHED"] + ".part", os.environ["REACHED"])
    threading.Event().wait(300)
"""


@pytest.mark.nightly
@pytest.mark.parametrize("calls", [1, 2], ids=["after the deadline", "at the second Ctrl-C"])
def test_a_pytest_that_does_not_end_is_ended_with_all_that_it_started(
    calls: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """After the first interrupt pytest has time to end; the second one kills it and its group at once."""
    monkeypatch.setenv("REACHED", str(tmp_path / "reached"))
    monkeypatch.setattr("fsdp_conformance.cli.pytest_process.INTERRUPT_S", 0.2 if calls == 1 else 300.0)
    (tmp_path / "test_stubborn.py").write_text(_STUBBORN, encoding="utf-8")
    with PytestProcess() as pytest_process:
        pytest_process.begin([str(tmp_path / "test_stubborn.py")], log=tmp_path / "log")
        wait_for((tmp_path / "reached").exists, "the test that waits")
        child = int((tmp_path / "reached").read_text(encoding="utf-8"))
        assert child in family(pytest_process.pid)
        for _ in range(calls):
            pytest_process.interrupt()
        wait_for(lambda: not pytest_process.running(), "the end of pytest")

        assert pytest_process.returncode == -signal.SIGKILL
        assert family(pytest_process.pid) | family(child) == set()


@pytest.mark.nightly
def test_leaving_the_block_ends_pytest(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever is raised in the middle of a run, nothing of it lives on."""
    monkeypatch.setenv("REACHED", str(tmp_path / "reached"))
    (tmp_path / "test_stubborn.py").write_text(_STUBBORN, encoding="utf-8")
    pytest_process = PytestProcess()

    def interrupted() -> None:
        with pytest_process:
            pytest_process.begin([str(tmp_path / "test_stubborn.py")], log=tmp_path / "log")
            wait_for((tmp_path / "reached").exists, "the test that waits")
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        interrupted()

    assert family(pytest_process.pid) == set()
    assert not pytest_process.running()


@pytest.mark.nightly
def test_what_pytest_says_is_kept_where_it_cannot_be_written(tmp_path: Path) -> None:
    """The end of the log is known without the log."""
    log = tmp_path / "nowhere" / "log"
    with PytestProcess() as pytest_process:
        pytest_process.begin([str(tmp_path / "test_absent.py")], log=log)
        wait_for(lambda: not pytest_process.running(), "the end of pytest")

    assert pytest_process.returncode == 4
    assert "file or directory not found" in pytest_process.tail()
    assert str(log) in pytest_process.log_problem


def test_a_family_is_known_by_parents_and_by_session(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rank 12 has left the session, 13 has lost its parent; 14 is a zombie, 20 is a stranger, and 16 has just ended."""
    table = {
        10: ("sleeping", 1, 10),
        11: ("sleeping", 10, 10),
        12: ("stopped", 11, 12),
        13: ("sleeping", 1, 10),
        14: ("zombie", 10, 10),
        15: ("sleeping", 12, 12),
        16: ("sleeping", 1, None),
        20: ("sleeping", 1, 20),
    }

    def session_of(pid: int) -> int:
        session = table[pid][2]
        if session is None:
            raise ProcessLookupError
        return session

    processes = [mock.Mock(pid=pid, info={"status": state, "ppid": up}) for pid, (state, up, _) in table.items()]
    monkeypatch.setattr("psutil.process_iter", lambda attributes: iter(processes))
    monkeypatch.setattr("os.getsid", session_of)

    assert {10, 11, 12, 13, 15} == family(10)
