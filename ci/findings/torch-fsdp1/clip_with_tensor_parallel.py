"""
FullyShardedDataParallel over tensor-parallel layers: clip_grad_norm_ leaves the other tensor-parallel ranks' parts out.

Expected: the norm of all gradients, on every rank. Seen with torch 2.13.0 (gloo, CPU): the norm over the ranks of the
data-parallel group only, so ranks of a tensor-parallel group get different norms and scale differently.
Run: torchrun --nproc-per-node 4 ci/findings/torch-fsdp1/clip_with_tensor_parallel.py
Upstream: no report found (searched November 2026).
"""

from datetime import timedelta

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

dist.init_process_group("gloo", timeout=timedelta(seconds=30))
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
print(f"rank {dist.get_rank()}: norm: expected {expected:.4f}, got {got:.4f}", flush=True)
wrong = torch.tensor([float(abs(expected - got) > 1e-4 * expected)])
dist.all_reduce(wrong)
if dist.get_rank() == 0:
    print("WRONG" if wrong else "right")
dist.destroy_process_group()
raise SystemExit(int(wrong.item() > 0))
