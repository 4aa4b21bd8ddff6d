"""
FSDP1: a unit that only a micro-batch inside no_sync has used breaks the backward of the last one, which does not
use it.

Expected: its gradient is reduced, or left for a later backward that uses it. Seen with torch 2.13 on the CPU:
AssertionError, "All sharded parameters that received a gradient in the post-backward should use `_saved_grad_shard`".
Run: torchrun --nproc-per-node 2 unit_used_only_while_deferred.py
"""

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import FullyShardedDataParallel

dist.init_process_group("gloo")
units = [
    FullyShardedDataParallel(nn.Linear(2, 2), use_orig_params=True, device_id=torch.device("cpu")) for _ in range(2)
]


class Chooser(nn.Module):
    """Runs one of two units."""

    def __init__(self) -> None:
        super().__init__()
        self.units = nn.ModuleList(units)
        self.first = nn.Linear(2, 2)

    def forward(self, x: torch.Tensor, index: int) -> torch.Tensor:
        """The first layer, then that unit."""
        return self.units[index](self.first(x)).sum()


model = FullyShardedDataParallel(Chooser(), use_orig_params=True, device_id=torch.device("cpu"))
with model.no_sync():
    model(torch.ones(1, 2), 0).backward()
try:
    model(torch.ones(1, 2), 1).backward()
    print(f"rank {dist.get_rank()}: expected and got no error")
except AssertionError as error:
    print(f"rank {dist.get_rank()}: expected no error, got AssertionError: {error}")
