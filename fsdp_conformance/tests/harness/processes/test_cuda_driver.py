"""The CUDA driver is not started where ranks are forked, and is seen where something else has started it."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from fsdp_conformance.errors import EnvironmentUnavailable
from fsdp_conformance.harness import devices
from fsdp_conformance.harness.processes import cuda_driver

pytestmark = pytest.mark.slow

PATIENCE_S = 240.0

#: As much of the driver as is asked here, under its name.
DRIVER = """
static int started;
int cuInit(unsigned flags) { started = 1; return 0; }
int cuDeviceGetCount(int *count) { *count = 2; return started ? 0 : 3; }
"""

#: A build for GPUs without NVML, as far as torch asks: who counts is written to a file.
COUNTED = """
import os, sys, torch
counter = sys.argv[1]
def count():
    with open(counter, "a") as file:
        print(os.getpid(), file=file)
    return 3
torch._C._cuda_getDeviceCount = count
torch.cuda._device_count_nvml = lambda: -1
"""


def program(*lines: str, arguments: tuple[str, ...] = ()) -> list[str]:
    """The command line of a new process that prints the state of the driver."""
    answer = subprocess.run(
        [sys.executable, "-c", "\n".join(lines), *arguments],
        capture_output=True,
        text=True,
        timeout=PATIENCE_S,
        check=False,
        env={**os.environ, "PYTORCH_NVML_BASED_CUDA_CHECK": "1"},
    )
    assert answer.returncode == 0, answer.stderr
    return answer.stdout.splitlines()


def test_the_driver_itself_is_asked(tmp_path: Path) -> None:
    """A driver that a library started without torch counts, and one that is merely loaded does not."""
    source, library = tmp_path / "driver.c", tmp_path / "libcuda.so.1"
    source.write_text(DRIVER)
    subprocess.run(["gcc", "-shared", "-fPIC", "-Wl,-soname,libcuda.so.1", "-o", library, source], check=True)
    lines = program(
        "import ctypes, sys",
        "from fsdp_conformance.harness.processes.cuda_driver import cuda_is_initialised",
        "print(cuda_is_initialised())",
        "driver = ctypes.CDLL(sys.argv[1])",
        "print(cuda_is_initialised())",
        "driver.cuInit(0)",
        "print(cuda_is_initialised())",
        arguments=(str(library),),
    )

    assert lines == ["False", "False", "True"]


@pytest.mark.nightly
def test_imports_of_the_warm_process_count_in_a_child(tmp_path: Path) -> None:
    """A module that counts GPUs when it is imported gets the number; afterwards torch counts as ever."""
    counts, counter = tmp_path / "counts.py", tmp_path / "who"
    counts.write_text("import torch\nFOUND = torch.cuda.is_available(), torch.cuda.device_count()\n")
    lines = program(
        COUNTED,
        "from fsdp_conformance.harness.processes import preload",
        "preload.load([sys.argv[2]])",
        "print(preload.import_target(sys.argv[2]).FOUND, preload.failures, preload.cuda_initialised_by)",
        "print(str(os.getpid()) in open(counter).read().split())",
        "print(torch.cuda.device_count(), str(os.getpid()) in open(counter).read().split())",
        arguments=(str(counter), str(counts)),
    )

    assert lines == ["(True, 3) {} None", "False", "3 True"]


@pytest.mark.nightly
def test_the_controller_counts_in_a_child(tmp_path: Path) -> None:
    """Whatever it asks about devices."""
    lines = program(
        COUNTED,
        "from fsdp_conformance.harness import devices",
        "print(devices.device_count('cuda'), devices.present_accelerator())",
        "print(str(os.getpid()) in open(counter).read().split())",
        arguments=(str(tmp_path / "who"),),
    )

    assert lines == ["3 cuda", "False"]


@pytest.mark.skipif(not torch.backends.cuda.is_built(), reason="this build of torch has no CUDA to count for")
def test_a_build_for_gpus_is_not_marked() -> None:
    """Torch marks a process that has asked the driver: a child forked from it may not use a GPU."""
    lines = program(
        "import os, torch",
        "from fsdp_conformance.harness import devices",
        "devices.device_count('cuda')",
        "pid = os.fork()",
        "if pid == 0:",
        "    print(torch.cuda._is_in_bad_fork(), flush=True)",
        "    os._exit(0)",
        "os.waitpid(pid, 0)",
    )

    assert lines == ["False"]


def test_a_driver_that_fails_has_no_devices(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its child ends without an answer."""
    monkeypatch.setattr(torch._C, cuda_driver._COUNT, lambda: os.kill(os.getpid(), signal.SIGKILL), raising=False)
    monkeypatch.setattr(torch.cuda, "_device_count_nvml", lambda: -1)

    assert devices.device_count("cuda") == 0


@pytest.mark.nightly
def test_a_driver_that_hangs_is_not_waited_for(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """The child is ended, and the error says what to look at."""
    pid_file = tmp_path / "pid"

    def hang() -> int:
        pid_file.write_text(str(os.getpid()))
        signal.pause()
        return 1

    monkeypatch.setattr(cuda_driver, "COUNT_TIMEOUT_S", 3.0)
    monkeypatch.setattr(torch._C, cuda_driver._COUNT, hang, raising=False)
    monkeypatch.setattr(torch.cuda, "_device_count_nvml", lambda: -1)

    with pytest.raises(EnvironmentUnavailable, match="did not say within 3 s how many GPUs there are"):
        devices.device_count("cuda")
    assert not Path(f"/proc/{pid_file.read_text()}").exists()
