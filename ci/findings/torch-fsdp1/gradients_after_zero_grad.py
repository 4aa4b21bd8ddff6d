"""
FullyShardedDataParallel with use_orig_params: zero_grad() frees no gradient until the next forward.

Expected: zero_grad() with set_to_none gives the memory of the gradients back, as without sharding.
Seen with torch 2.13.0 (gloo, CPU): the gradients that users see are views of the flat one, which is left. So at the
peak of the next forward, or after training, the gradients' memory is still held.
Run: torchrun --nproc-per-node 2 ci/findings/torch-fsdp1/gradients_after_zero_grad.py
Upstream: no report found (searched November 2026).
"""

from datetime import timedelta

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import FullyShardedDataParallel

dist.init_process_group("gloo", timeout=timedelta(seconds=30))
model = FullyShardedDataParallel(nn.Linear(64, 64), use_orig_params=True, device_id=torch.device("cpu"))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
model(torch.ones(1, 64)).sum().backward()
optimizer.step()
optimizer.zero_grad()
visible = sum(parameter.grad is not None for parameter in model.parameters())
flat = model._handle.flat_param.grad  # no public name: what the views were of
held = 0 if flat is None else flat.untyped_storage().nbytes()
wrong = torch.tensor([float(held)])
dist.all_reduce(wrong)
if dist.get_rank() == 0:
    print(f"after zero_grad(): gradients that are visible: expected 0, got {visible}")
    print(f"after zero_grad(): bytes of the flat gradient: expected 0, got {held}")
    print("WRONG" if wrong else "right")
dist.destroy_process_group()
raise SystemExit(int(wrong.item() > 0))
