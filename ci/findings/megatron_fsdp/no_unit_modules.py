"""
megatron_fsdp.fully_shard_model divides by zero if no module is a unit, which is its default.

Expected: as documented, `fsdp_unit_modules=None` takes the memory of DDP at its peak. Got with megatron-fsdp 0.6.1 and
its default strategy (ZeRO-3): ZeroDivisionError. CUDA's streams are replaced, so that it runs on the CPU.
Run: python ci/findings/megatron_fsdp/no_unit_modules.py
Upstream: no report found (searched November 2026)
"""

import sys
from unittest.mock import MagicMock

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

for name in ("Stream", "Event", "current_stream", "stream", "synchronize", "empty_cache", "device"):
    setattr(torch.cuda, name, MagicMock())
torch.cuda.current_device = lambda: 0
torch.Tensor.cuda = lambda tensor: tensor
torch.Tensor.record_stream = lambda tensor, stream: None
from megatron_fsdp import fully_shard_model  # noqa: E402

dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
mesh = init_device_mesh("cpu", (1, 1), mesh_dim_names=("dp", "tp"))
problem = ""
try:
    fully_shard_model(torch.nn.Linear(3, 2), mesh, dp_shard_dim="dp", tp_dim="tp", device=torch.device("cpu"))
except ZeroDivisionError as error:
    problem = str(error)
print(f"expected no error, got ZeroDivisionError: {problem}" if problem else "expected and got no error")
dist.destroy_process_group()
print("WRONG" if problem else "right")
sys.exit(bool(problem))
