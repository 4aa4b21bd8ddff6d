"""
fully_shard: after a forward between backward and the optimizer step, the next forward has the root's old parameters.

Expected: the update is visible in the next forward, as without sharding, and every gradient stays visible.
Seen with torch 2.13.0 (gloo, CPU), with and without no_grad: the root stays gathered after the forward, so the output
is that of the parameters before the step. With reshard_after_forward=True on the root it does not happen.
Run: torchrun --nproc-per-node 2 ci/findings/torch-fsdp2/forward_before_the_update.py
Upstream: no report found (searched November 2026). That the root stays gathered after forward is by design:
https://github.com/pytorch/pytorch/issues/131965 (closed).
"""

import contextlib
from datetime import timedelta

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

dist.init_process_group("gloo", timeout=timedelta(seconds=30))
mesh = init_device_mesh("cpu", (2,))
x = torch.ones(2, 4)


def train(shard, context):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    if shard:
        fully_shard(model[0], mesh=mesh)
        fully_shard(model, mesh=mesh)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    model(x).sum().backward()
    with context():
        model(x)
    gradients = sum(parameter.grad is not None for parameter in model.parameters())
    optimizer.step()
    return model(x).sum().item(), gradients


wrong = torch.zeros(1)
for name, context in (("with a graph", contextlib.nullcontext), ("under no_grad", torch.no_grad)):
    (expected, all_gradients), (got, gradients) = train(False, context), train(True, context)
    wrong += abs(expected - got) > 1e-4 or gradients != all_gradients
    if dist.get_rank() == 0:
        print(f"forward {name}: output after the step: expected {expected:.4f}, got {got:.4f}")
        print(f"forward {name}: gradients that are visible: expected {all_gradients}, got {gradients}")
dist.all_reduce(wrong)
if dist.get_rank() == 0:
    print("WRONG" if wrong else "right")
dist.destroy_process_group()
raise SystemExit(int(wrong.item() > 0))
