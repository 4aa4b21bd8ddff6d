"""
fully_shard: if ranks use different parameters of one unit, gradients of different parameters are summed, silently.

Expected: the gradient of branch i is the mean of what rank i alone computed: 0.5 for branch 0, 1 for branch 1.
Seen with torch 2.13.0 (gloo, CPU): each rank reduces the gradients that it has: rank 0 gets 1.5 for branch 0,
rank 1 gets 1.5 for branch 1, and each has none of the other. With
set_reduce_scatter_unused_params(True), which is off by default, the gradients are right.
Run: torchrun --nproc-per-node 2 ci/findings/torch-fsdp2/branches_of_one_unit.py
Upstream: https://github.com/pytorch/pytorch/issues/171355 is exact; https://github.com/pytorch/pytorch/pull/174862
added the opt-in, which torch 2.13 has and 2.12 has not.
"""

from datetime import timedelta

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard


class Branches(nn.Module):
    def __init__(self):
        super().__init__()
        self.branches = nn.ModuleList(nn.Linear(2, 2, bias=False) for _ in range(2))

    def forward(self, x, index):
        return self.branches[index](x)


dist.init_process_group("gloo", timeout=timedelta(seconds=30))
rank, mesh = dist.get_rank(), init_device_mesh("cpu", (2,))
expected = [0.5, 1.0]
found = {}
for opted_in in (False, True):
    model = fully_shard(Branches(), mesh=mesh)
    if opted_in:
        model.set_reduce_scatter_unused_params(True)
    model(torch.full((1, 2), rank + 1.0), rank).sum().backward()
    grads = [branch.weight.grad for branch in model.branches]
    found[opted_in] = [None if grad is None else grad.to_local()[0, 0].item() for grad in grads]
    print(f"rank {rank}: gradients of the branches, opted in: {opted_in}: expected {expected}, got {found[opted_in]}")
wrong = torch.tensor([float(found[False] != expected)])
dist.all_reduce(wrong)
if rank == 0:
    print("WRONG" if wrong else "right")
dist.destroy_process_group()
raise SystemExit(int(wrong.item() > 0))
