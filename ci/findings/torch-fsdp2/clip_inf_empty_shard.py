"""
torch.nn.utils.clip_grad_norm_ by the infinity norm raises on ranks whose shard of a gradient is empty.

Expected: an empty shard counts as zero, as for other norms. Seen with torch 2.13.0 (gloo, CPU): RuntimeError on rank 1,
"cannot compute the infinity norm on an empty tensor"; the other ranks wait for it in clip_grad_norm_.
Run: torchrun --nproc-per-node 2 ci/findings/torch-fsdp2/clip_inf_empty_shard.py
Upstream: no report to torch found (searched November 2026). https://github.com/meta-pytorch/torchrec/pull/3891 works
around it.
"""

import math
from datetime import timedelta

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

dist.init_process_group("gloo", timeout=timedelta(seconds=30))
model = nn.Linear(3, 1, bias=False)  # one row on two ranks: the second has nothing of it
fully_shard(model, mesh=init_device_mesh("cpu", (2,)))
model(torch.ones(2, 3)).sum().backward()
got = "no error"
try:
    # Only this rank's part: the norm is reduced lazily and never materialised, so no rank waits here.
    torch.nn.utils.get_total_norm([model.weight.grad], math.inf)
except RuntimeError as error:
    got = f"RuntimeError: {error}"
print(f"rank {dist.get_rank()}: expected no error, got {got}", flush=True)
wrong = torch.tensor([float(got != "no error")])
dist.all_reduce(wrong)
if dist.get_rank() == 0:
    print("WRONG" if wrong else "right")
dist.destroy_process_group()
raise SystemExit(int(wrong.item() > 0))
