"""
FullyShardedDataParallel: a unit that only a micro-batch inside no_sync has used breaks the backward of the last one.

Expected: its gradient is reduced, or left for a later backward that uses it. Seen with torch 2.13.0 (gloo, CPU):
AssertionError, "All sharded parameters that received a gradient in the post-backward should use `_saved_grad_shard`".
Run: torchrun --nproc-per-node 2 ci/findings/torch-fsdp1/unit_used_only_while_deferred.py
Upstream: no report of this cause found (searched November 2026). https://github.com/pytorch/pytorch/issues/150799
(open) has the same message from another cause.
"""

from datetime import timedelta

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import FullyShardedDataParallel

dist.init_process_group("gloo", timeout=timedelta(seconds=30))
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
got = "no error"
try:
    model(torch.ones(1, 2), 1).backward()
except AssertionError as error:
    got = f"AssertionError: {error}"
print(f"rank {dist.get_rank()}: expected no error, got {got}", flush=True)
wrong = torch.tensor([float(got != "no error")])
dist.all_reduce(wrong)
if dist.get_rank() == 0:
    print("WRONG" if wrong else "right")
dist.destroy_process_group()
raise SystemExit(int(wrong.item() > 0))
