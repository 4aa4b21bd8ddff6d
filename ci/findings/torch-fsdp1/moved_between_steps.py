"""
FullyShardedDataParallel with use_orig_params: after model.to() between steps, the next step trains something else.

Expected: what an unsharded model trains, as the model is moved to the device that it is on. Seen with torch 2.13.0
(gloo, CPU): parameters that are far off.
Run: torchrun --nproc-per-node 2 ci/findings/torch-fsdp1/moved_between_steps.py
Upstream: no report found (searched November 2026).
"""

from datetime import timedelta

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import FullyShardedDataParallel

dist.init_process_group("gloo", timeout=timedelta(seconds=30))
torch.manual_seed(0)
plain = nn.Linear(4, 2)
model = FullyShardedDataParallel(
    nn.Linear(4, 2), use_orig_params=True, device_id=torch.device("cpu"), sync_module_states=False
)
with FullyShardedDataParallel.summon_full_params(model), torch.no_grad():
    for parameter, other in zip(model.module.parameters(), plain.parameters(), strict=True):
        parameter.copy_(other)
optimizers = [torch.optim.SGD(each.parameters(), lr=0.5) for each in (plain, model)]
for step in range(3):
    for each, optimizer in zip((plain, model), optimizers, strict=True):
        each(torch.full((1, 4), 1.0 + step)).square().sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    if step == 0:
        model.to("cpu")
with FullyShardedDataParallel.summon_full_params(model):
    pairs = zip(model.module.parameters(), plain.parameters(), strict=True)
    apart = max(float((parameter - other).abs().max()) for parameter, other in pairs)
print(f"rank {dist.get_rank()}: expected equal parameters, got a difference of {apart:.2g}", flush=True)
wrong = torch.tensor([float(apart > 1e-3)])
dist.all_reduce(wrong)
if dist.get_rank() == 0:
    print("WRONG" if wrong else "right")
dist.destroy_process_group()
raise SystemExit(int(wrong.item() > 0))
