"""
Commands in fresh processes that need not import torch: forks of a server that has imported it, one server per worker.

`run` is `subprocess.run` for `python -m MODULE`. The process has its own id, environment, directory and output, and
none of this project's modules. Importing torch, pytest and their like takes a command six seconds of CPU time, which
is more than most commands then need. Children that the command itself starts through `cli.child` are forks, too.

Tests of what a start imports, of interpreters' options and of installed scripts use `subprocess`. As a script, this
file is the server; it imports nothing of the package, so that every fork imports that by itself.
"""

from __future__ import annotations

import atexit
import contextlib
import functools
import gc
import importlib
import json
import os
import random
import runpy
import select
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import traceback
import types
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import IO, Any, NoReturn

#: Imported by the server. All are from elsewhere.
_PRELOADED = (
    "hypothesis",
    "jinja2",
    "msgspec",
    "parameterized",
    "psutil",
    "pytest",
    "rich.console",
    "tomlkit",
    "torch._dynamo",
    "torch._inductor.config",
    "torch.distributed.checkpoint.state_dict",
    "torch.distributed.fsdp",
    "torch.distributed.tensor",
    "torch.nn.parallel",
    "torch.testing._internal.common_distributed",
    "torch.testing._internal.common_fsdp",
    "torch.testing._internal.distributed.fake_pg",
)

#: Seconds until a process has started, the server's own imports included.
_START_S = 120.0

#: The most bytes of a request: an environment and a command line.
_REQUEST_BYTES = 1 << 20


def run(
    words: Sequence[str | os.PathLike[str]],
    *,
    cwd: str | os.PathLike[str] | None = None,
    env: Mapping[str, str] | None = None,
    timeout: float,
    merged: bool = False,
) -> subprocess.CompletedProcess[str]:
    """
    Run `[sys.executable, "-m", MODULE, ...]` to its end, with its output as text and nothing to read.

    With `merged`, its stderr is in `stdout`, as with `stderr=subprocess.STDOUT`. Raises subprocess.TimeoutExpired,
    after ending it with everything that it has started.
    """
    with tempfile.TemporaryFile() as out, tempfile.TemporaryFile() as err, open(os.devnull, "rb") as nothing:
        fds = [file.fileno() for file in (nothing, out, out if merged else err)]
        process = Process(words, fds, cwd=cwd, env=env)
        try:
            status = process.wait(timeout)
        except subprocess.TimeoutExpired:
            process.kill()
            raise
        texts = [_text(file) for file in (out, err)]
    return subprocess.CompletedProcess(words, status, *texts)


def _text(file: IO[bytes]) -> str:
    file.seek(0)
    return file.read().decode("utf-8", errors="replace")


class Process:
    """A process that runs `[sys.executable, "-m", MODULE, ...]` with these descriptors as its standard streams."""

    def __init__(
        self,
        words: Sequence[str | os.PathLike[str]],
        fds: Sequence[int],
        *,
        cwd: str | os.PathLike[str] | None = None,
        env: Mapping[str, str] | None = None,
        leads_session: bool = False,
    ) -> None:
        line = [os.fspath(word) for word in words]
        assert line[:2] == [sys.executable, "-m"], f"words must start with {sys.executable} -m, got {line}"
        self._line = line
        order = {
            "line": line,
            "cwd": os.fspath(cwd or Path.cwd()),
            "env": dict(os.environ if env is None else env),
            "leads_session": leads_session,
        }
        request = json.dumps(order).encode()
        assert len(request) < _REQUEST_BYTES, "the environment is too large"
        self._answers, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with theirs:
            socket.send_fds(_server().requests, [request], [*fds, theirs.fileno()])
        self.returncode: int | None = None
        self.pid = self._answer(_START_S)

    def wait(self, timeout: float | None = None) -> int:
        """As of Popen. Raises subprocess.TimeoutExpired."""
        if self.returncode is None:
            self.returncode = self._answer(timeout)
            self._answers.close()
        return self.returncode

    def poll(self) -> int | None:
        """As of Popen."""
        with contextlib.suppress(subprocess.TimeoutExpired):
            return self.wait(0.0)
        return None

    def kill(self) -> None:
        """End it with everything that it has started."""
        _end_family(self.pid)
        self.wait(_START_S)

    def _answer(self, timeout_s: float | None) -> int:
        if not select.select([self._answers], [], [], timeout_s)[0]:
            raise subprocess.TimeoutExpired(self._line, timeout_s or 0.0)
        answer = self._answers.recv(64)
        if not answer:
            raise RuntimeError("the server of warm interpreters has ended")
        return int(answer)


class Popen(Process):
    """The part of subprocess.Popen that `explore.pool` needs."""

    def __init__(
        self, words: Sequence[str], *, stdin: int, stdout: int, stderr: IO[bytes], start_new_session: bool
    ) -> None:
        assert stdin == stdout == subprocess.PIPE, "the only kind that is needed"
        requests, ours = os.pipe()
        answers, theirs = os.pipe()
        super().__init__(words, [requests, theirs, stderr.fileno()], leads_session=start_new_session)
        os.close(requests)
        os.close(theirs)
        self.stdin = open(ours, "wb")  # noqa: SIM115 - closed by the caller, as this one's
        self.stdout = open(answers, "rb")  # noqa: SIM115


class _Server:
    """The client's side of a server, which ends with this process."""

    def __init__(self) -> None:
        from fsdp_conformance.harness.processes.forkserver import SERVER_ENVIRONMENT

        self.requests, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with theirs:
            self._process = subprocess.Popen(
                [sys.executable, __file__, str(theirs.fileno())],
                # What torch reads when it is imported: commands fork the servers of their ranks from themselves.
                env={**os.environ, **SERVER_ENVIRONMENT},
                pass_fds=(theirs.fileno(),),
                stdin=subprocess.DEVNULL,
                start_new_session=True,  # Ctrl-C is for us: the server ends when we do
            )

    def close(self) -> None:
        """End the server, with all that still runs."""
        self.requests.close()
        self._process.wait()


@functools.cache
def _server() -> _Server:
    server = _Server()
    atexit.register(server.close)
    return server


def _end_family(pid: int) -> None:
    import psutil

    try:
        process = psutil.Process(pid)
        family = [process, *process.children(recursive=True)]
    except psutil.NoSuchProcess:
        return
    for member in family:
        try:
            member.kill()
        except psutil.NoSuchProcess:
            continue


# --- the server -------------------------------------------------------------------------------------------------------


def _serve(requests: socket.socket) -> None:
    for name in _PRELOADED:
        importlib.import_module(name)
    gc.collect()
    gc.freeze()  # forks leave the pages of these objects alone
    running: dict[int, tuple[int, socket.socket]] = {}
    while True:
        ready, _, _ = select.select([requests.fileno(), *running], [], [])
        for descriptor in running.keys() & ready:
            pid, answers = running.pop(descriptor)
            os.close(descriptor)
            with answers:
                _send(answers, os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]))
        if requests.fileno() in ready:
            request, fds, _, _ = socket.recv_fds(requests, _REQUEST_BYTES, 4)
            if not request:
                break
            pid = os.fork()
            if pid == 0:
                requests.close()
                order = json.loads(request)
                if order["leads_session"]:
                    os.setsid()
                _become(order["line"], order["cwd"], order["env"], fds[:3])
            answers = socket.socket(fileno=fds[3])
            for fd in fds[:3]:
                os.close(fd)
            _send(answers, pid)
            running[os.pidfd_open(pid)] = (pid, answers)
    for pid, _ in running.values():
        _end_family(pid)


def _send(answers: socket.socket, number: int) -> None:
    try:
        answers.send(str(number).encode())
    except OSError:
        return  # the client waits no longer


def _become(line: Sequence[str], cwd: str | None, env: Mapping[str, str], fds: Sequence[int]) -> NoReturn:
    """In a fork: be the process of this command line."""
    for target, fd in enumerate(fds):
        os.dup2(fd, target)
    os.closerange(3, max(map(int, os.listdir("/proc/self/fd"))) + 1)
    os.environ.clear()
    os.environ.update(env)
    tempfile.tempdir = None  # the server's; $TMPDIR may be another one
    if cwd is not None:
        os.chdir(cwd)
    sys.stdin = open(0, encoding="utf-8", closefd=False)  # noqa: SIM115 - as long as the process
    sys.stdout = open(1, "w", encoding="utf-8", closefd=False)  # noqa: SIM115
    sys.stderr = open(2, "w", encoding="utf-8", errors="backslashreplace", buffering=1, closefd=False)  # noqa: SIM115
    sys.__stdin__, sys.__stdout__, sys.__stderr__ = sys.stdin, sys.stdout, sys.stderr  # type: ignore[misc]
    module, arguments = line[2], list(line[3:])
    sys.argv, sys.orig_argv = [module, *arguments], list(line)
    added = [path for path in env.get("PYTHONPATH", "").split(os.pathsep) if path]
    sys.path[:] = [os.getcwd(), *added, *(path for path in sys.path if path not in ("", *added))]
    random.seed()
    code = 0
    try:
        for path in added:
            if (site := Path(path, "sitecustomize.py")).exists():
                runpy.run_path(str(site))
        _adapt(module)
        runpy.run_module(module, run_name="__main__", alter_sys=True)
    except SystemExit as ended:
        code = ended.code if isinstance(ended.code, int) else int(ended.code is not None)
        if isinstance(ended.code, str):
            print(ended.code, file=sys.stderr)
    except KeyboardInterrupt:
        traceback.print_exc()
        code = -signal.SIGINT
    except BaseException:  # noqa: BLE001 - as an interpreter does
        traceback.print_exc()
        code = 1
    threading._shutdown()  # type: ignore[attr-defined]
    atexit._run_exitfuncs()
    for stream in (sys.stdout, sys.stderr):
        try:
            stream.flush()
        except (OSError, ValueError):
            code = code or 120
    if code < 0:
        signal.signal(-code, signal.SIG_DFL)
        os.kill(os.getpid(), -code)
    os._exit(code & 0xFF)


def _adapt(module: str) -> None:
    """
    Let pytest take libraries that are imported already, and a command fork its children, and from itself the server of
    its ranks: this process has imported torch, but done nothing with it.
    """
    from _pytest.assertion.rewrite import AssertionRewritingHook

    AssertionRewritingHook._warn_already_imported = lambda self, name: None  # type: ignore[method-assign]
    if module.partition(".")[0] != "fsdp_conformance":
        return
    from fsdp_conformance.cli import child
    from fsdp_conformance.harness.processes import forkserver

    vars(forkserver)["may_have_used_torch"] = lambda: False
    vars(child)["subprocess"] = types.SimpleNamespace(Popen=_Fork, PIPE=subprocess.PIPE)


class _Fork:
    """The part of subprocess.Popen that `cli.child` needs, as a fork of this process."""

    def __init__(
        self,
        line: Sequence[str],
        *,
        stdin: int,
        stdout: int,
        stderr: IO[bytes] | int,
        env: Mapping[str, str] | None,
        start_new_session: bool,
    ) -> None:
        assert (stdin, start_new_session) == (subprocess.PIPE, True), "as cli.child calls it"
        theirs, ours = os.pipe()
        pipe = os.pipe() if stderr == subprocess.PIPE else ()
        errors = pipe[1] if pipe else stderr if isinstance(stderr, int) else stderr.fileno()
        sys.stdout.flush()
        sys.stderr.flush()
        self.pid = os.fork()
        if self.pid == 0:
            os.setsid()
            for name in [name for name in sys.modules if name.partition(".")[0] == "fsdp_conformance"]:
                del sys.modules[name]
            atexit._clear()
            _become(line, None, dict(os.environ if env is None else env), [theirs, stdout, errors])
        os.close(theirs)
        self.stdin: Any = open(ours, "wb")  # noqa: SIM115 - closed by the child's owner
        self.stderr: Any = None
        if pipe:
            os.close(pipe[1])
            self.stderr = open(pipe[0], "rb")  # noqa: SIM115
        self.returncode: int | None = None

    def wait(self) -> int:
        """As of Popen."""
        if self.returncode is None:
            self.returncode = os.waitstatus_to_exitcode(os.waitpid(self.pid, 0)[1])
        return self.returncode


if __name__ == "__main__":
    sys.path[:] = [path for path in sys.path if path != str(Path(__file__).parent)]
    _serve(socket.socket(fileno=int(sys.argv[1])))
