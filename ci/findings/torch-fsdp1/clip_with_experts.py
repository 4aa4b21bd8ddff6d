"""
FullyShardedDataParallel.clip_grad_norm_ with a unit on a group of one rank: ranks get and use different norms.

Expected: one norm, of all gradients. Seen with torch 2.13.0 (gloo, CPU): every rank counts its own expert only, so the
shards of the shared layer are scaled by different factors.
Run: torchrun --nproc-per-node 2 ci/findings/torch-fsdp1/clip_with_experts.py
Upstream: no report found (searched November 2026).
"""

from datetime import timedelta

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import FullyShardedDataParallel

dist.init_process_group("gloo", timeout=timedelta(seconds=30))
rank = dist.get_rank()
own, _ = dist.new_subgroups(group_size=1)
device = torch.device("cpu")
torch.manual_seed(0)
shared = nn.Linear(4, 4, bias=False)
torch.manual_seed(rank + 1)
expert = FullyShardedDataParallel(
    nn.Linear(4, 4, bias=False), process_group=own, device_id=device, use_orig_params=True
)
model = FullyShardedDataParallel(nn.Sequential(shared, expert), device_id=device, use_orig_params=True)
(model(torch.ones(2, 4)) * (rank + 1) * 10).sum().backward()
before = shared.weight.grad.clone()
norm = model.clip_grad_norm_(1.0)
factor = (shared.weight.grad / before)[before != 0].mean()
found = [None] * dist.get_world_size()
dist.all_gather_object(found, (round(norm.item(), 4), round(factor.item(), 6)))
wrong = any(each != found[0] for each in found)
if rank == 0:
    print(f"norm and factor by rank: expected the same on every rank, got {found}")
    print("WRONG" if wrong else "right")
dist.destroy_process_group()
raise SystemExit(int(wrong))
