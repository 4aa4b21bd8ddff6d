"""One protocol for all children: answers in their order, errors raised again, and nothing left behind."""

from __future__ import annotations

import os
import subprocess
import sys
import textwrap
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil
import pytest

from fsdp_conformance import errors
from fsdp_conformance.cli import child
from fsdp_conformance.cli.child import StartedChild, answers, family
from fsdp_conformance.cli.command import main
from fsdp_conformance.cli.signals import Stopped
from fsdp_conformance.status import Status

#: Runs a job from a file in place of ours.
_SITE = """
import sys

if "fsdp_conformance.cli.jobs" in sys.orig_argv:
    from fsdp_conformance.cli import child

    def run_job(job, answer, arguments):
        text = open(__file__.replace("sitecustomize", job)).read()
        exec(text, {"answer": answer, **arguments})

    child.run_job = run_job
"""

Write = Callable[[str], None]


@pytest.fixture(name="job")
def _job(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Write:
    """Writes the body of the job "tried", which a child runs."""
    (tmp_path / "sitecustomize.py").write_text(_SITE, encoding="utf-8")
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(tmp_path), os.environ.get("PYTHONPATH", "")]))

    def write(text: str) -> None:
        (tmp_path / "tried.py").write_text(textwrap.dedent(text), encoding="utf-8")

    return write


def test_answers_come_in_order_and_nothing_else(job: Write) -> None:
    """Output of the job, its forks or a C library is neither taken for an answer nor mixed into one."""
    job("""
        import os, sys
        print("noise without an end", end="")
        os.write(1, b'{"what": "noise"}')
        answer("first", number=number, input=sys.stdin.read())
        answer("second", text="a\\nb")
        """)
    with answers("tried", number=2) as coming:
        answers_read = list(coming)

    assert answers_read == [{"what": "first", "number": 2, "input": ""}, {"what": "second", "text": "a\nb"}]


@pytest.mark.parametrize(
    "error",
    [
        errors.ConfigError(["one", "two"], where="here"),
        errors.AdapterError(["one", "two"]),
        errors.AdapterNotFound("no such adapter"),
        errors.EnvironmentUnavailable("no device"),
        errors.RankDied("rank 1 died", rank=1),
    ],
    ids=lambda error: type(error).__name__,
)
def test_an_error_of_the_job_is_raised_in_the_parent(error: errors.ConformanceError) -> None:
    """With its message, its problems and its exit status; one that carries more than text becomes a plain one."""
    sent: list[dict[str, Any]] = []

    def raising(job: str, answer: child.Answer, arguments: object) -> None:
        raise error

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(child, "run_job", raising)
        reader, writer = os.pipe()
        child._follow("tried", {}, writer, fork=False)
        sent.append(child._answer_in(os.read(reader, 1 << 16)))
        os.close(reader)
        os.close(writer)
    raised = child._error_in(sent[0])

    assert (str(raised), raised.exit_status) == (str(error), error.exit_status)
    assert getattr(raised, "problems", ()) == getattr(error, "problems", ())
    if not isinstance(error, errors.RankDied):
        assert type(raised) is type(error)


@pytest.mark.parametrize("fork", [False, True])
def test_a_child_that_ends_early_has_a_last_answer(job: Write, fork: bool) -> None:
    """Its status and its output; in a fork of the child it is the fork that ends, and the next request is served."""
    job("""
        import os, sys
        if not dies:
            answer("still here")
        else:
            answer("begun")
            print("last words", file=sys.stderr, flush=True)
            os._exit(7)
        """)
    with open(os.devnull, "wb") as nothing:
        process = StartedChild(stderr=nothing, tail=lambda: b"last words\n")
        try:
            process.send("tried", fork=fork, dies=True)
            answers_read = list(process.read())
            if fork:
                process.send("tried", dies=False)
                answers_read += process.read()
        finally:
            process.end()

    died = {"what": "died", "how": "ended with status 7", "output": "last words\n"}
    assert answers_read == [{"what": "begun"}, died, *([{"what": "still here"}] if fork else [])]


def test_a_signal_and_the_deadline_end_a_child_with_what_it_started(job: Write) -> None:
    """A process in its own session is ended with it, although it holds the pipe of the answers."""
    job("""
        import os, signal, time
        if not (pid := os.fork()):
            os.setsid()
            time.sleep(300)
        answer("forked", pid=pid)
        time.sleep(300)
        """)
    with answers("tried", signals=(signals := [])) as coming:
        first = next(coming)["pid"]
        assert family(first) == {first}
        signals.append(15)
        with pytest.raises(Stopped, match="SIGTERM"):
            next(coming)
    with answers("tried", timeout_s=20.0) as coming:
        second = next(coming)["pid"]
    with answers("tried", timeout_s=0.1) as coming:
        *_, died = coming

    assert died["how"] == "was ended by SIGKILL; its limit is 0 s"
    assert family(first) | family(second) == set()


@pytest.mark.parametrize("fork", [False, True])
def test_a_child_ends_with_a_parent_that_was_killed(job: Write, fork: bool) -> None:
    """In the middle of a job, with a process in its own session that the job started. Both would sleep on."""
    job("""
        import os, time
        if not (pid := os.fork()):
            os.setsid()
            time.sleep(300)
        answer("forked", pids=[os.getppid(), os.getpid(), pid])
        time.sleep(300)
        """)
    command = """
        import os, sys
        from fsdp_conformance.cli.child import StartedChild
        child = StartedChild(stderr=2, tail=bytes)
        child.send("tried", fork=sys.argv[1] == "True")
        print(*next(child.read())["pids"], flush=True)
        sys.stdin.read()
        """
    parent = subprocess.Popen(
        [sys.executable, "-c", textwrap.dedent(command), str(fork)], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    )
    with parent:
        assert parent.stdout is not None
        first, *others = (psutil.Process(int(pid)) for pid in parent.stdout.readline().split())
        children = [first, *others] if fork else others
        parent.kill()
        _, alive = psutil.wait_procs(children, timeout=30.0)

    # In a container, whatever adopts them may never reap them.
    alive = [each for each in alive if each.status() != psutil.STATUS_ZOMBIE]
    for process in alive:
        process.kill()
    assert alive == []


def test_a_command_passes_an_error_of_its_child_on(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], job: Write
) -> None:
    """As its own error, with its exit status."""
    job("""
        from fsdp_conformance.errors import EnvironmentUnavailable
        raise EnvironmentUnavailable("no Hypothesis")
        """)
    monkeypatch.setattr("fsdp_conformance.cli.commands.explore.answers", lambda _, order: answers("tried"))

    assert main(["explore"]) == Status.ENVIRONMENT
    assert capsys.readouterr().err == "fsdp-conformance: no Hypothesis\n"


def test_a_python_that_cannot_be_started(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """It is the machine's fault, and named."""
    monkeypatch.setattr(sys, "executable", str(tmp_path / "python"))

    with pytest.raises(errors.EnvironmentUnavailable, match="cannot be started"), answers("tried"):
        pass
