"""Breakpoints in a script: one rank may have the terminal, and without it they are passed over."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from fsdp_conformance.tests.cli.cli_runs import words
from fsdp_conformance.tests.simulator.sanitize.sanitize_runs import DEADLINE_S, needs_simulator, sanitize, written

pytestmark = [pytest.mark.slow, needs_simulator]

#: Stops in a way of the script's own, between two collectives. A short timeout of the group must not end the wait.
SCRIPT = """
import pdb
import time
from datetime import timedelta

import torch
import torch.distributed as dist

dist.init_process_group("nccl", timeout=timedelta(seconds=1))
torch.cuda.set_device(dist.get_rank())
data = torch.ones(2, device="cuda")
dist.all_reduce(data)
secret = 41 + dist.get_rank()
{stop}
dist.all_reduce(data)
print("sum", data.tolist())
dist.destroy_process_group()
"""

STOPS = ("breakpoint()", "pdb.set_trace()", "dist.breakpoint()", "breakpoint(); pdb.Pdb().set_trace()")


def debugged(directory: Path, *typed: str, script: str, commands: str) -> tuple[int, str]:
    """Run a script with one rank in the foreground. Returns the exit status and all that was printed."""
    done = subprocess.run(
        words("sanitize", "--as-cuda", *typed, written(directory, script)),
        cwd=directory,
        input=commands,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        encoding="utf-8",
        timeout=DEADLINE_S,
        check=False,
    )
    return done.returncode, done.stdout


@pytest.mark.nightly_params("breakpoint()", "pdb.set_trace()")
@pytest.mark.parametrize("stop", STOPS)
def test_without_the_terminal_breakpoints_are_passed_over(stop: str, tmp_path: Path) -> None:
    """A note says how to stop there; the run is judged as usual."""
    run = sanitize("--as-cuda", written(tmp_path, SCRIPT.replace("{stop}", stop)), cwd=tmp_path)

    assert run.status == 0, run.out
    assert "sum [4.0, 4.0]" in run.out
    assert run.out.count("was passed over, because no rank has the terminal: --rank 0 gives it to rank 0") == 1
    assert "the breakpoint at train.py:14 in <module>" in run.out


@pytest.mark.nightly
def test_a_hook_of_the_user_is_left_alone(tmp_path: Path) -> None:
    """A debugger that needs no terminal works, and so does none at all."""
    script = written(tmp_path, SCRIPT.replace("{stop}", "breakpoint()"))
    for hook in ("0", "builtins.print"):
        run = sanitize("--as-cuda", script, cwd=tmp_path, environment={"PYTHONBREAKPOINT": hook})
        assert (run.status, "passed over" in run.out) == (0, False), run.out


@pytest.mark.nightly
@pytest.mark.parametrize("rank", ["0", "1"])
def test_one_rank_has_the_terminal(rank: str, tmp_path: Path) -> None:
    """The other one waits, for longer than its group's timeout, and the run is judged."""
    status, out = debugged(
        tmp_path, "--rank", rank, script=SCRIPT.replace("{stop}", "breakpoint()"),
        commands="p secret\nimport time; time.sleep(3)\nc\n",
    )  # fmt: skip

    assert status == 0, out
    assert f"(Pdb) {41 + int(rank)}" in out
    assert f"rank {rank} has the terminal" in out
    assert "clean: " in out


@pytest.mark.nightly
def test_torch_s_own_breakpoint(tmp_path: Path) -> None:
    """The other ranks wait in its barrier."""
    script = SCRIPT.replace("{stop}", "dist.breakpoint()")
    status, out = debugged(tmp_path, "--rank", "0", script=script, commands="up\np secret\nc\n")

    assert status == 0, out
    assert "41" in out


@pytest.mark.nightly
def test_quit_ends_the_script(tmp_path: Path) -> None:
    """It is said why, and the other rank does not hang."""
    script = SCRIPT.replace("{stop}", "breakpoint()")
    status, out = debugged(tmp_path, "--rank", "0", script=script, commands="q\n")

    assert status == 5, out
    assert "the debugger was left with quit, which ends the script: continue lets it go on" in out


@pytest.mark.nightly
def test_a_breakpoint_before_the_group_exists(tmp_path: Path) -> None:
    """The other rank waits in the rendezvous, whatever its timeout."""
    script = "import time\nimport os\nif os.environ['RANK'] == '0':\n    breakpoint()\n" + SCRIPT.replace("{stop}", "")
    status, out = debugged(tmp_path, "--rank", "0", script=script, commands="time.sleep(3)\nc\n")

    assert status == 0, out
    assert "clean: " in out
