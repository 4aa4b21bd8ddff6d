"""ci/kubernetes.yaml: the fields on which the example depends, and what its pods start."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml

from fsdp_conformance.tests.guards import checkout

pytestmark = [checkout.required, pytest.mark.nightly]

#: What the image provides. Names of pods are known to `getent` from the third question on.
TOOLS = {
    "getent": """
count=$(cat "$PLACE/asked" 2>/dev/null || echo 0)
echo $((count + 1)) >"$PLACE/asked"
[ "$2" = fsdp-conformance-0.fsdp-conformance ] && [ "$count" -ge "$KNOWN_AFTER" ] && echo "10.0.0.7 $2"
""",
    "torchrun": 'for word in "$@"; do echo "$word"; done; exit "$STATUS"',
    "sleep": ":",
}


@pytest.fixture(scope="module")
def manifest() -> dict[str, Any]:
    """The documents by kind."""
    text = (checkout.ROOT / "ci/kubernetes.yaml").read_text(encoding="utf-8")
    return {document["kind"]: document for document in yaml.safe_load_all(text)}


def container(manifest: dict[str, Any]) -> dict[str, Any]:
    (containers,) = manifest["Job"]["spec"]["template"]["spec"]["containers"]
    assert isinstance(containers, dict)
    return containers


def test_pods_have_names(manifest: dict[str, Any]) -> None:
    """A headless service of the pods' subdomain names them, also before they are ready."""
    job, service = manifest["Job"], manifest["Service"]
    pod = job["spec"]["template"]["spec"]

    assert (service["apiVersion"], job["apiVersion"]) == ("v1", "batch/v1")
    assert service["spec"]["clusterIP"] == "None"
    assert service["spec"]["publishNotReadyAddresses"] is True
    assert service["spec"]["selector"] == {"job-name": job["metadata"]["name"]}
    assert pod["subdomain"] == service["metadata"]["name"]
    assert job["spec"]["completionMode"] == "Indexed"


def test_a_lost_pod_is_not_replaced(manifest: dict[str, Any]) -> None:
    """A second run would begin with other ranks."""
    spec = manifest["Job"]["spec"]

    assert (spec["backoffLimit"], spec["template"]["spec"]["restartPolicy"]) == (0, "Never")
    assert spec["activeDeadlineSeconds"] > 0


def test_numbers_agree(manifest: dict[str, Any]) -> None:
    """There are as many pods as torchrun waits for, as many workers as GPUs, and one pod per node."""
    spec, pod_container = manifest["Job"]["spec"], container(manifest)
    variables = {entry["name"]: entry["value"] for entry in pod_container["env"]}
    (rule,) = spec["template"]["spec"]["affinity"]["podAntiAffinity"]["requiredDuringSchedulingIgnoredDuringExecution"]

    assert spec["completions"] == spec["parallelism"] == int(variables["HOSTS"])
    assert pod_container["resources"]["limits"]["nvidia.com/gpu"] == int(variables["WORKERS"])
    assert rule["topologyKey"] == "kubernetes.io/hostname"
    assert rule["labelSelector"]["matchLabels"] == manifest["Service"]["spec"]["selector"]


def test_there_is_room_for_shared_memory(manifest: dict[str, Any]) -> None:
    """NCCL fails with the 64 MiB of a container; every volume is mounted."""
    volumes = {volume["name"]: volume for volume in manifest["Job"]["spec"]["template"]["spec"]["volumes"]}
    mounts = {mount["mountPath"]: mount["name"] for mount in container(manifest)["volumeMounts"]}

    assert volumes[mounts["/dev/shm"]]["emptyDir"]["medium"] == "Memory"
    assert set(mounts.values()) == set(volumes)


def start(manifest: dict[str, Any], place: Path, index: int, **variables: str) -> subprocess.CompletedProcess[str]:
    """Run the command of the pod with that index."""
    for name, body in TOOLS.items():
        (place / name).write_text(f"#!/bin/sh\n{body}\n")
        (place / name).chmod(0o755)
    pod_container = container(manifest)
    given = {entry["name"]: entry["value"] for entry in pod_container["env"]}
    path = {"PATH": f"{place}{os.pathsep}{os.environ['PATH']}", "PLACE": str(place), "STATUS": "0", "KNOWN_AFTER": "2"}
    return subprocess.run(
        pod_container["command"], env={**path, **given, "JOB_COMPLETION_INDEX": str(index), **variables},
        capture_output=True, text=True, check=False, timeout=60,
    )  # fmt: skip


@pytest.mark.parametrize("index", [0, 1])
def test_what_a_pod_starts(manifest: dict[str, Any], tmp_path: Path, index: int) -> None:
    """An agent with the pod's number, which meets the others at the first pod once that has a name."""
    done = start(manifest, tmp_path, index, IMPLEMENTATION="my adapters/mine.py:Mine", RETRY_S="0")
    words = done.stdout.splitlines()
    options = dict(zip(words[::2], words[1::2], strict=False))

    assert (done.returncode, done.stderr) == (0, "")
    assert (options["--nnodes"], options["--nproc-per-node"], options["--node-rank"]) == ("2", "4", str(index))
    assert options["--master-addr"] == "fsdp-conformance-0.fsdp-conformance"
    own = words[words.index("-m") :]
    assert own[:7] == ["-m", "fsdp_conformance", "run", "--ranks", "torchrun", "--device", "cuda"]
    assert own[own.index("--implementation") + 1] == "my adapters/mine.py:Mine"


def test_a_pod_that_fails(manifest: dict[str, Any], tmp_path: Path) -> None:
    """The verdict is its status. Without the Service it prints an error and starts nothing."""
    assert start(manifest, tmp_path, 0, STATUS="1").returncode == 1
    lost = start(manifest, tmp_path, 1, KNOWN_AFTER="999", RETRY_S="0")

    assert (lost.returncode, lost.stdout) == (3, "")
    assert "is the Service there?" in lost.stderr
