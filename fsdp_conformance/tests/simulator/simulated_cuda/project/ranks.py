"""Ranks in processes: DDP with mp.spawn, FSDP2 in MultiProcessTestCase, a program with torchrun. With 2 GPUs."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.fsdp._shard_utils import _create_chunk_sharded_tensor
from torch.nn.parallel import DistributedDataParallel
from torch.testing._internal.common_distributed import MultiProcessTestCase, requires_nccl, skip_if_lt_x_gpu
from torch.testing._internal.common_utils import run_tests

from fsdp_conformance.harness import torch_compat

PROGRAM = """
import os, torch, torch.distributed as dist
dist.init_process_group("nccl")
rank = dist.get_rank()
torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
total = torch.full((2,), rank + 1.0, device="cuda")
dist.all_reduce(total)
assert total.tolist() == [3.0, 3.0], total
dist.destroy_process_group()
"""


def train(rank: int, store: str, waits: bool) -> None:
    """One step of DDP on a batch that was copied ahead of time; without the wait it is not complete."""
    dist.init_process_group("nccl", init_method=f"file://{store}", rank=rank, world_size=2)
    torch.cuda.set_device(rank)
    model = DistributedDataParallel(nn.Linear(8, 8).cuda(), device_ids=[rank])
    side = torch.cuda.Stream()
    with torch.cuda.stream(side):
        batch = torch.randn(4, 8).pin_memory().cuda(non_blocking=True)
    if waits:
        torch.cuda.current_stream().wait_stream(side)
    batch.record_stream(torch.cuda.current_stream())
    model(batch).sum().backward()
    dist.destroy_process_group()


@pytest.mark.parametrize("waits", [True, False], ids=["right", "wrong"])
def test_ddp(waits: bool, tmp_path: Path) -> None:
    mp.spawn(train, args=(str(tmp_path / "store"), waits), nprocs=2)  # type: ignore[attr-defined]


def test_torchrun(tmp_path: Path) -> None:
    (tmp_path / "program.py").write_text(PROGRAM)
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=gpu"]
    command = [*torchrun, "--log-dir=logs", "program.py"]  # otherwise it leaves a directory of temporary files
    subprocess.run(command, cwd=tmp_path, timeout=300, check=True)


class TestFSDP2(MultiProcessTestCase):
    @property
    def world_size(self) -> int:
        return torch.cuda.device_count()

    def setUp(self) -> None:
        super().setUp()
        self._spawn_processes()

    @requires_nccl()
    @skip_if_lt_x_gpu(2)
    def test_training(self) -> None:
        """The mesh sets the device of each rank."""
        dist.init_process_group(
            "nccl", init_method=f"file://{self.file_name}", rank=self.rank, world_size=self.world_size
        )
        mesh = init_device_mesh("cuda", (self.world_size,))
        self.assertEqual(torch.cuda.current_device(), self.rank)
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 4))
        for layer in model:
            fully_shard(layer, mesh=mesh)
        fully_shard(model, mesh=mesh)
        inputs = torch.randn(4, 8, device="cuda")
        model(inputs).sum().backward()
        for parameter in model.parameters():
            self.assertEqual(str(parameter.grad.to_local().device), f"cuda:{self.rank}")  # type: ignore[union-attr]
        print("trained", os.getpid())


class TestShardedTensor(torch_compat.FSDPTest):
    """On this package's ranks: torch's class makes a group for the GPU alone."""

    @property
    def world_size(self) -> int:
        return 2

    def test_gathered(self) -> None:
        """A sharded tensor's metadata have the device of its group."""
        whole = torch.arange(6.0, device="cuda")
        group = dist.distributed_c10d._get_default_group()
        sharded = _create_chunk_sharded_tensor(whole, self.rank, 2, 2, group)
        gathered = torch.empty(6, device="cuda") if self.rank == 0 else None
        sharded.gather(0, gathered)
        if gathered is not None:
            self.assertEqual(whole, gathered)


if __name__ == "__main__":
    run_tests()
