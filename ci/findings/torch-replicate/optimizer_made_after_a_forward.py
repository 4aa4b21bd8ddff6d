"""
replicate: an optimizer that is made after a forward holds the root's gathered parameters, and trains nothing of it.

Expected: an error, or the parameters change. Seen with torch 2.13.0 (gloo, CPU): model.parameters() after a forward
gives plain tensors in the place of the root's parameters, which have no gradients at the step; nothing raises.
Run: torchrun --nproc-per-node 2 ci/findings/torch-replicate/optimizer_made_after_a_forward.py
Upstream: https://github.com/pytorch/pytorch/issues/149205 (closed) is the same for fully_shard, whose code it shares.
"""

from datetime import timedelta

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed._composable.replicate_with_fsdp import replicate
from torch.distributed.device_mesh import init_device_mesh

dist.init_process_group("gloo", timeout=timedelta(seconds=30))
torch.manual_seed(0)
model = nn.Sequential(nn.Linear(4, 4, bias=False), nn.Linear(4, 4, bias=False))
mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("replicate",))
for unit in (model[0], model):
    replicate(unit, mesh=mesh)
before = [parameter.full_tensor() for parameter in model.parameters()]
model(torch.ones(1, 4))  # a warm-up
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for _ in range(2):
    model(torch.ones(1, 4)).sum().backward()
    optimizer.step()
    optimizer.zero_grad()
model.reshard()
changed = [not old.equal(new.full_tensor()) for old, new in zip(before, model.parameters(), strict=True)]
wrong = torch.tensor([float(not all(changed))])
dist.all_reduce(wrong)
if dist.get_rank() == 0:
    print(f"layers that two steps have changed: expected {[True, True]}, got {changed}")
    print("WRONG" if wrong else "right")
dist.destroy_process_group()
raise SystemExit(int(wrong.item() > 0))
