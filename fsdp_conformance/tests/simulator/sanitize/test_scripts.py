"""
Training scripts as people write them, unchanged: clean where they are right, and where a wait is missing the two lines
are named.
"""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from fsdp_conformance.tests.simulator.sanitize.sanitize_runs import (
    SCRIPTS,
    Sanitized,
    needs_simulator,
    sanitize,
    written,
)

pytestmark = [pytest.mark.slow, needs_simulator]


def as_cuda(script: str, *arguments: str, cwd: Path, world_size: int = 2) -> Sanitized:
    """Run one of the scripts, which say "cuda"."""
    path = str(SCRIPTS / f"{script}.py")
    return sanitize("--as-cuda", "--world-size", str(world_size), path, *arguments, cwd=cwd)


@pytest.mark.nightly_params("fsdp2---mixed-precision --dcp checkpoint")
@pytest.mark.parametrize(
    ("script", "arguments"),
    [
        pytest.param("ddp", ["--checkpoint", "model.pt"], marks=pytest.mark.nightly),
        pytest.param("fsdp1", ["--save", "model.pt"], marks=pytest.mark.nightly),
        ("fsdp1", ["--workers", "1"]),
        pytest.param("fsdp2", ["--explicit-prefetching"], marks=pytest.mark.nightly),
        ("fsdp2", ["--mixed-precision", "--dcp", "checkpoint"]),
        pytest.param("mixed_precision", ["--dtype", "float16"], marks=pytest.mark.nightly),
        pytest.param("mixed_precision", ["--dtype", "bfloat16", "--old-names"], marks=pytest.mark.nightly),
        pytest.param("prefetch", [], marks=pytest.mark.nightly),
        pytest.param("overlap", [], marks=pytest.mark.nightly),
        pytest.param("readback", [], marks=pytest.mark.nightly),
    ],
    ids=lambda value: value if isinstance(value, str) else " ".join(value) or "plain",
)
def test_a_correct_script_is_clean(script: str, arguments: list[str], tmp_path: Path) -> None:
    """It runs unchanged, with accesses checked on every rank and nothing found."""
    run = as_cuda(script, *arguments, cwd=tmp_path)

    assert run.status == 0, run.out + run.err
    assert run.verdict.startswith("clean: ")
    assert [one["ending"] for one in run.report["ranks"]] == ["finished", "finished"]
    assert all(one["accesses"] > 20 for one in run.report["ranks"])
    assert all(sum(one["waits"].values()) > 0 for one in run.report["ranks"])


def test_cuda_answers_as_a_script_expects(tmp_path: Path) -> None:
    """Devices, factories, moving, streams, random numbers, autocast, checkpoints, pinned memory, threads, modules."""
    run = as_cuda("cuda_surface", cwd=tmp_path, world_size=1)

    assert run.status == 0, run.out + run.err
    assert run.out.count("[rank 0] ok ") == 12


@pytest.fixture(name="unwaited", scope="module")
def _unwaited(tmp_path_factory: pytest.TempPathFactory) -> Sanitized:
    """The prefetcher without a wait for its copies."""
    return as_cuda("prefetch", "--without", "wait_stream", cwd=tmp_path_factory.mktemp("unwaited"))


def test_a_prefetcher_that_is_not_waited_for_is_found(unwaited: Sanitized) -> None:
    """The copy on the side stream, and the line that uses the batch; the same on every rank."""
    run = unwaited

    assert run.status == 1, run.out + run.err
    assert [(one["kind"], one["ranks"]) for one in run.hazards if one["kind"] == "read_after_write"] != []
    assert ("inputs = inputs * 2 - 1", "loss = nn.functional.cross_entropy(model(inputs), targets)") in run.lines()
    assert all(one["ranks"] == [0, 1] for one in run.hazards)


def test_a_missing_record_stream_is_found(tmp_path: Path) -> None:
    """The batch is freed while the current stream still uses it, and the next copy gets its memory."""
    run = as_cuda("prefetch", "--without", "record_stream", cwd=tmp_path)

    assert run.status == 1, run.out + run.err
    assert {one["kind"] for one in run.hazards} == {"reuse_in_flight"}
    assert "record_stream" in run.hazards[0]["text"]
    assert set(run.lines()) == {
        ("loss.backward()", "inputs = batch[0].to(self.device, non_blocking=True)"),
        ("loss.backward()", "targets = batch[1].to(self.device, non_blocking=True)"),
    }


@pytest.mark.nightly
def test_a_copy_to_the_host_that_is_read_too_early_is_found(tmp_path: Path) -> None:
    """The copy, and the line that reads it on the host."""
    run = as_cuda("readback", "--unsafe", cwd=tmp_path)

    assert run.status == 1, run.out + run.err
    assert {one["kind"] for one in run.hazards} == {"host_read_in_flight"}
    assert [
        ('losses.append(loss.to("cpu", non_blocking=True))', "total = sum(float(loss) for loss in losses)")
    ] == run.lines()


@pytest.mark.nightly
def test_a_gradient_that_is_used_before_its_all_reduce_is_done_is_found(tmp_path: Path) -> None:
    """The collective, issued by a hook in backward, and the optimizer's step."""
    run = as_cuda("overlap", "--without", "work_wait", cwd=tmp_path)

    assert run.status == 1, run.out + run.err
    assert run.lines() != []
    assert all("dist.all_reduce(held.grad" in then for then, _ in run.lines()), run.lines()
    assert "optimizer.step()" in {now for _, now in run.lines()}


@pytest.mark.nightly
def test_a_staging_buffer_that_is_written_too_early_is_found(tmp_path: Path) -> None:
    """The copy that reads the pinned buffer, and the line that fills it again on the host."""
    run = as_cuda("overlap", "--without", "staging_wait", cwd=tmp_path)

    assert run.status == 1, run.out + run.err
    assert {one["kind"] for one in run.hazards} == {"host_write_in_flight"}
    assert [("inputs = staging.to(device, non_blocking=True)", "staging.fill_(dist.get_rank() + step)")] == run.lines()


@pytest.mark.nightly
def test_runs_agree(unwaited: Sanitized, tmp_path: Path) -> None:
    """Hazards depend on the program alone: twice the same, to the letter."""
    again = as_cuda("prefetch", "--without", "wait_stream", cwd=tmp_path)

    assert unwaited.hazards == again.hazards != []


@pytest.mark.nightly
def test_the_mode_raise_stops_at_the_first_hazard(tmp_path: Path) -> None:
    """The script fails on the line, and the status is that of a hazard."""
    run = sanitize(
        "--as-cuda", "--mode", "raise", str(SCRIPTS / "prefetch.py"), "--without", "wait_stream", cwd=tmp_path
    )

    assert run.status == 1, run.out + run.err
    assert "the script failed" in run.verdict
    assert "loss = nn.functional.cross_entropy(model(inputs), targets)" in run.out


@pytest.mark.nightly
def test_the_mode_poison_shows_where_a_hazard_leads(tmp_path: Path) -> None:
    """Values that depend on a hazard are NaN."""
    run = sanitize(
        "--as-cuda", "--mode", "poison", str(SCRIPTS / "prefetch.py"), "--without", "wait_stream", cwd=tmp_path
    )

    assert run.status == 1, run.out + run.err
    assert "[rank 0] loss nan" in run.out


_SIM = """
import os

import torch
import torch.distributed as dist

device = torch.device("sim", int(os.environ["LOCAL_RANK"]))
torch.sim.set_device(device)
assert torch.accelerator.current_accelerator().type == "sim"
dist.init_process_group()
total = torch.ones(4, device=device)
dist.all_reduce(total)
side = torch.Stream(device)
with torch.sim.stream(side):
    doubled = total * 2
print(doubled.sum().item())
dist.destroy_process_group()
"""


@pytest.mark.nightly
def test_a_race_is_found_without_numbers(unwaited: Sanitized, tmp_path: Path) -> None:
    """`--ordering-only` finds what the whole computation finds, at the same lines, and says how it was found."""
    script = str(SCRIPTS / "prefetch.py")
    run = sanitize("--as-cuda", "--ordering-only", script, "--without", "wait_stream", cwd=tmp_path)

    assert run.status == 1
    assert "ordering only" in run.out.splitlines()[0]
    assert "; ordering only, without numbers" in run.out
    assert run.hazards == unwaited.hazards != []


@pytest.mark.nightly
def test_a_script_may_choose_how_it_starts_processes(tmp_path: Path) -> None:
    """`set_start_method` raises in a process that has a method already: ranks have none. DDP's own hooks work, too."""
    script = written(
        tmp_path,
        """
import torch
import torch.distributed as dist
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import bf16_compress_hook

torch.multiprocessing.set_start_method("spawn")
dist.init_process_group("nccl")
torch.cuda.set_device(dist.get_rank())
model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(4, 4).cuda())
model.register_comm_hook(None, bf16_compress_hook)
model(torch.ones(2, 4, device="cuda")).sum().backward()
assert model.module.weight.grad.abs().sum() > 0
assert [int(part) for part in torch.version.cuda.split(".")] >= [12, 0]
dist.destroy_process_group()
""",
    )

    run = sanitize("--as-cuda", script, cwd=tmp_path)

    assert run.status == 0, run.out + run.err


@pytest.mark.nightly
def test_a_script_may_ask_for_the_device_itself(tmp_path: Path) -> None:
    """Device sim, no backend named; its race between streams is found, with labels and lines."""
    run = sanitize("--world-size", "3", written(tmp_path, _SIM), cwd=tmp_path)

    assert run.status == 1, run.out + run.err
    assert ("dist.all_reduce(total)", "doubled = total * 2") in run.lines()
    assert "on ranks 0, 1, 2" in run.verdict


_LABELS = """
import torch
from torch import nn

model = nn.Sequential(nn.Linear(4, 4), nn.ReLU()).to("cuda")
data = torch.ones(2, 4, device="cuda")
side = torch.cuda.Stream()
with torch.cuda.nvtx.range("late"), torch.cuda.stream(side):
    data.mul_(2)
model(data)
with torch.no_grad(), torch.cuda.stream(side):
    model[0].weight.zero_()
"""


def test_hazards_name_modules_ranges_and_parameters(tmp_path: Path) -> None:
    """The module whose forward reads, the range of NVTX that writes, the parameter that is overwritten."""
    run = sanitize("--as-cuda", "--world-size", "1", written(tmp_path, _LABELS), cwd=tmp_path)

    assert run.status == 1, run.out + run.err
    labels = {(one["then"]["site"]["label"], one["now"]["site"]["label"]) for one in run.hazards}
    assert ("late", "Sequential.0") in labels
    assert "Sequential.0.weight" in {one["now"]["site"]["tensor"] for one in run.hazards}


@pytest.mark.nightly
def test_a_rank_may_get_its_number_as_an_argument(tmp_path: Path) -> None:
    """`torch.distributed.launch` passes it in the same way."""
    script = written(
        tmp_path,
        """
import os, sys, torch

assert sys.argv[1:] == ["--local_rank=" + os.environ["RANK"], "{}"], sys.argv
torch.cuda.set_device(int(sys.argv[1].split("=")[1]))
torch.ones(2, device="cuda").add_(1)
""",
    )

    run = sanitize("--as-cuda", script, "--local_rank={local_rank}", "{}", cwd=tmp_path)

    assert run.status == 0, run.out + run.err


@pytest.mark.nightly
def test_a_model_may_be_exported(tmp_path: Path) -> None:
    """torch.export calls it with parameters that have no memory: there is nothing to name."""
    script = written(
        tmp_path,
        """
import torch

model = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.ReLU()).cuda()
data = torch.ones(2, 4, device="cuda")
exported = torch.export.export(model, (data,), strict=False).module()
assert torch.equal(exported(data), model(data))
""",
    )

    run = sanitize("--as-cuda", "--world-size", "1", script, cwd=tmp_path)

    assert run.status == 0, run.out + run.err


def test_a_script_that_never_used_the_device_is_not_clean(tmp_path: Path) -> None:
    """Status 2, and what to do."""
    run = sanitize(written(tmp_path, "import torch\nprint(torch.ones(3).sum())\n"), cwd=tmp_path)

    assert run.status == 2
    assert "nothing was checked" in run.verdict


_DIFFERENT = """
import torch
import torch.distributed as dist

dist.init_process_group("nccl")
torch.cuda.set_device(dist.get_rank())
norm = torch.ones(4, device="cuda")
dist.all_reduce(norm, op=dist.ReduceOp.MAX if dist.get_rank() else dist.ReduceOp.SUM)
print(norm.sum().item())
"""


def test_ranks_that_reduce_differently_are_named(tmp_path: Path) -> None:
    """Both calls appear once, a stopped script is not blamed, and SARIF and annotations have the line."""
    run = sanitize(
        "--as-cuda", "--sarif", "found.sarif", written(tmp_path, _DIFFERENT), cwd=tmp_path,
        environment={"GITHUB_ACTIONS": "true"},
    )  # fmt: skip

    assert run.status == 1, run.out + run.err
    assert run.out.count("✗ collectives 1: the reductions of a collective differ") == 1
    assert "the script failed" not in run.out
    assert "1 finding about collectives of ranks 0, 1 [exit 1]" in run.out
    assert "::error file=train.py,line=8,title=different_collectives::" in run.out
    (disagreement,) = run.report["collectives"]
    assert [(party["rank"], party["place"]["line"]) for party in disagreement["parties"]] == [(0, 8), (1, 8)]
    (result,) = json.loads((tmp_path / "found.sarif").read_text())["runs"][0]["results"]
    assert result["locations"][0]["physicalLocation"]["region"]["startLine"] == 8


_BARRIER_FIRST = """
import torch
import torch.distributed as dist

dist.init_process_group("nccl")
dist.barrier()
torch.cuda.set_device(dist.get_rank())
dist.all_reduce(torch.ones(4, device="cuda"))
"""


@pytest.mark.parametrize("sets_device", [True, pytest.param(False, marks=pytest.mark.nightly)])
def test_a_barrier_before_any_device_is_set_is_right(sets_device: bool, tmp_path: Path) -> None:
    """NCCL's group guesses the device by the rank. Tensors of all ranks on device 0 are not right."""
    script = _BARRIER_FIRST if sets_device else _BARRIER_FIRST.replace("torch.cuda.set_device(dist.get_rank())\n", "")

    run = sanitize("--as-cuda", written(tmp_path, script), cwd=tmp_path)

    assert run.status == (0 if sets_device else 1), run.out + run.err
    assert ("use the same device, 0" in run.out) is not sets_device


_NUMPY = """
import numpy as np
import torch
import torch.distributed as dist

dist.init_process_group("nccl")
rank = dist.get_rank()
torch.cuda.set_device(rank)
counts = np.array([2, 2])
value, received = torch.full((4,), float(rank), device="cuda"), torch.empty(4, device="cuda")
dist.all_to_all_single(received, value, list(counts), list(counts))
group = dist.new_group(list(np.arange(2)))
one = torch.full((1,), rank, device="cuda")
dist.broadcast(one, src=np.int64(1), group=group)
dist.reduce(one, dst=np.int32(0))
if rank == 0:
    dist.send(value, np.int64(1), group=group)
else:
    dist.recv(value, np.int64(0), group=group)
print(received.tolist(), value.tolist(), one.item())
"""


@pytest.mark.nightly
def test_numbers_of_numpy_are_numbers(tmp_path: Path) -> None:
    """Split sizes, members of groups, roots and peers."""
    run = sanitize("--as-cuda", written(tmp_path, _NUMPY), cwd=tmp_path)

    assert run.status == 0, run.out + run.err
    for rank, one in ((0, 2), (1, 1)):
        assert f"[rank {rank}] [0.0, 0.0, 1.0, 1.0] [0.0, 0.0, 0.0, 0.0] {one}" in run.out


_GROUPS = """
import torch
import torch.distributed as dist

dist.init_process_group("nccl")
rank = dist.get_rank()
torch.cuda.set_device(rank)
everyone = dist.new_group()
mine = dist.new_group([rank], use_local_synchronization=True)
alone = dist.new_group([rank])
if rank == 1:
    dist.new_group([1])
dist.all_reduce(torch.ones(4, device="cuda"), group=everyone)
"""


@pytest.mark.nightly
def test_a_group_that_its_members_alone_make_is_found(tmp_path: Path) -> None:
    """Every rank must call `new_group`, except for groups that are made so on purpose, and those of one rank each."""
    run = sanitize("--as-cuda", written(tmp_path, _GROUPS), cwd=tmp_path)

    assert run.status == 1, run.out + run.err
    (disagreement,) = run.report["collectives"]
    assert disagreement["kind"] == "missing_collective"
    assert "rank 1 calls new_group(1) on the default group at train.py:12 in <module>, but rank 0 has ended" in (
        " ".join(run.out.split())
    )


_HANGING = """
import threading
import torch
import torch.distributed as dist

dist.init_process_group("nccl")
rank = dist.get_rank()
torch.cuda.set_device(rank)
ones = torch.ones(4, device="cuda")
dist.all_reduce(ones)
if rank == 1:
    threading.Event().wait()
dist.broadcast(ones, src=0)
torch.cuda.synchronize()
"""


@pytest.mark.nightly
def test_a_hang_names_the_collective_and_where_the_others_are(tmp_path: Path) -> None:
    """The call that one rank has made and the line at which the other one is."""
    run = sanitize("--as-cuda", "--timeout", "30", written(tmp_path, _HANGING), cwd=tmp_path)

    assert run.status == 5, run.out + run.err
    (line,) = run.report["unanswered"]
    assert line.startswith("only rank 0 called broadcast(4 float32, root 0) on the default group at ")
    assert "train.py:13 in <module>; rank 1 is at " in line
    assert "train.py:12 in <module>, after all_reduce(SUM, 4 float32) on the default group at " in line
    assert line in run.out
