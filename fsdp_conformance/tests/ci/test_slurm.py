"""ci/slurm.sbatch: what torchrun is started with on each node."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest

from fsdp_conformance.tests.guards import checkout

pytestmark = checkout.required

#: What the site provides: a list of nodes, a launcher, a route, and torchrun, which here only says how it was called.
TOOLS = {
    "scontrol": 'echo "node1\nnode2"',
    "srun": 'exec "$@"',
    "ip": 'echo "default via 10.0.0.1 dev ens5 proto dhcp"',
    "torchrun": 'echo "$GLOO_SOCKET_IFNAME $NCCL_SOCKET_IFNAME $*"',
}


@pytest.mark.parametrize(
    ("set_by_user", "interfaces"),
    [({}, "ens5 ens5"), ({"GLOO_SOCKET_IFNAME": "ib0"}, "ib0 ib0"), ({"NCCL_SOCKET_IFNAME": "ib1"}, "ens5 ib1")],
)
def test_interfaces(tmp_path: Path, set_by_user: dict[str, str], interfaces: str) -> None:
    """The interface of the default route, unless the user names another: a host's own name may be 127.0.1.1."""
    for name, body in TOOLS.items():
        (tmp_path / name).write_text(f"#!/bin/sh\n{body}\n")
        (tmp_path / name).chmod(0o755)
    job = {"SLURM_JOB_NODELIST": "node[1-2]", "SLURM_SUBMIT_DIR": "/job", "SLURM_JOB_ID": "7", "SLURM_NNODES": "2"}
    path = {"PATH": f"{tmp_path}{os.pathsep}{os.environ['PATH']}"}
    done = subprocess.run(
        ["bash", checkout.ROOT / "ci/slurm.sbatch", "mine.py:Mine"],
        env={**path, **job, **set_by_user}, capture_output=True, text=True, check=True, timeout=60,
    )  # fmt: skip

    assert done.stdout.startswith(f"{interfaces} --nnodes 2 --nproc-per-node 4")
    assert done.stdout.rstrip().endswith("--implementation mine.py:Mine --report /job/.fsdp-conformance/slurm-7")
