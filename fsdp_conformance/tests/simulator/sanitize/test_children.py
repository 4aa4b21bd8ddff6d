"""Processes that a script starts itself: they see the devices, and what they do wrong is the script's finding."""

from __future__ import annotations

from pathlib import Path

import pytest

from fsdp_conformance.tests.simulator.sanitize.sanitize_runs import (
    Sanitized,
    needs_simulator,
    sanitize,
    sanitize_alone,
    written,
)

pytestmark = [pytest.mark.slow, needs_simulator]

#: A race, as a function of the file that it is in.
RACE = """
import torch


def race(device="cuda"):
    data = torch.ones(4, device=device)
    with torch.cuda.stream(torch.cuda.Stream()):
        data.mul_(2)
"""

#: A program with a race and a child with another.
WORKER = """
import subprocess
import sys

import torch

from race import race

if __name__ == "__main__":
    assert torch.cuda.device_count() == 2
    race()
    if sys.argv[1:]:
        subprocess.run([sys.executable, "worker.py"], check=True)
        sys.exit(int(sys.argv[1]))
"""


def run_of(text: str, directory: Path, *typed: str) -> Sanitized:
    """Run a script on one rank with two devices, next to race.py and worker.py. Spawned children import its main."""
    written(directory, RACE, "race.py")
    written(directory, WORKER, "worker.py")
    words = ["--as-cuda", "--world-size", "1", "--devices", "2", *typed, written(directory, text)]
    return sanitize_alone(*words, cwd=directory)


def processes(run: Sanitized) -> list[str]:
    """The processes that have the one hazard of a run."""
    (hazard,) = run.hazards
    return sorted(hazard["processes"])


@pytest.mark.nightly
def test_children_have_the_devices_and_report(tmp_path: Path) -> None:
    """Forked, spawned, from a fork server, as programs, and their own children: one finding, the script is clean."""
    run = run_of(
        """
import multiprocessing
import subprocess
import sys

import race

if __name__ == "__main__":
    for method in ("fork", "spawn", "forkserver"):
        child = multiprocessing.get_context(method).Process(target=race.race, name=method)
        child.start()
        child.join()
        assert child.exitcode == 0, (method, child.exitcode)
    done = subprocess.run([sys.executable, "worker.py", "0"])
    print("worker ended with", done.returncode)
""",
        tmp_path,
    )

    assert run.status == 1, run.out + run.err
    assert "[rank 0] worker ended with 0" in run.out
    assert processes(run) == ["fork", "forkserver", "spawn", "worker.py"]
    assert run.lines() == [("data = torch.ones(4, device=device)", "data.mul_(2)")]
    assert run.hazards[0]["count"] == 5
    (rank,) = run.report["ranks"]
    assert rank["ending"] == "finished"
    assert rank["accesses"] == 0
    assert [child["has_ended"] for child in rank["children"]] == [True] * 5
    assert "of 1 rank and 5 child processes" in run.out
    assert "seen: 5 times in 4 places, on rank 0, in the child processes " in run.out


@pytest.mark.nightly
def test_children_that_end_badly_are_not_forgotten(tmp_path: Path) -> None:
    """One crashes, one is killed while it works, one outlives the script; a fork runs to the script's end."""
    run = run_of(
        """
import multiprocessing
import os
import subprocess
import sys
import time

HANGS = "import race, time; race.race(); print('raced', flush=True); time.sleep(600)"

if __name__ == "__main__":
    crashed = subprocess.run([sys.executable, "-c", "import race; race.race(); raise ValueError('bad')"])
    print("crashed with", crashed.returncode)
    print("main process is", multiprocessing.current_process().name)
    killed, left = (subprocess.Popen([sys.executable, "-c", HANGS], stdout=subprocess.PIPE) for _ in range(2))
    for child in (killed, left):
        child.stdout.readline()
    time.sleep(2.0)
    killed.kill()
    killed.wait()
    if (pid := os.fork()) == 0:
        import race

        race.race()
        sys.exit(7)
    print("fork ended with", os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]))
""",
        tmp_path,
    )

    assert run.status == 1, run.out + run.err
    assert "crashed with 1" in run.out
    assert "fork ended with 7" in run.out
    assert processes(run) == ["python -c", "train.py"]
    assert "main process is MainProcess" in run.out
    (rank,) = run.report["ranks"]
    assert rank["ending"] == "finished"
    ended = sorted((child["process"], child["has_ended"]) for child in rank["children"])
    assert ended == [("python -c", False), ("python -c", False), ("python -c", True), ("train.py", True)]
    assert "note: python -c, started by rank 0, was killed or outlived it" in run.out


@pytest.mark.nightly
def test_a_launcher_trains_on_its_own_ranks(tmp_path: Path) -> None:
    """torch.multiprocessing.spawn and torchrun: process groups and collectives, with one device for each rank."""
    written(
        tmp_path,
        """
import os

import torch
import torch.distributed as dist

from race import race


def train(rank=None, port=None):
    if rank is not None:
        os.environ.update(RANK=str(rank), WORLD_SIZE="2", MASTER_PORT=port)
    dist.init_process_group("nccl")
    device = torch.device("cuda", dist.get_rank())
    torch.cuda.set_device(device)
    total = torch.full((4,), 1.0 + dist.get_rank(), device=device)
    dist.all_reduce(total)
    assert total.tolist() == [3.0] * 4
    if dist.get_rank() == 1:
        race(device)
    dist.destroy_process_group()


if __name__ == "__main__":
    train()
""",
        "training.py",
    )
    run = run_of(
        """
import os
import subprocess
import sys

import torch.multiprocessing as mp

import training

if __name__ == "__main__":
    mp.spawn(training.train, args=(os.environ["MASTER_PORT"],), nprocs=2)
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2", "--log-dir=logs"]
    subprocess.run([*torchrun, "training.py"], check=True)
""",
        tmp_path,
    )

    assert run.status == 1, run.out + run.err
    assert processes(run) == ["rank 1"]
    assert run.hazards[0]["count"] == 2
    (rank,) = run.report["ranks"]
    # RANK is 0 in the script, too, so the spawned rank 0 goes by its process's name.
    assert sorted(child["process"] for child in rank["children"]) == ["SpawnProcess-1", "rank 0", "rank 1", "rank 1"]
    assert all(child["has_ended"] for child in rank["children"])


@pytest.mark.nightly
def test_options_hold_in_children_and_both_ranks_are_told_apart(tmp_path: Path) -> None:
    """The mode, the memory and the name of the device; a hazard of one rank's child is that rank's."""
    written(tmp_path, RACE, "race.py")
    worker = """
import sys

import torch

from race import race

try:
    torch.empty(1 << 20, device="sim")
except torch.OutOfMemoryError:
    print("out of memory")
assert not torch.cuda.is_available()
data = torch.ones(4, device="sim")
with torch.sim.stream(torch.Stream("sim")):
    data.mul_(2)
print("not raised")
"""
    written(tmp_path, worker, "worker.py")
    script = """
import os
import subprocess
import sys

if os.environ["RANK"] == "1":
    print("worker ended with", subprocess.run([sys.executable, "worker.py"]).returncode)
"""
    run = sanitize("--mode", "raise", "--memory", "1MB", written(tmp_path, script), cwd=tmp_path)

    assert run.status == 1, run.out + run.err
    assert "out of memory" in run.out
    assert "not raised" not in run.out
    assert "[rank 1] worker ended with 1" in run.out
    (hazard,) = run.hazards
    assert (hazard["ranks"], hazard["processes"]) == ([1], {"worker.py": 1})
    assert "on sim:0" in hazard["text"]
    assert [len(rank["children"]) for rank in run.report["ranks"]] == [0, 1]


@pytest.mark.nightly
def test_children_that_are_right_are_clean(tmp_path: Path) -> None:
    """A script that leaves all work to its children has had something checked."""
    run = run_of(
        """
import subprocess
import sys

subprocess.run([sys.executable, "-c", "import torch; torch.ones(2, device='cuda').sum().item()"], check=True)
""",
        tmp_path,
    )

    assert run.status == 0, run.out + run.err
    assert "clean: " in run.verdict
    assert "1 child process" in run.verdict
