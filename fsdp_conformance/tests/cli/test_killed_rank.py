"""A rank that a signal ends is named, and the lines where the others waited for it."""

from __future__ import annotations

from pathlib import Path

import pytest

from fsdp_conformance.cli.killed_rank import KilledRank
from fsdp_conformance.tests import warm_interpreter
from fsdp_conformance.tests.cli.cli_runs import words

#: As torchrun prints it.
OUTPUT = """
[rank0]: Traceback (most recent call last):
[rank0]:   File "/scripts/train.py", line 11, in <module>
[rank0]:     loss.backward()
[rank0]:   File "/lib/torch/_tensor.py", line 625, in backward
[rank0]: RuntimeError: Connection closed by peer
E1129 14:17:27.537000 31406 torch/distributed/elastic/multiprocessing/api.py:1002] failed (exitcode: -9) \
local_rank: 1 (pid: 31430) of binary: /usr/bin/python
"""

SCRIPT = """
import os, signal, torch, torch.distributed as dist
from torch.distributed.fsdp import fully_shard
dist.init_process_group("gloo")
model = torch.nn.Linear(4, 4)
fully_shard(model)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
loss = model(torch.ones(2, 4)).sum()
if dist.get_rank() == 1:
    os.kill(os.getpid(), signal.SIGKILL)
loss.backward()
optimizer.step()
"""


def _read(output: str) -> str:
    killed = KilledRank()
    for line in output.splitlines():
        killed.read(line)
    return killed.words


def test_the_rank_its_signal_and_the_others() -> None:
    assert _read(OUTPUT) == "rank 1 was killed by SIGKILL, and rank 0 waited at train.py:11"
    assert _read(OUTPUT.replace("exitcode: -9", "exitcode: -65")) == (
        "rank 1 was killed by signal 65, and rank 0 waited at train.py:11"
    )


def test_a_rank_that_raised_was_not_killed() -> None:
    assert _read(OUTPUT.replace("exitcode: -9", "exitcode: 1")) == ""


@pytest.mark.nightly
def test_a_rank_that_is_killed_in_its_first_step(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(SCRIPT, encoding="utf-8")

    # The traceback is the script's.
    done = warm_interpreter.run(words("parity", str(tmp_path / "train.py")), timeout=240)

    assert done.returncode == 1, done.stdout + done.stderr
    assert "status 1, rank 1 was killed by SIGKILL, and rank 0 waited at train.py:11" in done.stdout
    assert "✗ The run ended early, from step 0 on" in done.stdout
