"""
FullyShardedDataParallel: under no_sync, gradients accumulate in the compute dtype, whatever the reduce_dtype.

Expected: with reduce_dtype float32, gradients of 256 and 1 add up to 257.
Seen with torch 2.13.0 (gloo, CPU): 256. They are added in bfloat16, which has 8 bits of mantissa.
Run: torchrun --nproc-per-node 2 ci/findings/torch-fsdp1/accumulates_in_the_compute_dtype.py
Upstream: no report for FullyShardedDataParallel found (searched November 2026). Requests for accumulation in float32:
https://github.com/pytorch/pytorch/issues/106395 (closed), and https://github.com/pytorch/pytorch/issues/125191 for
fully_shard.
"""

from datetime import timedelta

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import FullyShardedDataParallel, MixedPrecision

dist.init_process_group("gloo", timeout=timedelta(seconds=30))
model = FullyShardedDataParallel(
    nn.Linear(2, 2, bias=False),
    mixed_precision=MixedPrecision(param_dtype=torch.bfloat16, reduce_dtype=torch.float32),
    use_orig_params=True,
    device_id=torch.device("cpu"),
)
with model.no_sync():
    model(torch.full((1, 2), 256.0)).sum().backward()
model(torch.ones(1, 2)).sum().backward()
got = sorted({value for parameter in model.parameters() for value in parameter.grad.flatten().tolist()})
print(f"rank {dist.get_rank()}: gradient after 256 and 1: expected [257.0], got {got}", flush=True)
wrong = torch.tensor([float(got != [257.0])])
dist.all_reduce(wrong)
if dist.get_rank() == 0:
    print("WRONG" if wrong else "right")
dist.destroy_process_group()
raise SystemExit(int(wrong.item() > 0))
