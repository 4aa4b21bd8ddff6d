"""
fully_shard: after an exception in backward, `reset_iter_state` keeps gradients that were not reduced yet.

Expected: the gradients of the failed iteration are discarded, as its documentation says. Seen with torch 2.13.0 (gloo,
CPU): the next step adds to them. With torch 2.15.0 they are discarded.
Torch: >=2.13,<2.15
Run: torchrun --nproc-per-node 2 ci/findings/torch-fsdp2/recovery_keeps_gradients.py
Upstream: no report found (searched November 2026).
"""

from datetime import timedelta

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard


class Two(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.last = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x, interrupted=False):
        hidden = self.first(x)
        if interrupted:
            hidden.register_hook(lambda grad: 1 / 0)
        return self.last(hidden)


dist.init_process_group("gloo", timeout=timedelta(seconds=30))
model, mesh = Two(), init_device_mesh("cpu", (2,))
fully_shard(model.first, mesh=mesh)
fully_shard(model, mesh=mesh)  # owns the last layer
try:
    model(torch.ones(2, 4), interrupted=True).sum().backward()
except ZeroDivisionError:
    model.reset_iter_state()
    model.zero_grad()
model(torch.ones(2, 4)).sum().backward()
grad = model.last.bias.grad.full_tensor()
if dist.get_rank() == 0:
    print(f"gradient of the last bias: expected {[2.0] * 4}, got {grad.tolist()}")
wrong = torch.tensor([float(grad.tolist() != [2.0] * 4)])
dist.all_reduce(wrong)
if dist.get_rank() == 0:
    print("WRONG" if wrong else "right")
dist.destroy_process_group()
raise SystemExit(int(wrong.item() > 0))
