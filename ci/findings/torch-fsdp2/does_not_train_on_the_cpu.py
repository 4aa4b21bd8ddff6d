"""
fully_shard: in torch 2.6 a forward on the CPU raises AttributeError, since torch.cpu.Stream has no record_event.

Expected: the model trains, or fully_shard says that it does not support the CPU.
Seen with torch 2.6.0 (gloo, CPU): 'Stream' object has no attribute 'record_event', from the first all-gather.
Torch: >=2.6,<2.7
Run: torchrun --nproc-per-node 2 ci/findings/torch-fsdp2/does_not_train_on_the_cpu.py
Upstream: https://github.com/pytorch/pytorch/pull/145935 is exact: it added the method.
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
try:
    model(torch.ones(1, 2)).sum().backward()
    got = "no exception"
except AttributeError as error:
    got = f"AttributeError: {error}"
print(f"rank {rank}: expected no exception, got {got}")
wrong = torch.tensor([float(got != "no exception")])
dist.all_reduce(wrong)
if rank == 0:
    print("WRONG" if wrong else "right")
dist.destroy_process_group()
raise SystemExit(int(wrong.item() > 0))
