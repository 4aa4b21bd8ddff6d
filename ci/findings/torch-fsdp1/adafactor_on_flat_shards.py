"""
FullyShardedDataParallel: torch.optim.Adafactor steps on flat shards, and trains something else without an error.

Expected: parameters as without sharding, or an error. `fully_shard` raises in the first step.
Seen with torch 2.13.0 (gloo, CPU, use_orig_params=True): parameters differ after 4 steps. Adafactor takes means over
rows and columns, and a norm of the whole parameter, but it gets one-dimensional parts of parameters.
Run: torchrun --nproc-per-node 2 ci/findings/torch-fsdp1/adafactor_on_flat_shards.py
Upstream: known, https://github.com/pytorch/pytorch/issues/109581 (closed; a comment says that they cannot
compose); that nothing raises is not said there. https://github.com/pytorch/pytorch/issues/136314 (open) is on
the shapes.
"""

from datetime import timedelta

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import FullyShardedDataParallel

dist.init_process_group("gloo", timeout=timedelta(seconds=30))


def model():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 5, bias=False), nn.Tanh(), nn.Linear(5, 4, bias=False))


plain = model()
sharded = FullyShardedDataParallel(model(), use_orig_params=True, device_id=torch.device("cpu"))
for each in (plain, sharded):
    optimizer = torch.optim.Adafactor(each.parameters(), lr=0.05)
    for step in range(4):
        torch.manual_seed(step)
        x, weights = torch.randn(3, 6), torch.randn(3, 4)  # the same on both ranks, so the mean is each rank's own
        (each(x) * weights).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
with FullyShardedDataParallel.summon_full_params(sharded):
    pairs = zip(plain.parameters(), sharded.parameters(), strict=True)
    worst = max(((got - wanted).abs().max() / wanted.abs().max()).item() for wanted, got in pairs)
if dist.get_rank() == 0:
    print(f"largest relative difference of parameters after 4 steps: expected below 1e-4, got {worst:.3g}")
wrong = torch.tensor([float(worst > 1e-4)])
dist.all_reduce(wrong)
if dist.get_rank() == 0:
    print("WRONG" if wrong else "right")
dist.destroy_process_group()
raise SystemExit(int(wrong.item() > 0))
