"""
FSDP1 as in PyTorch's tutorial: ranks by mp.spawn, a convolutional net wrapped by size, CUDA events, a full state dict.

    python fsdp1.py --save model.pt
"""

import argparse
import functools
import os
from pathlib import Path

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
import torch.nn.functional as F
from torch import nn, optim
from torch.distributed.fsdp import FullStateDictConfig, FullyShardedDataParallel, StateDictType
from torch.distributed.fsdp.wrap import size_based_auto_wrap_policy
from torch.optim.lr_scheduler import StepLR
from torch.utils.data import DataLoader, TensorDataset
from torch.utils.data.distributed import DistributedSampler


def setup(rank: int, world_size: int) -> None:
    """The process group."""
    os.environ.setdefault("MASTER_ADDR", "localhost")
    os.environ.setdefault("MASTER_PORT", "12355")
    dist.init_process_group("nccl", rank=rank, world_size=world_size)


class Net(nn.Module):
    """The tutorial's net, for images of 12 x 12."""

    def __init__(self) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(1, 4, 3, 1)
        self.conv2 = nn.Conv2d(4, 8, 3, 1)
        self.dropout1 = nn.Dropout(0.25)
        self.dropout2 = nn.Dropout(0.5)
        self.fc1 = nn.Linear(128, 32)
        self.fc2 = nn.Linear(32, 10)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Batch x 1 x 12 x 12 to log-probabilities."""
        x = F.relu(self.conv1(x))
        x = F.relu(self.conv2(x))
        x = self.dropout1(F.max_pool2d(x, 2))
        x = self.dropout2(F.relu(self.fc1(torch.flatten(x, 1))))
        return F.log_softmax(self.fc2(x), dim=1)


def train(
    model: nn.Module, rank: int, loader: DataLoader[tuple[torch.Tensor, ...]], optimizer: optim.Optimizer
) -> torch.Tensor:
    """One epoch. The sum of losses, and the number of samples."""
    model.train()
    ddp_loss = torch.zeros(2).to(rank)
    for data, target in loader:
        data, target = data.to(rank), target.to(rank)  # noqa: PLW2901 - as the tutorial has it
        optimizer.zero_grad()
        loss = F.nll_loss(model(data), target, reduction="sum")
        loss.backward()
        optimizer.step()
        ddp_loss[0] += loss.item()
        ddp_loss[1] += len(data)
    dist.all_reduce(ddp_loss, op=dist.ReduceOp.SUM)
    return ddp_loss


def fsdp_main(rank: int, world_size: int, args: argparse.Namespace) -> None:
    """One rank."""
    setup(rank, world_size)
    torch.manual_seed(1)
    data = TensorDataset(torch.randn(32, 1, 12, 12), torch.randint(10, (32,)))
    sampler: DistributedSampler[tuple[torch.Tensor, ...]] = DistributedSampler(
        data, rank=rank, num_replicas=world_size, shuffle=True
    )
    loader = DataLoader(data, batch_size=8, sampler=sampler, num_workers=args.workers, pin_memory=True)
    policy = functools.partial(size_based_auto_wrap_policy, min_num_params=1000)
    torch.cuda.set_device(rank)
    begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)

    model = FullyShardedDataParallel(Net().to(rank), auto_wrap_policy=policy)
    optimizer = optim.Adadelta(model.parameters(), lr=1.0)
    scheduler = StepLR(optimizer, step_size=1, gamma=0.7)
    begin.record()
    for epoch in range(2):
        sampler.set_epoch(epoch)
        total = train(model, rank, loader, optimizer)
        scheduler.step()
        if rank == 0:
            print(f"epoch {epoch} loss {total[0].item() / total[1].item():.4f}")
    end.record()
    if rank == 0:
        end.synchronize()
        print(f"elapsed {begin.elapsed_time(end) / 1000:.1f} s, peak {torch.cuda.max_memory_allocated()} bytes")

    if args.save:
        dist.barrier()
        config = FullStateDictConfig(offload_to_cpu=True, rank0_only=True)
        with FullyShardedDataParallel.state_dict_type(model, StateDictType.FULL_STATE_DICT, config):
            state = model.state_dict()
        if rank == 0:
            torch.save(state, args.save)
            assert Path(args.save).stat().st_size > 0
    dist.destroy_process_group()


def main() -> None:
    """Start a rank per GPU."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--save")
    parser.add_argument("--workers", type=int, default=0)
    args = parser.parse_args()
    world_size = torch.cuda.device_count()
    mp.spawn(fsdp_main, args=(world_size, args), nprocs=world_size, join=True)  # type: ignore[attr-defined]


if __name__ == "__main__":
    main()
