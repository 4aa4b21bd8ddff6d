"""
fully_shard: an optimizer that is made after a forward holds the root's gathered parameters, and trains nothing of it.

Expected: an error, or the parameters change. Seen with torch 2.13.0 (gloo, CPU): model.parameters() after a forward
gives the gathered parameters of the root, which have no gradients at the step; nothing raises.
Run: torchrun --nproc-per-node 2 ci/findings/torch-fsdp2/optimizer_made_after_a_forward.py
Upstream: https://github.com/pytorch/pytorch/issues/149205 (closed, answered: make the optimizer before the forward).
"""

from datetime import timedelta

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

dist.init_process_group("gloo", timeout=timedelta(seconds=30))
torch.manual_seed(0)
model = nn.Sequential(nn.Linear(4, 4, bias=False), nn.Linear(4, 4, bias=False))
mesh = init_device_mesh("cpu", (2,))
for unit in (model[0], model):
    fully_shard(unit, mesh=mesh)
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
