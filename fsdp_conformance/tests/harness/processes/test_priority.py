"""The priority of a run, in the sessions of its ranks."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from fsdp_conformance.harness.processes.priority import AUTOGROUP, keep_priority, wake_without_preempting

_STARTS_A_SESSION = """
import os, sys
from fsdp_conformance.harness.processes import priority
os.nice(int(sys.argv[1]))
os.setsid()
priority.keep_priority()
print(priority.AUTOGROUP.read_text().strip())
"""


@pytest.mark.skipif(not AUTOGROUP.exists(), reason="the kernel does not group processes by session")
@pytest.mark.parametrize("nice", [0, 7])
def test_a_session_keeps_the_nice_value(nice: int) -> None:
    """Without it, a session begins with 0."""
    command = [sys.executable, "-c", _STARTS_A_SESSION, str(nice)]
    done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=60)

    assert done.stdout.strip().endswith(f"nice {os.nice(0) + nice}")


@pytest.mark.parametrize("obstacle", ["missing", "a directory"])
def test_where_it_cannot_be_set(obstacle: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing happens."""
    monkeypatch.setattr("fsdp_conformance.harness.processes.priority.AUTOGROUP", tmp_path / "missing" / "file")
    if obstacle == "a directory":
        monkeypatch.setattr("fsdp_conformance.harness.processes.priority.AUTOGROUP", tmp_path)
    monkeypatch.setattr(os, "nice", lambda _: 3)

    keep_priority()


@pytest.mark.nightly
@pytest.mark.slow
@pytest.mark.skipif(not AUTOGROUP.exists(), reason="the kernel does not group processes by session")
def test_a_rank_keeps_the_nice_value(tmp_path: Path) -> None:
    """The priority is set as soon as the rank has its own session. Its threads do not preempt each other."""
    code = f"""
import os
from pathlib import Path
from fsdp_conformance.harness.processes import rank_process
os.nice(4)
rank_process.enter(Path({str(tmp_path)!r}))
print(os.sched_getscheduler(0) == os.SCHED_BATCH, Path("/proc/self/autogroup").read_text().strip())
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=120)

    assert done.stdout.strip().endswith(f"nice {os.nice(0) + 4}")
    assert done.stdout.startswith("True ")


_CHOOSES_A_POLICY = """
import os, sys
from fsdp_conformance.harness.processes import priority
os.sched_setscheduler(0, getattr(os, sys.argv[1]), os.sched_param(0))
priority.wake_without_preempting()
print(os.sched_getscheduler(0))
"""


@pytest.mark.skipif(not hasattr(os, "SCHED_BATCH"), reason="the policy is Linux's")
@pytest.mark.parametrize(("chosen", "policy"), [("SCHED_OTHER", "SCHED_BATCH"), ("SCHED_IDLE", "SCHED_IDLE")])
def test_policy(chosen: str, policy: str) -> None:
    """Woken threads wait for a core, unless the user chose another policy."""
    command = [sys.executable, "-c", _CHOOSES_A_POLICY, chosen]
    done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=60)

    assert int(done.stdout) == getattr(os, policy)


def test_where_no_policy_can_be_set(monkeypatch: pytest.MonkeyPatch) -> None:
    """The call has no effect if the system has no policies or forbids them."""

    def forbid(*_: object) -> None:
        raise PermissionError(1, "Operation not permitted")

    monkeypatch.setattr(os, "sched_setscheduler", forbid, raising=False)
    wake_without_preempting()
    monkeypatch.delattr(os, "SCHED_BATCH", raising=False)
    wake_without_preempting()
