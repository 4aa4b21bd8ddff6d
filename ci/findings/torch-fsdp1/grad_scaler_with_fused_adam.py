"""
ShardedGradScaler with torch.optim.AdamW(fused=True): a step after `unscale_` raises RuntimeError.

Expected: a step, as with torch.amp.GradScaler. Seen with torch 2.13.0 (gloo, CPU): "output with shape [] doesn't match
the broadcast shape [1]", because this scaler's flag for an overflow has one dimension, and fused optimizers subtract it
from their step counters, which have none.
Run: torchrun --nproc-per-node 2 ci/findings/torch-fsdp1/grad_scaler_with_fused_adam.py
Upstream: https://github.com/pytorch/pytorch/issues/140514 (open) has the error in FSDP, without the cause.
"""

from datetime import timedelta

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import FullyShardedDataParallel
from torch.distributed.fsdp.sharded_grad_scaler import ShardedGradScaler

dist.init_process_group("gloo", timeout=timedelta(seconds=30))
model = FullyShardedDataParallel(nn.Linear(2, 2), use_orig_params=True, device_id=torch.device("cpu"))
optimizer = torch.optim.AdamW(model.parameters(), fused=True)
scaler = ShardedGradScaler(device="cpu")
scaler.scale(model(torch.ones(1, 2)).sum()).backward()
scaler.unscale_(optimizer)
got = "a step"
try:
    scaler.step(optimizer)
except RuntimeError as error:
    got = f"RuntimeError: {error}"
print(f"rank {dist.get_rank()}: expected a step, got {got}", flush=True)
wrong = torch.tensor([float(got != "a step")])
dist.all_reduce(wrong)
if dist.get_rank() == 0:
    print("WRONG" if wrong else "right")
dist.destroy_process_group()
raise SystemExit(int(wrong.item() > 0))
