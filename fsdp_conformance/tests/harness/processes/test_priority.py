"""The priority of a run, in the sessions of its ranks."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from fsdp_conformance.harness.processes.priority import AUTOGROUP, keep_priority

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


@pytest.mark.slow
@pytest.mark.skipif(not AUTOGROUP.exists(), reason="the kernel does not group processes by session")
def test_a_rank_keeps_the_nice_value(tmp_path: Path) -> None:
    """As soon as it has a session of its own."""
    code = f"""
import os
from pathlib import Path
from fsdp_conformance.harness.processes import rank_process
os.nice(4)
rank_process.enter(Path({str(tmp_path)!r}))
print(Path("/proc/self/autogroup").read_text().strip())
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=120)

    assert done.stdout.strip().endswith(f"nice {os.nice(0) + 4}")
