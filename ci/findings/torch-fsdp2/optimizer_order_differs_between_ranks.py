"""
get_optimizer_state_dict gathers a full optimizer state dict in the order of each rank's own optimizer.

Expected: the state of each parameter under its name, or an error. Seen with torch 2.13.0 (gloo, CPU): if ranks gave
their optimizers the parameters in different orders, they gather different tensors at once. Shapes that fit are mixed
up, as here, and others end the process (gloo: SIGABRT).
Run: torchrun --nproc-per-node 2 ci/findings/torch-fsdp2/optimizer_order_differs_between_ranks.py
Upstream: no report for fully_shard found (searched November 2026). For FullyShardedDataParallel it was fixed in
https://github.com/pytorch/pytorch/pull/78599 and https://github.com/pytorch/pytorch/pull/84654.
"""

from datetime import timedelta

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_optimizer_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

dist.init_process_group("gloo", timeout=timedelta(seconds=30))
rank, mesh = dist.get_rank(), init_device_mesh("cpu", (2,))
model = nn.ModuleList([nn.Linear(2, 2, bias=False) for _ in range(2)])
for child in model:
    fully_shard(child, mesh=mesh)
parameters = list(model.parameters())
optimizer = torch.optim.SGD(parameters[::-1] if rank else parameters, lr=0.1, momentum=0.5)
for number, parameter in enumerate(parameters):
    parameter.grad = torch.full_like(parameter, number + 1.0)
optimizer.step()
state = get_optimizer_state_dict(model, optimizer, options=StateDictOptions(full_state_dict=True))["state"]
got = {name: state[name]["momentum_buffer"].flatten().tolist() for name in sorted(state)}
expected = {"0.weight": [1.0] * 4, "1.weight": [2.0] * 4}
print(f"rank {rank}: momentum: expected {expected}, got {got}", flush=True)
wrong = torch.tensor([float(got != expected)])
dist.all_reduce(wrong)
if dist.get_rank() == 0:
    print("WRONG" if wrong else "right")
dist.destroy_process_group()
raise SystemExit(int(wrong.item() > 0))
