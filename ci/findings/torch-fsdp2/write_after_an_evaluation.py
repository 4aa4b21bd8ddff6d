"""
fully_shard: a write to a parameter of the root after an evaluation is lost without a word.

Expected: the write changes the parameter that the next step trains, as without sharding.
Seen with torch 2.13.0 (gloo, CPU): the root stays gathered after a forward under no_grad, so the write reaches the
gathered copy. The next forward uses it, and the optimizer steps from the value before the write. Units that are
gathered ahead of the next forward lose writes in the same way.
Run: torchrun --nproc-per-node 2 ci/findings/torch-fsdp2/write_after_an_evaluation.py
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


def train(shard, evaluates):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    if shard:
        fully_shard(model[0], mesh=mesh)
        fully_shard(model, mesh=mesh)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    if evaluates:
        with torch.no_grad():
            model(x)
    with torch.no_grad():
        model[1].bias.fill_(1.0)
    model(x).sum().backward()
    optimizer.step()
    value = model[1].bias
    return (value.full_tensor() if isinstance(value, DTensor) else value).detach()


wrong = torch.zeros(1)
for evaluates in (False, True):
    expected, got = train(False, evaluates), train(True, evaluates)
    wrong += not torch.allclose(expected, got)
    if dist.get_rank() == 0:
        before = "after an evaluation" if evaluates else "before anything has run"
        print(f"bias of the root, written {before}: expected {expected.tolist()}, got {got.tolist()}")
dist.all_reduce(wrong)
if dist.get_rank() == 0:
    print("WRONG" if wrong else "right")
dist.destroy_process_group()
raise SystemExit(int(wrong.item() > 0))
