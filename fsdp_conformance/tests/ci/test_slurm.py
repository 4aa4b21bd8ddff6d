"""ci/slurm.sbatch: what is started on the nodes, by a fake srun that runs on each of them."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest

from fsdp_conformance.tests.guards import checkout

pytestmark = [checkout.required, pytest.mark.nightly]

#: What the site provides: a list of nodes, a launcher that runs the same words on each, and torchrun, which here only
#: says how it was called, word by word, and fails on the node in FAILS_ON.
TOOLS = {
    "scontrol": '[ "$1 $2" = "show hostnames" ] && [ "$3" = "$SLURM_JOB_NODELIST" ] && printf "node1\\nnode2\\n"',
    "srun": """
status=0
while case $1 in --*) true ;; *) false ;; esac; do echo "srun $1"; shift; done
for node in 0 1; do
    SLURM_NODEID=$node "$@" || status=$?
done
exit $status
""",
    "torchrun": """
echo "node $SLURM_NODEID"
for word in "$@"; do echo "  $word"; done
[ "$SLURM_NODEID" != "$FAILS_ON" ] || exit 3
""",
}

JOB = {
    "SLURM_JOB_NODELIST": "node[1-2]",
    "SLURM_SUBMIT_DIR": "/job of mine",
    "SLURM_JOB_ID": "120007",
    "SLURM_NNODES": "2",
}


def submit(place: Path, *words: str, **variables: str) -> subprocess.CompletedProcess[str]:
    """Run the script as Slurm would on the first node."""
    for name, body in TOOLS.items():
        (place / name).write_text(f"#!/bin/sh\n{body}\n")
        (place / name).chmod(0o755)
    path = {"PATH": f"{place}{os.pathsep}{os.environ['PATH']}", "FAILS_ON": "none"}
    return subprocess.run(
        ["bash", checkout.ROOT / "ci/slurm.sbatch", *words],
        env={**path, **JOB, **variables}, capture_output=True, text=True, check=False, timeout=60,
    )  # fmt: skip


def agents(done: subprocess.CompletedProcess[str]) -> dict[str, list[str]]:
    """The words of torchrun on each node."""
    words_of_node: dict[str, list[str]] = {}
    for line in done.stdout.splitlines():
        if line.startswith("node "):
            words = words_of_node.setdefault(line, [])
        elif line.startswith("  "):
            words.append(line[2:])
    return words_of_node


def test_each_node_runs_the_same_agent(tmp_path: Path) -> None:
    """They meet at the first node; what is named reaches the command as it was typed, spaces included."""
    done = submit(tmp_path, "my adapters/mine.py:Mine", "--chapter", "A", SLURM_GPUS_ON_NODE="8")
    words_of_node = agents(done)

    assert (done.returncode, done.stderr, list(words_of_node)) == (0, "", ["node 0", "node 1"])
    assert words_of_node["node 0"] == words_of_node["node 1"]
    words = words_of_node["node 0"]
    options = dict(zip(words[::2], words[1::2], strict=False))
    assert (options["--nnodes"], options["--nproc-per-node"], options["--max-restarts"]) == ("2", "8", "0")
    assert (options["--rdzv-endpoint"], options["--rdzv-id"]) == ("node1:20007", "120007")
    own = words[words.index("-m") :]
    assert own[:7] == ["-m", "fsdp_conformance", "run", "--ranks", "torchrun", "--device", "cuda"]
    assert own[7:9] == ["--implementation", "my adapters/mine.py:Mine"]
    assert own[9:] == ["--report", "/job of mine/.fsdp-conformance/slurm-120007", "--chapter", "A"]


@pytest.mark.parametrize(
    ("variables", "workers"),
    [
        ({}, "4"),
        ({"SLURM_GPUS_PER_NODE": "h100:8"}, "8"),
        ({"SLURM_GPUS_ON_NODE": "2", "SLURM_GPUS_PER_NODE": "8"}, "2"),
    ],
)
def test_a_worker_for_each_gpu(tmp_path: Path, variables: dict[str, str], workers: str) -> None:
    """As Slurm counts them, with or without their type."""
    words = agents(submit(tmp_path, "mine.py:Mine", **variables))["node 1"]

    assert words[words.index("--nproc-per-node") + 1] == workers


def test_failures(tmp_path: Path) -> None:
    """The status of a node reaches the job; a job without an adapter, or without nodes, starts nothing."""
    assert submit(tmp_path, "mine.py:Mine", FAILS_ON="1").returncode == 3
    nameless = submit(tmp_path)
    assert (nameless.returncode, agents(nameless)) == (2, {})
    assert "name the implementation" in nameless.stderr
