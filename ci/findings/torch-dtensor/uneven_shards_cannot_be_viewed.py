"""
DTensor.redistribute from one sharded dim to another leaves uneven shards non-contiguous, so `view` and `reshape` raise.

Expected: the DTensor says that it is contiguous, so it can be viewed, as it can after `distribute_tensor`. Seen with
torch 2.13.0 (gloo, CPU): the local tensor is a view of one with padding, and both raise "view size is not compatible
with input tensor's size and stride".
Run: torchrun --nproc-per-node 2 ci/findings/torch-dtensor/uneven_shards_cannot_be_viewed.py
Upstream: no report found (searched November 2026). Nearest: https://github.com/pytorch/pytorch/issues/173041, the same
after a redistribution to Replicate(), which is right with torch 2.13.0.
"""

from datetime import timedelta

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor

dist.init_process_group("gloo", timeout=timedelta(seconds=30))
mesh = init_device_mesh("cpu", (2,))
whole = torch.arange(30.0).view(3, 2, 5)
moved = distribute_tensor(whole, mesh, [Shard(2)]).redistribute(placements=[Shard(0)])
problems = []
for name, call in {"view": lambda: moved.view(3, 10), "reshape": lambda: moved.reshape(3, 10)}.items():
    problem = "none"
    try:
        call()
    except RuntimeError as error:
        problem = str(error)
        problems.append(problem)
    if dist.get_rank() == 0:
        print(f"is_contiguous {moved.is_contiguous()}, error of {name}: expected none, got {problem}")
wrong = torch.tensor([float(bool(problems))])
dist.all_reduce(wrong)
if dist.get_rank() == 0:
    print("WRONG" if wrong else "right")
dist.destroy_process_group()
raise SystemExit(int(wrong.item() > 0))
