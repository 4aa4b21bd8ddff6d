"""
fully_shard: a unit that is called twice under reentrant checkpoints is left gathered, its gradient unreduced.

    torchrun --nproc-per-node 2 reentrant_checkpoint_called_twice.py

Seen with torch 2.13.0, gloo, CPU. With non-reentrant checkpoints, or a unit that is called once, the gradient is right.
"""

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.utils.checkpoint import checkpoint


class Twice(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.shared = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x):
        x = checkpoint(self.shared, self.first(x), use_reentrant=True)
        return checkpoint(self.shared, x, use_reentrant=True)


mesh = init_device_mesh("cpu", (2,))
torch.manual_seed(0)
plain, model = Twice(), Twice()
model.load_state_dict(plain.state_dict())
for unit in (model.first, model.shared, model):
    fully_shard(unit, mesh=mesh)
weight = model.shared.weight  # what an optimizer holds
for each in (plain, model):
    each(torch.ones(2, 4)).sum().backward()
got = None if weight.grad is None else weight.grad.full_tensor().norm().item()
if dist.get_rank() == 0:
    print(f"norm of the gradient of shared.weight: expected {plain.shared.weight.grad.norm():.4f}, got {got}")
    print(f"resharded after backward: expected True, got {model.shared.weight is weight}")
