"""
fully_shard: a write to a parameter of the root between forward and backward is lost without a word.

Expected: the optimizer steps from the written value, as without sharding, or the write is refused.
Seen with torch 2.13.0 (gloo, CPU): the root stays gathered after forward, so the write reaches the gathered copy, which
backward frees; the optimizer steps from the value before the write. With reshard_after_forward=True on the root, and in
other units, the write reaches the shard and takes effect.
Run: torchrun --nproc-per-node 2 ci/findings/torch-fsdp2/write_between_passes.py
Upstream: no report found (searched November 2026). That the root stays gathered after forward is by design:
https://github.com/pytorch/pytorch/issues/131965 (closed).
"""

from datetime import timedelta

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

dist.init_process_group("gloo", timeout=timedelta(seconds=30))
mesh = init_device_mesh("cpu", (2,))
x = torch.ones(2, 4)


def train(shard, name):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    if shard:
        fully_shard(model[0], mesh=mesh)
        fully_shard(model, mesh=mesh)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    loss = model(x).sum()
    with torch.no_grad():
        model.get_parameter(name).fill_(1.0)
    loss.backward()
    optimizer.step()
    value = model.get_parameter(name)
    return (value.full_tensor() if isinstance(value, DTensor) else value).detach()


wrong = torch.zeros(1)
for name, unit in (("0.bias", "a unit"), ("1.bias", "the root")):
    expected, got = train(False, name), train(True, name)
    wrong += not torch.allclose(expected, got)
    if dist.get_rank() == 0:
        print(f"bias of {unit}, written between the passes: expected {expected.tolist()}, got {got.tolist()}")
dist.all_reduce(wrong)
if dist.get_rank() == 0:
    print("WRONG" if wrong else "right")
dist.destroy_process_group()
raise SystemExit(int(wrong.item() > 0))
