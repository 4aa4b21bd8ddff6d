"""
Child processes: how they are started, asked, read, and ended with everything they have started.

A command leaves torch and engines to a child, so that neither its start nor its life depends on them. The child,
`python -m fsdp_conformance.cli.jobs`, reads requests from stdin, a line of JSON each, such as {"job": "survey",
"arguments": {...}}. A job is the function `run` of a module in `cli.jobs`. Each of its answers is a line of JSON on
stdout, with a key "what". The last line is

    end    it is done
    error  it raised one of our errors, which is raised again in the parent

or, for a child or a fork of it that ends in the middle of a job, before that or instead of it

    died   how it has ended, and the end of its output

Everything else that is printed in a child goes to its stderr.
"""

from __future__ import annotations

import contextlib
import importlib
import json
import multiprocessing
import os
import select
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import IO, Any, Protocol

from fsdp_conformance import errors
from fsdp_conformance.cli.signals import Stopped, caught
from fsdp_conformance.errors import AdapterError, ConfigError, ConformanceError, EnvironmentUnavailable
from fsdp_conformance.status import Status

_MODULE = "fsdp_conformance.cli.jobs"

#: The argument of a child that imports torch, and forks the server of the ranks, before it reads requests.
WARM = "--warm"

#: Seconds between two looks for signals, the deadline and the end of a child.
_LOOK_S = 0.05

#: How long killed processes may take to end, and how often we look.
_DEATH_S = 10.0
_DEATH_LOOK_S = 0.005

#: Bytes of a child's output that are quoted if it dies.
_QUOTED = 1500

#: Errors that are made from their message alone.
_PLAIN_ERRORS = {
    kind.__name__: kind
    for kind in (errors.UsageError, errors.AdapterNotFound, errors.RunFileError, EnvironmentUnavailable)
}


class Answer(Protocol):
    """Sends an answer of a job at once."""

    def __call__(self, what: str, **content: Any) -> None: ...


class Child:
    """A process that runs jobs: started by a command, or a fork of this process. `end` must be called."""

    def __init__(self, pid: int, answers: int, reap: Callable[[], int | None], tail: Callable[[], bytes]) -> None:
        """`answers` is the descriptor of the pipe from it; `tail` returns the end of its output."""
        self.pid = pid
        self.returncode: int | None = None
        """None until `end`; negative for a signal."""
        self._answers = answers
        self._reap = reap
        self._tail = tail
        self._is_busy = True
        """True until the last answer of a job has been read."""
        self._lines: deque[bytes] = deque()
        self._rest = b""

    @classmethod
    def fork(cls, job: str, arguments: Mapping[str, Any], output: IO[bytes]) -> Child:
        """A fork of this process that runs one job, and prints to a file."""
        reader, writer = os.pipe()
        process = multiprocessing.get_context("fork").Process(target=_in_fork, args=(job, arguments, writer, output))
        process.start()
        os.close(writer)
        assert process.pid is not None, "it has been started"

        def reap() -> int | None:
            process.join()
            return process.exitcode

        return cls(process.pid, reader, reap, lambda: _end_of(output))

    def has_ended(self) -> bool:
        """True once the process itself has ended. It stays a zombie until `end`, so that its pid is not reused."""
        return os.waitid(os.P_PID, self.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is not None

    def read(self, *, timeout_s: float | None = None, signals: Sequence[int] = ()) -> Iterator[dict[str, Any]]:
        """
        The answers to one request, as they come. A child that dies, or is ended at its deadline, has a last answer
        {"what": "died", "how": ..., "output": ...}.

        Raises what the job raises, if that is one of our errors, and Stopped once there is a signal in `signals`.
        """
        deadline = None if timeout_s is None else time.monotonic() + timeout_s
        limit = ""
        while self._look():
            while self._lines:
                answer = _answer_in(self._lines.popleft())
                self._is_busy = answer.get("what") not in ("end", "error")
                if answer.get("what") == "end":
                    return
                if answer.get("what") == "error":
                    raise _error_in(answer)
                if answer:
                    yield answer
            if signals:
                raise Stopped(signals[0])
            if deadline is not None and time.monotonic() > deadline and not self.has_ended():
                limit = f"; its limit is {timeout_s:.0f} s"
                end_family(self.pid)
        yield {"what": "died", "how": self._how() + limit, "output": self._tail().decode(errors="replace")}

    def end(self) -> None:
        """End it with everything it has started."""
        if self.returncode is None:
            end_family(self.pid)
            self.returncode = self._reap()
            os.close(self._answers)

    def _look(self) -> bool:
        """Wait a moment for new lines. False once the child has ended and all its lines have been read."""
        ended = self.has_ended()
        # Its end does not end the pipe: processes that it has forked have the pipe, too.
        if not self._lines and select.select([self._answers], [], [], 0.0 if ended else _LOOK_S)[0]:
            text = os.read(self._answers, 1 << 16)
            *lines, self._rest = (self._rest + text).split(b"\n")
            self._lines += lines
            if text:
                return True
            time.sleep(0.0 if ended else _LOOK_S)
        return bool(self._lines) or not ended

    def _how(self) -> str:
        ended = os.waitid(os.P_PID, self.pid, os.WEXITED | os.WNOWAIT)
        assert ended is not None, "without WNOHANG it waits for the end"
        if ended.si_code == os.CLD_EXITED:
            return f"ended with status {ended.si_status}"
        with contextlib.suppress(ValueError):
            return f"was ended by {signal.Signals(ended.si_status).name}"
        return f"was ended by signal {ended.si_status}"


class StartedChild(Child):
    """A child in a fresh interpreter, in its own session: Ctrl-C reaches it only through us."""

    def __init__(
        self,
        *words: str,
        stderr: IO[bytes] | int,
        tail: Callable[[], bytes],
        environment: Mapping[str, str] | None = None,
    ) -> None:
        """Raises EnvironmentUnavailable if Python cannot be started, and Stopped for a signal in the meantime."""
        # A signal that raised in here would leave the child behind.
        with caught() as signals:
            reader, writer = os.pipe()
            try:
                process = subprocess.Popen(
                    [sys.executable, "-m", _MODULE, *words],
                    stdin=subprocess.PIPE,
                    stdout=writer,
                    stderr=stderr,
                    env=environment,
                    start_new_session=True,
                )
            except OSError as error:
                os.close(reader)
                raise EnvironmentUnavailable(f"{sys.executable} cannot be started: {error.strerror}") from error
            finally:
                os.close(writer)
        super().__init__(process.pid, reader, process.wait, tail)
        self._is_busy = False
        self._requests = process.stdin
        self.stderr = process.stderr
        if signals:
            self.end()
            raise Stopped(signals[0])

    def send(self, job: str, *, fork: bool = False, **arguments: Any) -> None:
        """
        Request a job, in a fork of the child if asked for. All answers of the job before must have been read.

        If the child has ended, `read` reports it.
        """
        assert self._requests is not None, "the child is started with a pipe"
        assert not self._is_busy, "the answers of the job before have not been read to their end"
        self._is_busy = True
        with contextlib.suppress(OSError):
            self._requests.write(json.dumps({"job": job, "fork": fork, "arguments": arguments}).encode() + b"\n")
            self._requests.flush()

    def end(self) -> None:
        super().end()
        if self._requests is not None:
            with contextlib.suppress(OSError):  # the last request may still be in the buffer
                self._requests.close()


@contextlib.contextmanager
def answers(
    job: str, *, fork: bool = False, timeout_s: float | None = None, signals: Sequence[int] = (), **arguments: Any
) -> Iterator[Iterator[dict[str, Any]]]:
    """
    The answers of a job in a separate child (see `Child.read`), which is a fork of this process if asked for.

    When the block is left, nothing of the child is left.
    """
    with tempfile.TemporaryFile() as output:
        child: Child
        if fork:
            child = Child.fork(job, arguments, output)
        else:
            child = started = StartedChild(stderr=output, tail=lambda: _end_of(output))
            started.send(job, **arguments)
        try:
            yield child.read(timeout_s=timeout_s, signals=signals)
        finally:
            child.end()


def serve(words: Sequence[str]) -> int:
    """In the child: run the jobs that are requested. Returns the exit status."""
    # What engines read or print must not be taken for requests and answers.
    requests, writer = os.fdopen(os.dup(0), encoding="utf-8"), os.dup(1)
    with open(os.devnull, "rb") as nothing:
        os.dup2(nothing.fileno(), 0)
    os.dup2(2, 1)
    if WARM in words:
        from fsdp_conformance.harness.processes.forkserver import import_and_fork
        from fsdp_conformance.harness.processes.priority import keep_priority

        keep_priority()
        import_and_fork()
    threading.Thread(target=_end_with_parent, args=(requests.fileno(),), name="parent.watch", daemon=True).start()
    for line in requests:
        request = json.loads(line)
        _follow(request["job"], request["arguments"], writer, fork=request["fork"])
    return 0


def _end_with_parent(requests: int) -> None:
    """
    In the child: end it with everything it has started once its parent is gone, in the middle of a job as well.

    A parent that can still act ends its children itself (`Child.end`). One that was killed cannot, and a job may take
    hours. The parent alone has the other end of the pipe of requests, so its death closes it.
    """
    poll = select.poll()
    poll.register(requests, 0)  # nothing but the end
    poll.poll()
    end_family(os.getpid())


def run_job(job: str, answer: Answer, arguments: Mapping[str, Any]) -> None:
    """Run a job in this process."""
    importlib.import_module(f"{_MODULE}.{job}").run(answer, **arguments)


def _follow(job: str, arguments: Mapping[str, Any], writer: int, *, fork: bool) -> None:
    """Run a job, and write its answers and how it ended."""

    def answer(what: str, **content: Any) -> None:
        line = json.dumps({"what": what, **content}).encode() + b"\n"
        while line:
            line = line[os.write(writer, line) :]

    try:
        if fork:
            with answers(job, fork=True, **arguments) as relayed:
                for each in relayed:
                    answer(**each)
        else:
            run_job(job, answer, arguments)
    except ConformanceError as error:
        problems, where = getattr(error, "problems", ()), getattr(error, "where", "")
        kind, status = type(error).__name__, int(error.exit_status)
        answer("error", kind=kind, message=str(error), problems=problems, where=where, status=status)
    else:
        answer("end")


def _in_fork(job: str, arguments: Mapping[str, Any], writer: int, output: IO[bytes]) -> None:
    for stream in (1, 2):
        os.dup2(output.fileno(), stream)
    _follow(job, arguments, writer, fork=False)


def _answer_in(line: bytes) -> dict[str, Any]:
    """The answer in a line; nothing for what was printed before the child took its stdout for answers alone."""
    try:
        answer = json.loads(line)
    except ValueError:
        return {}
    return answer if isinstance(answer, dict) else {}


def _error_in(answer: Mapping[str, Any]) -> ConformanceError:
    """The error that a job raised."""
    name, message = answer["kind"], answer["message"]
    if name == AdapterError.__name__:
        return AdapterError(answer["problems"])
    if answer["where"]:
        return ConfigError(answer["problems"], where=answer["where"])
    error = _PLAIN_ERRORS.get(name, ConformanceError)(message)
    error.exit_status = Status(answer["status"])
    return error


def _end_of(output: IO[bytes]) -> bytes:
    size = output.seek(0, os.SEEK_END)
    return os.pread(output.fileno(), _QUOTED, max(0, size - _QUOTED))


def end_family(leader: int) -> None:
    """
    Kill the process, its descendants, and every process in the session that it leads, and wait until they have ended.

    The leader must not have been reaped, so that its number still belongs to it. If it is this process, it is killed
    last, and its parent reaps it. Ranks have their own sessions, and can be recognised as descendants only while their
    parents live: so all processes are stopped before any is killed, and none can start another meanwhile.
    """
    stopped: set[int] = set()
    while fresh := family(leader) - stopped - {os.getpid()}:
        for pid in fresh:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGSTOP)
        stopped |= fresh
    for pid in stopped:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
    with contextlib.suppress(ProcessLookupError):
        os.killpg(leader, signal.SIGKILL)  # of a process that was started too late to be stopped; of this one as well
    # The kernel takes a while to give back the memory of a process that has imported torch.
    deadline = time.monotonic() + _DEATH_S
    while any(map(_is_alive, stopped)) and time.monotonic() < deadline:
        time.sleep(_DEATH_LOOK_S)


def family(leader: int) -> set[int]:
    """The leader, its descendants and its session, as far as they are alive."""
    # Imported here: no child has to wait for it before it starts.
    import psutil

    parents: dict[int, int] = {}
    members: set[int] = set()
    for process in psutil.process_iter(["ppid", "status"]):
        if process.info["status"] == psutil.STATUS_ZOMBIE:
            continue
        parents[process.pid] = process.info["ppid"]
        with contextlib.suppress(ProcessLookupError):
            if leader in (process.pid, os.getsid(process.pid)):
                members.add(process.pid)
    while children := {pid for pid, parent in parents.items() if parent in members} - members:
        members |= children
    return members


def _is_alive(pid: int) -> bool:
    import psutil

    try:
        return bool(psutil.Process(pid).status() != psutil.STATUS_ZOMBIE)
    except psutil.NoSuchProcess:
        return False
