"""
FullyShardedDataParallel over tensor-parallel layers: clip_grad_norm_ leaves out the other tensor-parallel ranks' parts.

    torchrun --nproc-per-node 4 clip_with_tensor_parallel.py

Seen with torch 2.13.0, gloo, CPU: ranks of a tensor-parallel group get different norms and scale differently.
"""

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("data", "tensor"))
torch.manual_seed(0)
plain = nn.Sequential(nn.Linear(8, 12, bias=False), nn.Tanh(), nn.Linear(12, 8, bias=False))
model = nn.Sequential(nn.Linear(8, 12, bias=False), nn.Tanh(), nn.Linear(12, 8, bias=False))
model.load_state_dict(plain.state_dict())
parallelize_module(model, mesh["tensor"], {"0": ColwiseParallel(), "2": RowwiseParallel()})
model = FullyShardedDataParallel(model, device_mesh=mesh["data"], use_orig_params=True, device_id=torch.device("cpu"))
for each in (plain, model):
    each(torch.ones(2, 8)).sum().backward()
expected = nn.utils.clip_grad_norm_(plain.parameters(), 1.0)
got = model.clip_grad_norm_(1.0)
print(f"rank {dist.get_rank()}: expected {expected:.4f}, got {got:.4f}")
