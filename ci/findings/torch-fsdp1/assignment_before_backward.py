"""
FullyShardedDataParallel: data assigned to a parameter between forward and backward raise on one rank; the other waits.

Expected: the same on every rank: the values take effect, or an error names the parameter.
Seen with torch 2.13.0 (gloo, CPU, use_orig_params=True): one rank gets an autograd error about views, the other one
waits in the collective until it times out.
Run: torchrun --nproc-per-node 2 ci/findings/torch-fsdp1/assignment_before_backward.py
Upstream: no report found (searched November 2026).
"""

from datetime import timedelta

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import FullyShardedDataParallel


def wrap(module):
    return FullyShardedDataParallel(module, use_orig_params=True, device_id=torch.device("cpu"))


dist.init_process_group("gloo", timeout=timedelta(seconds=10))
control = dist.new_group(timeout=timedelta(seconds=30))  # to agree after the other group is broken
rank = dist.get_rank()
model = wrap(nn.Sequential(wrap(nn.Linear(4, 4)), wrap(nn.Linear(4, 4)), nn.Linear(4, 4)))
loss = model(torch.ones(2, 4)).sum()
for name, parameter in model.named_parameters():
    if name.endswith("bias"):
        parameter.data = torch.full_like(parameter, 0.5)
got = "no error"
try:
    loss.backward()
except RuntimeError as error:
    got = f"{type(error).__name__}: {str(error).splitlines()[0][:160]}"
print(f"rank {rank}: expected the same on every rank, and no wait, got {got}", flush=True)
failed = torch.tensor([float(got != "no error")])
late = torch.tensor([float("imed out" in got or "Connection closed" in got)])
dist.all_reduce(failed, group=control)
dist.all_reduce(late, group=control)
wrong = failed.item() == 1 or late.item() > 0
if rank == 0:
    print("WRONG" if wrong else "right")
dist.destroy_process_group()
raise SystemExit(int(wrong))
