"""A script that fails, hangs, dies or is interrupted: the first rank is named, and nothing is left behind."""

from __future__ import annotations

import os
import signal
import subprocess
from pathlib import Path

import pytest

from fsdp_conformance.cli.child import end_family, family
from fsdp_conformance.tests.cli.cli_runs import words
from fsdp_conformance.tests.cli.test_interrupt import wait_for
from fsdp_conformance.tests.simulator.sanitize.sanitize_runs import (
    DEADLINE_S,
    needs_simulator,
    sanitize,
    sanitize_alone,
    written,
)

pytestmark = [pytest.mark.slow, needs_simulator]

#: Every rank uses the device, and all communicate once; then rank 1 goes wrong.
_BEGIN = """
import os
import signal
import sys
import threading
from pathlib import Path

import torch
import torch.distributed as dist

dist.init_process_group()
rank = dist.get_rank()
torch.sim.set_device(rank)
ones = torch.ones(4, device="sim")
dist.all_reduce(ones)


def go_wrong():
    if rank == 1:
        {wrong}


go_wrong()
dist.all_reduce(ones)
print(ones.sum().item())
"""


@pytest.mark.nightly
def test_a_rank_that_raises_is_the_headline(tmp_path: Path) -> None:
    """Its traceback begins in the script; the peer that lost it is a consequence."""
    script = written(tmp_path, _BEGIN.format(wrong='raise ValueError("boom")'))
    run = sanitize(script, cwd=tmp_path)

    assert run.status == 5, run.out + run.err
    assert run.verdict == "the script failed: rank 1 raised ValueError: boom [exit 5]"
    assert run.report["traceback"].splitlines()[:2] == [
        "Traceback (most recent call last):",
        '  File "train.py", line 23, in <module>',
    ]
    assert "then rank 0 " in run.out


@pytest.mark.nightly
def test_a_rank_that_hangs_is_ended_at_the_deadline(tmp_path: Path) -> None:
    """Its stack names the line, its last collectives what it did before; the peer timed out waiting."""
    script = written(tmp_path, _BEGIN.format(wrong="threading.Event().wait()"))
    run = sanitize("--timeout", "30", script, cwd=tmp_path)

    assert run.status == 5, run.out + run.err
    assert "rank 1 did not report in time and was terminated" in run.verdict
    assert 'File "train.py", line 20 in go_wrong' in run.out
    assert "last collectives of rank 1:" in run.out
    assert "all_reduce 16B float32" in run.out
    assert "keep_observations" not in run.out


def test_a_rank_that_is_killed_is_named(tmp_path: Path) -> None:
    """The report names its signal."""
    script = written(tmp_path, _BEGIN.format(wrong="os.kill(os.getpid(), signal.SIGKILL)"))
    run = sanitize(script, cwd=tmp_path)

    assert run.status == 5, run.out + run.err
    assert run.verdict == "the script failed: rank 1 was killed by SIGKILL before it reported [exit 5]"


@pytest.mark.parametrize(
    ("ending", "status"),
    [
        pytest.param("sys.exit(7)", 5, marks=pytest.mark.nightly),
        pytest.param("sys.exit()", 0, marks=pytest.mark.nightly),
        pytest.param("os._exit(7)", 5, marks=pytest.mark.nightly),
        ("os._exit(0)", 0),
        pytest.param("threading.Thread(target=os._exit, args=(0,)).run()", 0, marks=pytest.mark.nightly),
        pytest.param(
            "t = threading.Thread(target=os._exit, args=(0,)); t.start(); t.join()", 5, marks=pytest.mark.nightly
        ),
    ],
)
def test_how_a_script_ends_itself(ending: str, status: int, tmp_path: Path) -> None:
    """A status other than 0 is a failure, 0 is an end. A thread that ends the process leaves no time for a report."""
    text = "import atexit, os, sys, threading, torch\natexit.register(print, 'exit function')\n"
    text += f"torch.ones(2, device='sim').add_(1)\n{ending}\n"
    run = sanitize("--world-size", "1", written(tmp_path, text), cwd=tmp_path)

    assert status == run.status, run.out + run.err
    assert ("exit function" in run.out + run.err) == ending.startswith("sys.exit")
    assert ("checked: " in run.out) == (status == 0 or "_exit(7)" in ending or "sys" in ending)


def test_hazards_before_a_failure_are_kept(tmp_path: Path) -> None:
    """A rank that dies cannot report; what it had found is printed all the same."""
    text = _BEGIN.format(wrong="race()").replace("def go_wrong", _RACE + "\n\ndef go_wrong")
    run = sanitize(written(tmp_path, text), cwd=tmp_path)

    assert run.status == 1, run.out + run.err
    assert [(one["kind"], one["ranks"]) for one in run.hazards] == [("read_after_write", [1])]
    assert "rank 1 was killed by SIGKILL" in run.out


_RACE = """
def race():
    with torch.sim.stream(torch.Stream(torch.device("sim", rank))):
        ones.mul(2)
    # Until what was found is on the disk: the harness keeps it there from time to time.
    from fsdp_conformance.harness import context
    directory = context.running().order.case.directory
    waiting = threading.Event()
    while not any('"read_after_write"' in file.read_text() for file in directory.glob("rank1.observed")):
        waiting.wait(0.05)
    os.kill(os.getpid(), signal.SIGKILL)
"""


_REFUSED = """
import torch
from torch.utils import cpp_extension

torch.ones(2, device="cuda")
for ask in (
    lambda: torch.cuda.CUDAGraph().debug_dump("graph.dot"),
    lambda: torch.cuda.MemPool(),
    lambda: torch.cuda.utilization(),
    lambda: torch.nn.DataParallel(torch.nn.ReLU(), [0])(torch.ones(2)),
    lambda: cpp_extension.load("kernels", ["kernels.cu"]),
):
    try:
        ask()
    except NotImplementedError as error:
        print("refused:", error)
torch.cuda.current_blas_handle()
"""


def test_what_cannot_be_simulated_says_so(tmp_path: Path) -> None:
    """Never silently something else: each names itself and the reason; uncaught, it is the script's failure."""
    run = sanitize("--as-cuda", "--world-size", "1", written(tmp_path, _REFUSED), cwd=tmp_path)
    refused = [line.partition("refused: ")[2] for line in run.out.splitlines() if "refused: " in line]

    assert run.status == 5, run.out + run.err
    assert [line.partition(" has no counterpart on the simulated accelerator: ")[0] for line in refused] == [
        "torch.cuda.CUDAGraph.debug_dump",
        "torch.cuda.MemPool",
        "torch.cuda.utilization",
        "torch.nn.parallel.comm.scatter",
        "a CUDA kernel of torch.utils.cpp_extension.load",
    ]
    assert "NotSimulated: torch.cuda.current_blas_handle has no counterpart" in run.verdict


def test_a_script_that_says_cuda_is_told_about_the_option(tmp_path: Path) -> None:
    """Without --as-cuda, the report has torch's own error and advice."""
    run = sanitize("--world-size", "1", written(tmp_path, "import torch\ntorch.ones(2, device='cuda')\n"), cwd=tmp_path)

    assert run.status == 5, run.out + run.err
    assert "hint: the script uses CUDA: pass --as-cuda" in run.out


@pytest.mark.nightly
def test_torch_compile_runs_eagerly_and_says_so(tmp_path: Path) -> None:
    """A note, and the model's own results."""
    text = (
        "import torch\nmodel = torch.compile(torch.nn.Linear(2, 2).to('sim'))\nmodel(torch.ones(1, 2, device='sim'))\n"
    )
    run = sanitize("--world-size", "1", written(tmp_path, text), cwd=tmp_path)

    assert run.status == 0, run.out + run.err
    assert "note: torch.compile is ignored: the model runs eagerly" in run.out


@pytest.mark.nightly
@pytest.mark.parametrize(("number", "status"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_an_interrupted_run_prints_what_it_has_and_leaves_no_process(
    number: signal.Signals, status: int, tmp_path: Path
) -> None:
    """The status is 128 and the signal; hazards found until then are printed."""
    text = _BEGIN.format(wrong="interrupted()").replace("def go_wrong", _WAITING + "\n\ndef go_wrong")
    command = words("sanitize", written(tmp_path, text))
    child = subprocess.Popen(command, cwd=tmp_path, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    try:
        wait_for(lambda: (tmp_path / "reached").exists() or child.poll() is not None, "the script")
        ranks = family(child.pid) - {child.pid}
        child.send_signal(number)
        out, err = child.communicate(timeout=DEADLINE_S)
    finally:
        if child.poll() is None:
            end_family(child.pid)
            child.wait()

    assert status == child.returncode, out + err
    assert f"interrupted by {number.name}" in err
    assert "✗ hazard 1: read after write" in out
    assert out.rstrip().endswith("interrupted after 1 hazard")
    assert len(ranks) >= 3
    # Who tracks the resources of ranks ends by itself when they have ended.
    wait_for(lambda: not set().union(*(family(pid) for pid in ranks)), "the end of the ranks")


_WAITING = """
def interrupted():
    with torch.sim.stream(torch.Stream(torch.device("sim", rank))):
        ones.mul(2)
    from fsdp_conformance.harness import context
    directory = context.running().order.case.directory
    waiting = threading.Event()
    while not any('"read_after_write"' in file.read_text() for file in directory.glob("rank1.observed")):
        waiting.wait(0.05)
    Path("reached").touch()
    waiting.wait()
"""


@pytest.mark.nightly
def test_a_controller_that_is_killed_leaves_no_process(tmp_path: Path) -> None:
    """Ranks and their server notice that it is gone, and take their files along."""
    temporary = tmp_path / "temporary"
    temporary.mkdir()
    text = "import threading, torch\nfrom pathlib import Path\nPath('reached').touch()\nthreading.Event().wait()\n"
    command = words("sanitize", written(tmp_path, text))
    child = subprocess.Popen(
        command, cwd=tmp_path, stdout=subprocess.DEVNULL, env={**os.environ, "TMPDIR": str(temporary)}
    )
    try:
        wait_for(lambda: (tmp_path / "reached").exists() or child.poll() is not None, "the script")
        others = family(child.pid) - {child.pid}
        child.kill()
        child.wait(DEADLINE_S)
        wait_for(lambda: not set().union(*(family(pid) for pid in others)), "the end of the ranks and the server")
    finally:
        if child.poll() is None:
            end_family(child.pid)
            child.wait()

    assert len(others) >= 3
    # A rank that was still being started is not among the others.
    wait_for(lambda: not list(temporary.glob("fsdp-conformance-*")), "the end of the temporary files")


@pytest.mark.nightly
def test_nothing_is_left_behind(tmp_path: Path) -> None:
    """No temporary file of ours, no block of shared memory, no process."""
    temporary = tmp_path / "temporary"
    temporary.mkdir()
    script = written(tmp_path, "import torch\ntorch.ones(2, device='sim').add_(1)\n")
    run = sanitize_alone(script, cwd=tmp_path, environment={"TMPDIR": str(temporary)})

    assert run.status == 0, run.out + run.err
    # torch makes a directory for inductor when dynamo is imported, and leaves it.
    assert [path.name for path in temporary.iterdir() if not path.name.startswith("torchinductor")] == []
