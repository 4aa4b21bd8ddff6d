"""
get_optimizer_state_dict of a fully_shard model raises KeyError after a forward under no_grad.

Expected: the state. Seen with torch 2.13.0 (one process, CPU): KeyError with a DTensor, because the root stays gathered
after the forward, so that model.parameters() are not those that the optimizer has.
Run: python ci/findings/torch-fsdp2/optimizer_state_after_an_evaluation.py
Upstream: no report of it for fully_shard found (searched November 2026). The same with FullyShardedDataParallel:
https://github.com/Lightning-AI/pytorch-lightning/issues/18971 (closed).
"""

import torch
import torch.distributed as dist
from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
model = torch.nn.Linear(2, 2)
fully_shard(model, mesh=init_device_mesh("cpu", (1,)))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.5)
model(torch.ones(1, 2)).sum().backward()
optimizer.step()
optimizer.zero_grad()
with torch.no_grad():
    model(torch.ones(1, 2))
try:
    got = f"state of {sorted(get_optimizer_state_dict(model, optimizer)['state'])}"
except KeyError:
    got = "KeyError"
wrong = got == "KeyError"
print(f"expected state of ['bias', 'weight'], got {got}")
print("WRONG" if wrong else "right")
dist.destroy_process_group()
raise SystemExit(int(wrong))
