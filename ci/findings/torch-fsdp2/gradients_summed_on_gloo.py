"""
fully_shard: on the CPU, torch 2.8 sums gradients instead of averaging them, silently.

Expected: the gradient is the mean over the ranks, 1.5.
Seen with torch 2.8.0 (gloo, CPU): 3, the sum. FSDP2 reduces with ReduceOp.AVG, and reduce_scatter_tensor of gloo leaves
out the division; its all_reduce divides.
Torch: >=2.8,<2.9
Run: torchrun --nproc-per-node 2 ci/findings/torch-fsdp2/gradients_summed_on_gloo.py
Upstream: https://github.com/pytorch/pytorch/issues/162338 is exact.
"""

from datetime import timedelta

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

dist.init_process_group("gloo", timeout=timedelta(seconds=30))
rank, mesh = dist.get_rank(), init_device_mesh("cpu", (2,))
model = fully_shard(nn.Linear(2, 2, bias=False), mesh=mesh)
model(torch.full((1, 2), rank + 1.0)).sum().backward()
gradient = model.weight.grad.to_local()[0, 0].item()
reduced = torch.empty(1)
dist.reduce_scatter_tensor(reduced, torch.full((2,), rank + 1.0), op=dist.ReduceOp.AVG)
print(f"rank {rank}: gradient: expected 1.5, got {gradient}; reduce_scatter_tensor: expected 1.5, got {reduced.item()}")
wrong = torch.tensor([float(gradient != 1.5)])
dist.all_reduce(wrong)
if rank == 0:
    print("WRONG" if wrong else "right")
dist.destroy_process_group()
raise SystemExit(int(wrong.item() > 0))
