"""Child processes that end with everything they have started, whatever groups and sessions that has made for itself."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import time
from collections.abc import Sequence
from pathlib import Path

from fsdp_conformance.cli.signals import Stopped, caught

#: Seconds between two looks for a signal.
_LOOK_S = 0.1

#: How long killed processes may take to end, and how often we look.
_DEATH_S = 10.0
_DEATH_LOOK_S = 0.005


def run_family(command: Sequence[str], *, timeout_s: float) -> subprocess.CompletedProcess[bytes]:
    """
    Run a command to its end. Its stdout and stderr are kept apart.

    Nothing that it has started lives on, however this function is left. Raises Stopped when a signal asks us to end,
    and subprocess.TimeoutExpired with the output so far.
    """
    deadline = time.monotonic() + timeout_s
    # A signal that raised while the child is being started would leave it behind.
    with caught() as signals:
        child = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            start_new_session=True,
        )
        done = None
        while done is None and not signals and time.monotonic() < deadline:
            with contextlib.suppress(subprocess.TimeoutExpired):
                output, errors = child.communicate(timeout=_LOOK_S)
                done = subprocess.CompletedProcess(command, child.returncode, output, errors)
        if done is None:
            end_family(child.pid)
            output, errors = child.communicate()
    if signals:
        raise Stopped(signals[0])
    if done is None:
        raise subprocess.TimeoutExpired(command, timeout_s, output, errors)
    return done


def end_family(leader: int, proc: Path = Path("/proc")) -> None:
    """
    Kill the process, its descendants, and every process in the session that it leads, and wait until they have ended.

    The leader must not have been reaped, so that its number still belongs to it. Ranks have their own sessions, and can
    be recognised as descendants only while their parents live: so all processes are stopped before any is killed, and
    none can start another meanwhile. Without /proc only the leader's group is killed.
    """
    stopped: set[int] = set()
    while fresh := family(leader, proc) - stopped:
        for pid in fresh:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGSTOP)
        stopped |= fresh
    for pid in stopped:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
    with contextlib.suppress(ProcessLookupError):
        os.killpg(leader, signal.SIGKILL)
    # The kernel takes a while to give back the memory of a process that has imported torch.
    deadline = time.monotonic() + _DEATH_S
    while any(_stat(proc / str(pid)) is not None for pid in stopped) and time.monotonic() < deadline:
        time.sleep(_DEATH_LOOK_S)


def family(leader: int, proc: Path = Path("/proc")) -> set[int]:
    """The leader, its descendants and its session, as far as they are alive; empty without /proc."""
    parents: dict[int, int] = {}
    found: set[int] = set()
    for entry in proc.glob("[0-9]*"):
        stat = _stat(entry)
        if stat is not None:
            pid = int(entry.name)
            parents[pid], session = stat
            if leader in (session, pid):
                found.add(pid)
    while children := {pid for pid, parent in parents.items() if parent in found} - found:
        found |= children
    return found


def _stat(entry: Path) -> tuple[int, int] | None:
    """Parent and session of a process that is alive; None for one that has ended, reaped or not."""
    try:
        # The command's name may hold spaces and parentheses; what follows the last one is regular.
        state, parent, _, session, *_ = (entry / "stat").read_text().rpartition(")")[2].split()
    except OSError:
        return None
    return None if state in "ZX" else (int(parent), int(session))
