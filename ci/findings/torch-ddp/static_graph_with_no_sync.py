"""
DistributedDataParallel(static_graph=True): a first backward inside no_sync raises an internal assertion.

Expected: gradients accumulate, and the backward after no_sync reduces their sum, as without static_graph.
Seen with torch 2.13.0 (gloo, CPU): RuntimeError, "expect_autograd_hooks_ INTERNAL ASSERT FAILED".
Run: torchrun --nproc-per-node 2 ci/findings/torch-ddp/static_graph_with_no_sync.py
Upstream: https://github.com/pytorch/pytorch/issues/143580 (open), https://github.com/pytorch/pytorch/pull/187732 (open)
fixes it.
"""

from datetime import timedelta

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

dist.init_process_group("gloo", timeout=timedelta(seconds=30))
rank = dist.get_rank()
model = DistributedDataParallel(nn.Linear(1, 1, bias=False), static_graph=True)
try:
    with model.no_sync():
        model(torch.tensor([[1.0 + 2 * rank]])).sum().backward()
    model(torch.tensor([[1.0 + 2 * rank]])).sum().backward()
    got = model.module.weight.grad.item()
except RuntimeError as error:
    got = f"{type(error).__name__}: {str(error)[:160]}"
print(f"rank {rank}: gradient of two backwards of 1 on rank 0 and 3 on rank 1: expected 4.0, got {got}", flush=True)
wrong = torch.tensor([float(got != 4.0)])
dist.all_reduce(wrong)
if rank == 0:
    print("WRONG" if wrong else "right")
dist.destroy_process_group()
raise SystemExit(int(wrong.item() > 0))
