"""
fully_shard on a 2-D mesh: with set_requires_all_reduce(False), units that the last batch does not use get no gradient.

Expected: the gradient of the first micro-batch, averaged over all ranks. Seen with torch 2.13.0 (gloo, CPU): None. The
unit's reduce-scatter is kept for a later all-reduce, and a backward that does not use the unit returns before that.
Run: torchrun --nproc-per-node 2 ci/findings/torch-fsdp2/unit_used_only_before_the_all_reduce.py
Upstream: no report found (searched November 2026). https://github.com/pytorch/pytorch/pull/126166 added the method.
"""

from datetime import timedelta

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

dist.init_process_group("gloo", timeout=timedelta(seconds=30))


class Chooser(nn.Module):
    """Runs one of two units."""

    def __init__(self) -> None:
        super().__init__()
        self.units = nn.ModuleList(nn.Linear(2, 2, bias=False) for _ in range(2))
        self.first = nn.Linear(2, 2, bias=False)

    def forward(self, x: torch.Tensor, index: int) -> torch.Tensor:
        """The first layer, then that unit."""
        return self.units[index](self.first(x)).sum()


model = Chooser()
nn.init.ones_(model.first.weight)
mesh = init_device_mesh("cpu", (2, 1), mesh_dim_names=("replicate", "shard"))
for unit in model.units:
    fully_shard(unit, mesh=mesh)
fully_shard(model, mesh=mesh)

model.set_requires_all_reduce(False)
model(torch.full((1, 2), 1.0 + dist.get_rank()), 0).backward()
model.set_requires_all_reduce(True)
model(torch.ones(1, 2), 1).backward()

grad = model.units[0].weight.grad
got = "None" if grad is None else str(grad.full_tensor()[0, 0].item())
# Ranks feed 1 and 2, the first layer doubles that, and the mean is 3.
print(f"rank {dist.get_rank()}: expected 3.0, got {got}", flush=True)
wrong = torch.tensor([float(got != "3.0")])
dist.all_reduce(wrong)
if dist.get_rank() == 0:
    print("WRONG" if wrong else "right")
dist.destroy_process_group()
raise SystemExit(int(wrong.item() > 0))
