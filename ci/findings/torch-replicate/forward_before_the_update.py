"""
replicate: after a forward between backward and the optimizer step, the next forward has the root's old parameters.

Expected: the update is visible in the next forward, as with DistributedDataParallel, and every gradient stays visible.
Seen with torch 2.13.0 (gloo, CPU), with and without no_grad: the root keeps the copies that the forward made, so the
output is that of the parameters before the step.
Run: torchrun --nproc-per-node 2 ci/findings/torch-replicate/forward_before_the_update.py
Upstream: no report found (searched November 2026). `fully_shard`, whose code it shares, does the same:
https://github.com/pytorch/pytorch/issues/131965 (closed) says that the root stays gathered after forward by design.
"""

import contextlib
from datetime import timedelta

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed._composable.replicate_with_fsdp import replicate
from torch.distributed.device_mesh import init_device_mesh

dist.init_process_group("gloo", timeout=timedelta(seconds=30))
mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("replicate",))
x = torch.ones(2, 4)
wrong = torch.zeros(1)
for context in (contextlib.nullcontext, torch.no_grad):
    seen = []
    for engine in (lambda module: module, lambda module: replicate(module, mesh=mesh)):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
        engine(model[0])
        engine(model)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        model(x).sum().backward()
        with context():
            model(x)
        gradients = sum(parameter.grad is not None for parameter in model.parameters())
        optimizer.step()
        seen.append((round(model(x).sum().item(), 4), gradients))
    wrong += seen[0] != seen[1]
    print(
        f"forward in {context.__name__}: output after the step and visible gradients: expected {seen[0]}, got {seen[1]}"
    )
dist.all_reduce(wrong)
print("WRONG" if wrong else "right")
dist.destroy_process_group()
raise SystemExit(int(wrong.item() > 0))
