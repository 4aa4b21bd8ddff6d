"""
fully_shard: a unit that is called twice under reentrant checkpoints is left gathered, its gradient unreduced.

Expected: the gradient is that of the unsharded model. Seen with torch 2.13.0 (gloo, CPU): the parameter that the
optimizer holds has none. With non-reentrant checkpoints, or a unit that is called once, the gradient is right.
Run: torchrun --nproc-per-node 2 ci/findings/torch-fsdp2/reentrant_checkpoint_called_twice.py
Upstream: no report for fully_shard found (searched November 2026). https://github.com/pytorch/pytorch/pull/89781 says
for FullyShardedDataParallel that reentrant checkpoints run hooks twice.
"""

from datetime import timedelta

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


dist.init_process_group("gloo", timeout=timedelta(seconds=30))
mesh = init_device_mesh("cpu", (2,))
torch.manual_seed(0)
plain, model = Twice(), Twice()
model.load_state_dict(plain.state_dict())
for unit in (model.first, model.shared, model):
    fully_shard(unit, mesh=mesh)
weight = model.shared.weight  # what an optimizer holds
for each in (plain, model):
    each(torch.ones(2, 4)).sum().backward()
got = None if weight.grad is None else weight.grad.full_tensor()
if dist.get_rank() == 0:
    expected = plain.shared.weight.grad.norm()
    print(f"norm of the gradient of shared.weight: expected {expected:.4f}, got {None if got is None else got.norm()}")
    print(f"resharded after backward: expected True, got {model.shared.weight is weight}")
wrong = torch.tensor([float(got is None or not got.allclose(plain.shared.weight.grad))])
dist.all_reduce(wrong)
if dist.get_rank() == 0:
    print("WRONG" if wrong else "right")
dist.destroy_process_group()
raise SystemExit(int(wrong.item() > 0))
