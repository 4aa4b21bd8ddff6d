"""
The pytest process that runs the cases: how it is started, watched, interrupted, and ended with everything it started.

It is started before it is known what it will run, because it has torch to import (`warm`), and because the survey of
the implementation is a fork of it. It leads its own session, so Ctrl-C reaches it only through us. Its output comes
through a pipe and we write the log, so that a full disk cannot swallow pytest's last words. If we die, it does not
outlive us for long, because the pipe breaks.
"""

from __future__ import annotations

import contextlib
import importlib.util
import json
import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections import deque
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import IO, Any, NamedTuple

from fsdp_conformance.cli.processes import end_family
from fsdp_conformance.cli.signals import Stopped
from fsdp_conformance.cli.survey import TIMEOUT_S, Inquiry, Survey
from fsdp_conformance.errors import EnvironmentUnavailable, UsageError
from fsdp_conformance.pytest_plugin.options import ERROR_FILE, ORDER_OPTION, SUITES
from fsdp_conformance.run_settings import RunOrder

#: How long pytest has to end its cases and to write the last line of the run file after an interrupt.
INTERRUPT_S = 20.0

#: Seconds between two looks for the answer of a survey.
_LOOK_S = 0.02

#: How long the log's reader waits for the end of the pipe when every writer has been killed.
_DRAIN_S = 5.0

_PLUGIN = "fsdp_conformance.pytest_plugin"

#: Of the user's environment: what would change our pytest.
_FOREIGN = ("PYTEST_ADDOPTS", "PYTEST_PLUGINS", "PYTEST_DEBUG")


class ReportedError(NamedTuple):
    """An error of the run as a whole, as the plugin has left it."""

    status: int
    message: str


class PytestProcess:
    """One run of the suites: `survey`, then `begin`. Use as a context manager: on leaving, nothing of it is left."""

    def __init__(self) -> None:
        self._directory = tempfile.TemporaryDirectory(prefix="fsdp-conformance-", ignore_cleanup_errors=True)
        self._error_file = Path(self._directory.name) / "error.json"
        self.log: Path | None = None
        """Where pytest's output goes; None before `begin`."""
        self._log_file: IO[bytes] | None = None
        self._early: list[bytes] = []
        """Output from before there was a log."""
        self._lock = threading.Lock()
        self._tail: deque[bytes] = deque(maxlen=400)
        self._deadline: float | None = None
        self.error: ReportedError | None = None
        """Why the run could not go on, if the plugin knew."""
        self.returncode: int | None = None
        self.log_problem = ""
        """Why the log is not whole; empty if it is."""

    def __enter__(self) -> PytestProcess:
        try:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "fsdp_conformance.cli.warm"],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                env={**environment(os.environ), ERROR_FILE: str(self._error_file)},
                start_new_session=True,
            )
        except OSError as error:
            self._directory.cleanup()
            raise EnvironmentUnavailable(f"{sys.executable} cannot be started: {error.strerror}") from error
        self._reader = threading.Thread(target=self._drain, name="pytest.log", daemon=True)
        self._reader.start()
        return self

    def __exit__(self, *exc: object) -> None:
        self._end()

    def survey(
        self, device: str, implementation: str, signals: Sequence[int] = (), *, timeout_s: float = TIMEOUT_S
    ) -> Survey:
        """As `survey.survey`, which also says what it raises, and Stopped as soon as there is a signal in `signals`."""
        with Inquiry(device, implementation, timeout_s=timeout_s) as inquiry:
            status = self._ask({"survey": inquiry.words(), "output": str(inquiry.output)}, signals, timeout_s)
            said = inquiry.output.read_bytes() if inquiry.output.exists() else b""
            if self.returncode is not None:
                said = b"".join(self._tail) + said
            return inquiry.answer(status, said)

    def smoke(
        self, device: str, implementation: str, signals: Sequence[int] = (), *, timeout_s: float = TIMEOUT_S
    ) -> dict[str, Any]:
        """
        The results of `driver.smoke` as JSON under "results", or under "problem" why there are none.

        Raises Stopped as soon as there is a signal in `signals`.
        """
        told: dict[str, Any] | None = self._ask({"smoke": implementation, "device": device}, signals, timeout_s)
        return (
            told if isinstance(told, dict) else {"problem": f"the process that runs them ended early:\n{self.tail()}"}
        )

    def _ask(self, question: Mapping[str, Any], signals: Sequence[int], timeout_s: float) -> Any:
        """The answer to an order. Without one at the deadline the process is ended: None, or the status if it died."""
        answer = Path(self._directory.name) / "answer"
        deadline = time.monotonic() + timeout_s
        self._order({**question, "answer": str(answer)})
        while not answer.exists():
            if signals:
                raise Stopped(signals[0])
            if not self.running():
                return self.returncode
            if time.monotonic() > deadline:
                self._end()
                return None
            time.sleep(_LOOK_S)
        found = json.loads(answer.read_text(encoding="utf-8"))
        answer.unlink()
        return found

    def begin(self, words: Sequence[str], *, log: Path, order: RunOrder | None = None) -> None:
        """Run pytest with these arguments; its root is a temporary directory. `order` is for our plugin."""
        words = [*rooted(Path(self._directory.name)), *words]
        if order is not None:
            file = Path(self._directory.name) / "order.json"
            file.write_text(order.to_json(), encoding="utf-8")
            words += [ORDER_OPTION, str(file)]
        with self._lock:
            self.log = log
            try:
                self._log_file = log.open("wb", buffering=0)
            except OSError as error:
                self.log_problem = str(error)
            for line in self._early:
                self._write(line)
            self._early.clear()
        self._order({"pytest": words})

    def _order(self, order: Mapping[str, Any]) -> None:
        pipe = self._process.stdin
        assert pipe is not None, "the process is started with a pipe"
        with contextlib.suppress(OSError):  # if it has ended, its status tells
            pipe.write(json.dumps(order).encode() + b"\n")
            pipe.flush()

    @property
    def pid(self) -> int:
        """Of pytest, and of its session."""
        return self._process.pid

    def running(self) -> bool:
        """Whether pytest has not ended yet; after the deadline of an interrupt it is killed."""
        if self.returncode is not None:
            return False
        # WNOWAIT leaves a zombie, so that the id stays pytest's until all that it has started has been ended.
        alive = os.waitid(os.P_PID, self.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is None
        if alive and (self._deadline is None or time.monotonic() < self._deadline):
            return True
        self._end()
        return False

    def interrupt(self) -> None:
        """Ask pytest, once, to end: it has INTERRUPT_S. A second call ends it at once."""
        if self.returncode is not None:
            return
        if self._deadline is None:
            self._deadline = time.monotonic() + INTERRUPT_S
            os.kill(self.pid, signal.SIGINT)
        else:
            self._end()

    def tail(self, lines: int = 30) -> str:
        """The last lines that pytest wrote."""
        text = b"".join(self._tail).decode(errors="replace")
        return "\n".join(text.rstrip().splitlines()[-lines:])

    def _end(self) -> None:
        """End whoever is left; after that pytest's id is given back."""
        if self.returncode is not None:
            return
        end_family(self.pid)
        self.returncode = self._process.wait()
        self._reader.join(_DRAIN_S)
        if self._process.stdin is not None:
            with contextlib.suppress(OSError):  # what it was told last may still be in the buffer
                self._process.stdin.close()
        if self._log_file is not None:
            self._log_file.close()
        with contextlib.suppress(OSError, ValueError):
            self.error = ReportedError(**json.loads(self._error_file.read_text(encoding="utf-8")))
        self._directory.cleanup()

    def _drain(self) -> None:
        pipe = self._process.stdout
        assert pipe is not None, "the process is started with a pipe"
        with pipe:
            for line in pipe:
                self._tail.append(line)
                with self._lock:
                    if self.log is None:
                        self._early.append(line)
                    else:
                        self._write(line)

    def _write(self, line: bytes) -> None:
        if self._log_file is not None and not self.log_problem:
            try:
                self._log_file.write(line)
            except OSError as error:
                self.log_problem = f"{self.log} cannot be written: {error.strerror}"


def rooted(directory: Path) -> list[str]:
    """Words that make `directory` pytest's root, so that a stray pytest.ini cannot change a verdict."""
    ini = directory / "pytest.ini"
    ini.write_text("[pytest]\n", encoding="utf-8")
    return ["-c", str(ini), "--rootdir", str(directory), "-p", "no:cacheprovider"]


def command(*, report: Path, workers: str | None = None, suites: str | None = None) -> list[str]:
    """
    The arguments of a pytest that runs the cases; what it is asked for is in the order.

    `environment` keeps pytest from loading our plugin by its entry point, so that naming it here loads it exactly once,
    whether the package is installed or merely on the path.
    """
    package = suites or SUITES
    # A conftest.py above the cases is not ours.
    words = [str(_directory_of(package)), "--confcutdir", str(_directory_of(package)), "--conformance-suites", package]
    words += ["-p", _PLUGIN, "-q", "--tb=short", "--color=no"]
    words += ["-p", "xdist", "-n", workers] if workers not in (None, "0") else []
    return [*words, "--junit-xml", str(report / "junit.xml"), "-o", "junit_family=xunit2"]


def _directory_of(package: str) -> Path:
    """Where the cases are. Raises UsageError if the package does not exist."""
    try:
        spec = importlib.util.find_spec(package)
    except ModuleNotFoundError:
        spec = None
    if spec is None or not spec.submodule_search_locations:
        raise UsageError(f"suites must be a package that can be imported, got {package!r}")
    return Path(next(iter(spec.submodule_search_locations))).resolve()


def environment(variables: Mapping[str, str]) -> dict[str, str]:
    """
    The variables of pytest: the user's, without what would change pytest itself. Plugins are only those that we name.
    """
    kept = {name: value for name, value in variables.items() if name not in _FOREIGN}
    return {**kept, "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1", "PYTHONUNBUFFERED": "1"}
