"""
A command whose Python processes record what they train.

The command runs as a child in a session of its own, its output is passed on line by line, and everything that it
has started is ended with it.
"""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import IO, cast

from fsdp_conformance.cli.child import end_family, family
from fsdp_conformance.errors import EnvironmentUnavailable, UsageError
from fsdp_conformance.recorder.settings import RecordSettings
from fsdp_conformance.recordings import files, stacks

#: Between two looks whether the command has ended.
_LOOK_S = 0.05

#: How long ranks may go on when their programs have ended. A process may wait in torch's destructors forever.
LINGER_S = 60.0

#: Between two looks whether the programs of all ranks have ended.
_LOOK_AT_FILES_S = 1.0

#: How long output may still come when the command has ended.
_OUTPUT_S = 5.0


class Lingering:
    """
    Tells whether all ranks have recorded their end, or have left their process group, but their processes have stayed
    for too long since.
    """

    def __init__(self, directory: Path, world_size: int, linger_s: float) -> None:
        self._directory = directory
        self._world_size = world_size
        self._linger_s = linger_s
        self._next_look = 0.0
        self._ended: float | None = None

    def is_over(self) -> bool:
        """True if the ranks need not be waited for."""
        now = time.monotonic()
        if now >= self._next_look:
            self._next_look = now + min(_LOOK_AT_FILES_S, self._linger_s)
            # A rank that has left may go on in another group.
            has_ended = files.has_ended(self._directory, self._world_size)
            self._ended = (self._ended or now) if has_ended else None
        return self._ended is not None and now - self._ended >= self._linger_s


def torchrun(world_size: int, words: Sequence[str]) -> list[str]:
    """The command that runs a script, or `-m` and a module, on ranks of this machine."""
    return [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={world_size}", *words]


def run_recorded(
    command: Sequence[str],
    settings: RecordSettings,
    *,
    say: Callable[[str], object],
    timeout_s: float,
    variables: dict[str, str] | None = None,
    is_enough: Callable[[], bool] = lambda: False,
) -> int | None:
    """
    Run a command; `say` gets each line of its output, from another thread. Returns its exit status, None after the
    timeout, and 0 if it was ended because `is_enough`.

    Raises FileNotFoundError or PermissionError if it cannot be started. An exception, such as Ctrl-C, ends it.
    """
    threads = {} if "OMP_NUM_THREADS" in os.environ else {"OMP_NUM_THREADS": "1"}
    of_settings, others = settings.variables(), dict(variables or {})
    # What is to be in place before recording begins comes first.
    paths = [entry for each in (others, of_settings) for entry in each.get("PYTHONPATH", "").split(os.pathsep) if entry]
    others["PYTHONPATH"] = os.pathsep.join(dict.fromkeys(paths))
    environment = {**os.environ, **threads, **of_settings, **others}
    process = subprocess.Popen(
        command,
        env=environment,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        errors="replace",
        start_new_session=True,
    )
    output = cast(IO[str], process.stdout)
    reader = threading.Thread(target=_pass_on, args=(output, say), daemon=True)
    reader.start()
    try:
        has_ended = _has_ended(process.pid, timeout_s, is_enough)
        was_enough = not has_ended and is_enough()
        if not has_ended and not was_enough:
            for line in stacks.collect(Path(settings.directory), family(process.pid)):
                say(line)
    finally:
        # Also what the command has left behind. It is not reaped yet, so its number still belongs to it.
        end_family(process.pid)
        status = process.wait()
        reader.join(_OUTPUT_S)
        output.close()
        stacks.remove(Path(settings.directory))
    if was_enough:
        return 0
    return status if has_ended else None


def _has_ended(pid: int, timeout_s: float, is_enough: Callable[[], bool]) -> bool:
    """Wait for a child without reaping it. False after the timeout, or if it need not go on."""
    deadline = time.monotonic() + timeout_s
    while os.waitid(os.P_PID, pid, os.WEXITED | os.WNOWAIT | os.WNOHANG) is None:
        if time.monotonic() > deadline or is_enough():
            return False
        time.sleep(_LOOK_S)
    return True


def _pass_on(output: IO[str], say: Callable[[str], object]) -> None:
    with contextlib.suppress(ValueError):  # closed while something that outlived the command still had it
        for line in output:
            say(line.rstrip("\n").rpartition("\r")[2])


@contextlib.contextmanager
def simulated_gpus(count: int) -> Iterator[dict[str, str]]:
    """
    The variables with which the processes of a command see simulated GPUs, one for each rank, during the block.

    Raises EnvironmentUnavailable without a C++ compiler.
    """
    from fsdp_conformance.simulator.device import build
    from fsdp_conformance.simulator.simulated_cuda.settings import Briefing

    reason = build.unavailable()
    if reason:
        raise EnvironmentUnavailable(reason)
    extension = {build.EXTENSION: str(build.require())}
    # `sanitize` checks for races.
    briefing = Briefing(count, checks=False)
    try:
        yield {**extension, **briefing.variables()}
    finally:
        briefing.close()


def fresh_directory(option: str) -> Path:
    """The directory that --output names, made if needed. Raises UsageError if it has content, or is a file."""
    path = Path(option)
    with contextlib.suppress(FileExistsError):
        path.mkdir(parents=True, exist_ok=True)
        if not any(path.iterdir()):
            return path
    raise UsageError(f"--output must be a new or an empty directory, got {option!r}")


def elapsed(began: float) -> str:
    """The time since then, for people."""
    return f"{time.monotonic() - began:.0f} s"
