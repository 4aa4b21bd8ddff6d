"""A recorded command whose processes do not exit when its script has ended."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import psutil
import pytest

from fsdp_conformance.cli.recorded_run import Lingering, run_recorded
from fsdp_conformance.recorder.settings import RecordSettings
from fsdp_conformance.recordings import files
from fsdp_conformance.recordings.events import Step

#: The process waits in what torch's destructors may be: something that runs after everything else.
_STAYS = """
import atexit, os, time
atexit.register(time.sleep, 600)
import torch

model = torch.nn.Linear(2, 2)
optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
model(torch.ones(1, 2)).sum().backward()
optimizer.step()
print("pid", os.getpid())
"""


@pytest.mark.slow
def test_a_process_that_stays_is_ended_and_its_run_counts(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(_STAYS)
    directory = tmp_path / "run"
    lingering = Lingering(directory, 1, 0.2)
    lines: list[str] = []

    status = run_recorded(
        [sys.executable, str(tmp_path / "train.py")],
        RecordSettings(directory=str(directory), prefix=sys.prefix),
        say=lines.append,
        timeout_s=120,
        is_enough=lingering.is_over,
    )

    assert status == 0
    assert lingering.is_over()
    assert sum(isinstance(event, Step) for event in files.read(directory).ranks[0].events) == 1
    (pid,) = (int(line.split()[1]) for line in lines if line.startswith("pid"))
    assert not psutil.pid_exists(pid)


def test_a_rank_that_has_left_its_group_need_not_end(tmp_path: Path) -> None:
    """Its process may wait for others in torch's destructors for ever."""
    lingering = Lingering(tmp_path, 1, 0.0)
    path = tmp_path / f"rank-0.{os.getpid()}.jsonl"
    left = '{"event": "mark", "step": 3, "kind": "left", "line": "train.py:9", "detail": ""}\n'
    path.write_text(left)

    assert lingering.is_over()
    path.write_text(left + left.replace("left", "forward"))
    assert not lingering.is_over()


def test_ranks_that_have_not_ended_are_waited_for(tmp_path: Path) -> None:
    lingering = Lingering(tmp_path, 2, 0.0)
    (tmp_path / f"rank-0.{os.getpid()}.jsonl").write_text('{"event": "end", "error": ""}\n')

    assert not lingering.is_over()
    (tmp_path / f"rank-1.{os.getpid()}.jsonl").write_text('{"event": "end", "error": ""}\n')
    assert lingering.is_over()
