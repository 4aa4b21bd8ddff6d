"""
Starts commands and leaves nothing behind: what ci/test, ci/certify, ci/nightly, ci/versions and others have in common.

Scripts under ci/ start with any Python 3.11 and the standard library alone. `enter` makes the project's environment and
continues the script there.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import IO, NoReturn

try:
    import psutil
except ImportError:  # ci/setup has not made the environment yet
    psutil = None

if sys.version_info < (3, 11):  # noqa: UP036 - the first thing that an older one gets to see
    print(f"python3 must be 3.11 or newer, got {sys.version}. Start the script with another one.", file=sys.stderr)
    sys.exit(3)

ROOT = Path(__file__).resolve().parent.parent

#: Exit status of a command that this machine cannot run, as in automake.
NOT_RUN = 77

#: Tells the script that it runs in the environment now: its start on the monotonic clock, and the environment.
_ENTERED = "FSDP_CONFORMANCE_ENTERED"

#: Overrides the grace period, for tests.
_GRACE = "FSDP_CONFORMANCE_GRACE_S"

#: Seconds between two looks at processes, while they run and while they end.
_LOOK_S = 0.1

#: Signals that have asked this process to end, in order.
_signals: list[int] = []

Command = Sequence[str | os.PathLike[str]]


class Interrupted(SystemExit):
    """A signal asked us to end, and everything that was started has ended. The exit status is 128 + its number."""


class Parser(argparse.ArgumentParser):
    """A parser whose help is the script's docstring, and whose errors are one line."""

    def __init__(self, description: str | None) -> None:
        super().__init__(description=description, allow_abbrev=False)

    def format_help(self) -> str:
        return (self.description or "").strip() + "\n"

    def error(self, message: str) -> NoReturn:
        self.exit(2, f"{self.prog}: {message}\n")


def enter(*name: str) -> Path:
    """
    Continue this script in the environment that `ci/setup [NAME]` makes or updates. Returns its directory.

    The script starts again from the top, so call this before anything that must not happen twice. Ends the process with
    the status of ci/setup if that fails.
    """
    if _ENTERED not in os.environ:
        catch_signals()
        status, output = capture([ROOT / "ci/setup", *name])
        if status:
            sys.exit(status)
        environment = output.strip()
        python = f"{environment}/bin/python"
        os.execve(python, [python, *sys.argv], {**os.environ, _ENTERED: f"{_started}:{environment}"})  # noqa: S606
    return Path(os.environ.pop(_ENTERED).partition(":")[2])


def enter_unless_inside() -> None:
    """As `enter`, unless an environment of the checkout runs the script already: it may have another torch."""
    if not Path(sys.prefix).is_relative_to(ROOT):
        enter()


#: When the script was started, on the monotonic clock; before ci/setup, which the first process ran.
_started = float(os.environ.get(_ENTERED, "").partition(":")[0] or time.monotonic())


def elapsed_s() -> int:
    """Seconds since the script was started, ci/setup included."""
    return round(time.monotonic() - _started)


def catch_signals() -> None:
    """
    From now on SIGHUP, SIGINT and SIGTERM end what `run` has started, and raise Interrupted there.

    Those that are ignored stay ignored, such as SIGHUP under nohup.
    """
    for number in (signal.SIGHUP, signal.SIGINT, signal.SIGTERM):
        if signal.getsignal(number) is not signal.SIG_IGN:
            signal.signal(number, lambda number, _: _signals.append(number))


def interrupted_status() -> int:
    """128 + the number of the first signal that has asked this process to end; 0 if there was none."""
    return 128 + _signals[0] if _signals else 0


def start(
    command: Command,
    *,
    output: IO[bytes] | int | None = None,
    errors: IO[bytes] | int | None = None,
    cwd: Path | None = None,
    variables: Mapping[str, str] | None = None,
) -> subprocess.Popen[bytes]:
    """
    Start a command in its own process group, so that only we receive Ctrl-C.

    `variables` are added to the environment variables. Pass the process to `end`, unless it has been waited for.
    """
    sys.stdout.flush()
    return subprocess.Popen(
        command,
        stdin=subprocess.DEVNULL,
        stdout=output,
        stderr=errors,
        cwd=cwd,
        env={**os.environ, **(variables or {})},
        process_group=0,
    )


def run(
    command: Command,
    *,
    output: IO[bytes] | int | None = None,
    errors: IO[bytes] | int | None = None,
    cwd: Path | None = None,
    variables: Mapping[str, str] | None = None,
    grace_s: float = 40.0,
) -> int:
    """
    Run a command to its end. Returns its exit status, or 128 + n if signal n ended it.

    Raises Interrupted after `catch_signals` and a signal, when the command and everything that it started has ended.
    """
    if not _signals:
        process = start(command, output=output, errors=errors, cwd=cwd, variables=variables)
        while process.returncode is None and not _signals:
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(timeout=_LOOK_S)
        if process.returncode is not None and process.returncode < 0:
            # What it had started is not ended by the signal that killed it.
            _signal_group(process, signal.SIGTERM)
        if not _signals:
            return process.returncode if process.returncode >= 0 else 128 - process.returncode
        end([process], _signals[0], grace_s=grace_s)
    raise Interrupted(interrupted_status())


def capture(command: Command, *, errors: IO[bytes] | int | None = None, cwd: Path | None = None) -> tuple[int, str]:
    """As `run`, and what the command printed on stdout."""
    with tempfile.TemporaryFile() as file:
        status = run(command, output=file.fileno(), errors=errors, cwd=cwd)
        file.seek(0)
        return status, file.read().decode(errors="replace")


def end(processes: Sequence[subprocess.Popen[bytes]], number: int, *, grace_s: float) -> None:
    """
    Send the signal to the group of each process, and wait until everything that they started has ended.

    Descendants are ended in whatever group and session they are. Those that outlive the processes, or two thirds of the
    grace period, get SIGTERM, and after all of it SIGKILL. Without psutil, so during the first ci/setup, only the
    groups are ended.
    """
    grace_s = float(os.environ.get(_GRACE, grace_s))
    began = time.monotonic()
    is_asked = False
    # A process that loses its parent is no longer a descendant, so it is remembered from the first look on.
    family = _with_descendants(_processes(process.pid for process in processes))
    for process in processes:
        _signal_group(process, number)
    while True:
        running = [process for process in processes if process.poll() is None]
        family = _with_descendants({member for member in family if _is_alive(member)})
        if not running and not family:
            return
        waited_s = time.monotonic() - began
        if waited_s >= grace_s:
            break
        if not is_asked and (not running or waited_s >= grace_s * 2 / 3):
            is_asked = True
            _signal_all(family, signal.SIGTERM)
        time.sleep(_LOOK_S)
    _signal_all(family, signal.SIGKILL)
    for process in processes:
        _signal_group(process, signal.SIGKILL)
        process.wait()


def _processes(pids: Iterable[int]) -> set[psutil.Process]:
    """Those that are alive; none without psutil."""
    processes = set()
    for pid in pids if psutil else ():
        with contextlib.suppress(psutil.NoSuchProcess):
            processes.add(psutil.Process(pid))
    return processes


def _with_descendants(processes: set[psutil.Process]) -> set[psutil.Process]:
    family = set(processes)
    for process in processes:
        with contextlib.suppress(psutil.NoSuchProcess):
            family.update(process.children(recursive=True))
    return family


def _is_alive(process: psutil.Process) -> bool:
    """True if it has not ended; a zombie has."""
    try:
        return process.is_running() and process.status() not in (psutil.STATUS_ZOMBIE, psutil.STATUS_DEAD)
    except psutil.NoSuchProcess:
        return False


def _signal_all(processes: Iterable[psutil.Process], number: int) -> None:
    for process in processes:
        with contextlib.suppress(psutil.NoSuchProcess):
            process.send_signal(number)


def _signal_group(process: subprocess.Popen[bytes], number: int) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, number)


def cores() -> int:
    """The processor cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def fresh_directory(kind: str) -> Path:
    """A directory for results that no other run uses, named after the time."""
    return ROOT / ".fsdp-conformance" / kind / f"{time.strftime('%Y%m%dT%H%M%SZ', time.gmtime())}-{os.getpid()}"


def workers() -> int:
    """Processes that run tests at a time."""
    return min(cores(), 4)
