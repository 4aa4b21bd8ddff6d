"""
FullyShardedDataParallel: clip_grad_norm_ raises if a unit is stored in float64.

Expected: the norm of all gradients, and gradients that are clipped by it, as without sharding.
Seen with torch 2.13.0 (gloo, CPU): "linalg.vector_norm: the dtype of the input (Double) should be convertible without
narrowing to the specified dtype (Float)". The norm of each gradient is computed in float32.
Run: torchrun --nproc-per-node 2 ci/findings/torch-fsdp1/clip_with_a_double_unit.py
Upstream: no report found (searched November 2026).
"""

from datetime import timedelta

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import FullyShardedDataParallel

dist.init_process_group("gloo", timeout=timedelta(seconds=30))
torch.manual_seed(0)
model = FullyShardedDataParallel(nn.Linear(4, 4).double(), use_orig_params=True, device_id=torch.device("cpu"))

model(torch.ones(2, 4).double()).sum().backward()
try:
    model.clip_grad_norm_(1.0)
    error = None
except RuntimeError as raised:
    error = str(raised).splitlines()[0]
if dist.get_rank() == 0:
    print(f"clip_grad_norm_: expected a norm, got {'one' if error is None else error}")
    print("right" if error is None else "WRONG")
dist.destroy_process_group()
raise SystemExit(int(error is not None))
