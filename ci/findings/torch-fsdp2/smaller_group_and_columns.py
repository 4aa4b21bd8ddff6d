"""
fully_shard cannot gather for backward if a unit reshards to a smaller group and shards another dim than the first.

Expected: training, or a refusal by fully_shard. Seen with torch 2.13.0 (gloo, CPU): IndexError in the first backward,
because the shard that is kept after forward is flat and has no such dim.
Run: torchrun --nproc-per-node 4 ci/findings/torch-fsdp2/smaller_group_and_columns.py
Upstream: no report found (searched November 2026).
"""

from datetime import timedelta

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Shard

dist.init_process_group("gloo", timeout=timedelta(seconds=30))
model = nn.Sequential(nn.Linear(4, 4, bias=False), nn.Linear(4, 4, bias=False))
mesh = init_device_mesh("cpu", (4,))
for unit in (model[0], model):
    fully_shard(unit, mesh=mesh, reshard_after_forward=2, shard_placement_fn=lambda parameter: Shard(1))
loss = model(torch.ones(1, 4)).sum()
got = "trained"
try:
    loss.backward()
except IndexError as error:
    got = f"IndexError: {error}"
wrong = torch.tensor([float(got != "trained")])
dist.all_reduce(wrong)
if dist.get_rank() == 0:
    print(f"backward: expected trained, got {got}")
    print("WRONG" if wrong else "right")
dist.destroy_process_group()
raise SystemExit(int(wrong.item() > 0))
