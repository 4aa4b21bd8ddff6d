"""
replicate: a write to a parameter between forward and backward is lost without a word.

Expected: the optimizer steps from the written value, as without data parallelism, or the write is refused.
Seen with torch 2.13.0 (gloo, CPU): between the passes the model has copies that the forward made, which backward frees;
the optimizer steps from the value before the write.
Run: torchrun --nproc-per-node 2 ci/findings/torch-replicate/write_between_passes.py
Upstream: no report found (searched November 2026). `fully_shard`, whose code it shares, loses writes to the root's
parameters in the same way: ci/findings/torch-fsdp2/write_between_passes.py.
"""

from datetime import timedelta

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed._composable.replicate_with_fsdp import replicate
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor

dist.init_process_group("gloo", timeout=timedelta(seconds=30))
mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("replicate",))
x = torch.ones(2, 4)
seen = []
for engine in (lambda module: module, lambda module: replicate(module, mesh=mesh)):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    engine(model[0])
    engine(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    loss = model(x).sum()
    with torch.no_grad():
        model[0].bias.fill_(1.0)
    loss.backward()
    optimizer.step()
    bias = model[0].bias.detach()
    seen.append(bias.full_tensor() if isinstance(bias, DTensor) else bias)
wrong = torch.tensor(float(not torch.allclose(*seen)))
dist.all_reduce(wrong)
if dist.get_rank() == 0:
    print(f"bias, written between the passes: expected {seen[0].tolist()}, got {seen[1].tolist()}")
    print("WRONG" if wrong else "right")
dist.destroy_process_group()
raise SystemExit(int(wrong.item() > 0))
