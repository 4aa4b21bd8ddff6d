"""
The pytest process that runs the cases: how it is started, watched, interrupted, and ended with everything it started.

It is a child that imports torch once for three: for pytest, for the survey of the implementation, which is a fork of
it, and for the server from which the ranks are forked. So it is started first of all, while the command line reads the
profile. Its output comes through a pipe and we write the log, so that a full disk cannot swallow pytest's last words.
If we die, it does not outlive us for long, because the pipe breaks.
"""

from __future__ import annotations

import contextlib
import importlib.util
import json
import os
import signal
import subprocess
import tempfile
import threading
import time
from collections import deque
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import IO, Any, NamedTuple

from fsdp_conformance.cli.child import WARM, StartedChild
from fsdp_conformance.cli.own_workload import TIMEOUT_S as WORKLOAD_TIMEOUT_S
from fsdp_conformance.cli.own_workload import settings_from
from fsdp_conformance.cli.survey import TIMEOUT_S, Survey, survey_from
from fsdp_conformance.errors import ConformanceError, UsageError
from fsdp_conformance.pytest_plugin.options import ERROR_FILE, ORDER_OPTION, SUITES
from fsdp_conformance.run_settings import RunOrder, RunSettings

#: The time pytest has to end its cases and to write the last line of the run file after an interrupt.
INTERRUPT_S = 20.0

#: How long the log's reader waits for the end of the pipe when every writer has been killed, and when only pytest has
#: ended: processes that it forked still have the pipe.
_DRAIN_S = 5.0
_LAST_WORDS_S = 0.5

_PLUGIN = "fsdp_conformance.pytest_plugin"

#: Variables of the user's environment that would change our pytest.
_FOREIGN = ("PYTEST_ADDOPTS", "PYTEST_PLUGINS", "PYTEST_DEBUG")


class ReportedError(NamedTuple):
    """An error of the run as a whole, as the plugin reported it."""

    status: int
    message: str


class PytestProcess:
    """One run of the suites: `survey`, then `begin`. Use as a context manager: on leaving, nothing of it is left."""

    def __init__(self) -> None:
        self._directory = tempfile.TemporaryDirectory(prefix="fsdp-conformance-", ignore_cleanup_errors=True)
        self._error_file = Path(self._directory.name) / "error.json"
        self.log: Path | None = None
        """The file with pytest's output; None before `begin`."""
        self._log_file: IO[bytes] | None = None
        self._early: list[bytes] = []
        """Output from before there was a log."""
        self._lock = threading.Lock()
        self._tail: deque[bytes] = deque(maxlen=400)
        self._deadline: float | None = None
        self.error: ReportedError | None = None
        """The reason why the run could not go on, if the plugin reported it."""
        self.log_problem = ""
        """The reason why the log is incomplete; empty if it is not."""

    def __enter__(self) -> PytestProcess:
        variables = {**environment(os.environ), ERROR_FILE: str(self._error_file)}
        try:
            self._child = StartedChild(WARM, stderr=subprocess.PIPE, tail=self._last_words, environment=variables)
        except BaseException:
            self._directory.cleanup()
            raise
        self._reader = threading.Thread(target=self._drain, name="pytest.log", daemon=True)
        self._reader.start()
        return self

    def __exit__(self, *exc: object) -> None:
        self._end()

    @property
    def returncode(self) -> int | None:
        """The exit status of pytest; None while it runs."""
        return self._child.returncode

    def survey(
        self, device: str, implementation: str, signals: Sequence[int] = (), *, timeout_s: float = TIMEOUT_S
    ) -> Survey:
        """Like `survey.survey`; also raises Stopped once `signals` is not empty."""
        self._child.send("survey", fork=True, device=device, implementation=implementation)
        return survey_from(self._child.read(timeout_s=timeout_s, signals=signals), implementation)

    def with_workload(self, settings: RunSettings, signals: Sequence[int] = ()) -> RunSettings:
        """Like `own_workload.with_workload`; also raises Stopped once `signals` is not empty."""
        if not settings.workload:
            return settings
        self._child.send("workload", fork=True, spec=settings.workload)
        return settings_from(self._child.read(timeout_s=WORKLOAD_TIMEOUT_S, signals=signals), settings)

    def smoke(
        self, device: str, implementation: str, signals: Sequence[int] = (), *, timeout_s: float = TIMEOUT_S
    ) -> dict[str, Any]:
        """
        The results of `driver.smoke` as JSON under "results", or under "problem" why there are none.

        Raises Stopped once `signals` is not empty.
        """
        self._child.send("smoke", device=device, implementation=implementation)
        try:
            results = list(self._child.read(timeout_s=timeout_s, signals=signals))
        except ConformanceError as error:
            return {"problem": str(error)}
        if results and results[-1]["what"] == "died":
            return {"problem": f"the process that runs them {results[-1]['how']}:\n{results[-1]['output']}"}
        return {"results": results}

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
                self._log_file = log.open("wb" if order is None or order.judged is None else "ab", buffering=0)
            except OSError as error:
                self.log_problem = str(error)
            for line in self._early:
                self._write(line)
            self._early.clear()
        self._child.send("cases", words=words)

    @property
    def pid(self) -> int:
        """Of pytest, and of its session."""
        return self._child.pid

    def running(self) -> bool:
        """True until pytest has ended; after the deadline of an interrupt it is killed."""
        if self.returncode is not None:
            return False
        if not self._child.has_ended() and (self._deadline is None or time.monotonic() < self._deadline):
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

    def _last_words(self) -> bytes:
        self._reader.join(_LAST_WORDS_S)
        return self.tail().encode()

    def _end(self) -> None:
        """End the process and everything it has started; after that its pid is given back."""
        if self.returncode is not None:
            return
        self._child.end()
        self._reader.join(_DRAIN_S)
        if self._log_file is not None:
            self._log_file.close()
        with contextlib.suppress(OSError, ValueError):
            self.error = ReportedError(**json.loads(self._error_file.read_text(encoding="utf-8")))
        self._directory.cleanup()

    def _drain(self) -> None:
        pipe = self._child.stderr
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


def command(*, workers: str | None = None, suites: str | None = None) -> list[str]:
    """
    The arguments of a pytest that runs the cases; what it is asked for is in the order.

    `environment` keeps pytest from loading our plugin by its entry point, so that naming it here loads it exactly once,
    whether the package is installed or merely on the path.
    """
    package = suites or SUITES
    # A conftest.py above the cases is not ours.
    words = [str(_directory_of(package)), "--confcutdir", str(_directory_of(package)), "--conformance-suites", package]
    words += ["-p", _PLUGIN, "-q", "--tb=short", "--color=no"]
    return [*words, *(["-p", "xdist", "-n", workers] if workers not in (None, "0") else [])]


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
    allowed = {name: value for name, value in variables.items() if name not in _FOREIGN}
    return {**allowed, "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1", "PYTHONUNBUFFERED": "1"}
