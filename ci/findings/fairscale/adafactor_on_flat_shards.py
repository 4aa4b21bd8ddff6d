"""
FairScale's FullyShardedDataParallel: torch.optim.Adafactor steps flat shards, and trains something else without error.

Expected: parameters as without sharding, or an error. Seen with fairscale 0.4.13 (torch 2.13.0, gloo, CPU): Adafactor
takes means over rows and columns, but gets one-dimensional parts of parameters. CUDA's streams are replaced.
Run: torchrun --nproc-per-node 2 ci/findings/fairscale/adafactor_on_flat_shards.py
Upstream: no report found (searched November 2026).
"""

import os
import sys
from datetime import timedelta
from unittest.mock import MagicMock

import torch
import torch.distributed as dist

os.environ["ENABLE_NCCL_BASE_COLLECTIVES"] = "0"  # gloo refuses the shapes of these
stub = MagicMock()
for name in ("Stream", "Event", "current_stream", "stream", "synchronize", "empty_cache", "device"):
    setattr(torch.cuda, name, stub)
torch.cuda.is_available = lambda: True
torch.Tensor.cuda = lambda tensor: tensor
torch.Tensor.record_stream = lambda tensor, stream: None
from fairscale.nn.data_parallel import FullyShardedDataParallel  # noqa: E402

dist.init_process_group("gloo", timeout=timedelta(seconds=30))
torch.manual_seed(0)
plain, inner = torch.nn.Linear(6, 4, bias=False), torch.nn.Linear(6, 4, bias=False)
inner.load_state_dict(plain.state_dict())
sharded = FullyShardedDataParallel(inner, compute_device=torch.device("cpu"))
x = torch.randn(5, 6)
for model in (plain, sharded):
    optimizer = torch.optim.Adafactor(model.parameters(), lr=0.1)
    model(x).square().sum().backward()
    optimizer.step()
with sharded.summon_full_params(volatile=True):
    apart = (plain.weight - sharded.module.weight).abs().max().item()
print(f"difference of the weights after a step: expected about 1e-7, got {apart:.2g}")
dist.destroy_process_group()
print("WRONG" if apart > 1e-5 else "right")
sys.exit(apart > 1e-5)
