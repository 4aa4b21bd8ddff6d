"""
fully_shard: a unit that is called twice in a forward is reduced twice, if an earlier micro-batch was deferred.

Expected: one reduce-scatter for each unit in the step, as without set_requires_gradient_sync(False).
Seen with torch 2.13.0 (gloo, CPU): the end of the first call in backward reduces what was deferred, and the end of the
second one the rest. The gradients are right; the unit's traffic doubles.
Run: torchrun --nproc-per-node 2 ci/findings/torch-fsdp2/unit_called_twice_when_deferred.py
Upstream: no report found (searched November 2026).
"""

from datetime import timedelta

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

dist.init_process_group("gloo", timeout=timedelta(seconds=30))
mesh = init_device_mesh("cpu", (2,))
x = torch.ones(2, 4, requires_grad=True)
calls = []
# It has a new name since torch 2.13.
name = "reduce_scatter_single" if hasattr(dist, "reduce_scatter_single") else "reduce_scatter_tensor"
reduce_scatter = getattr(dist, name)


def counted(*args, **kwargs):
    calls.append(1)
    return reduce_scatter(*args, **kwargs)


setattr(dist, name, counted)


def reductions(deferred):
    torch.manual_seed(0)
    shared = nn.Linear(4, 4)
    model = nn.Sequential(shared, nn.ReLU(), shared)
    fully_shard(shared, mesh=mesh)
    fully_shard(model, mesh=mesh)
    if deferred:
        model.set_requires_gradient_sync(False)
        model(x).sum().backward()
        model.set_requires_gradient_sync(True)
    calls.clear()
    model(x).sum().backward()
    return len(calls)


plain, deferred = reductions(False), reductions(True)
if dist.get_rank() == 0:
    print(f"reduce-scatters of one unit in a backward: expected {plain}, got {deferred} after a deferred micro-batch")
    print("WRONG" if deferred > plain else "right")
dist.destroy_process_group()
raise SystemExit(int(deferred > plain))
