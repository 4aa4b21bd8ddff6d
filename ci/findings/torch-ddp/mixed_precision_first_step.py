"""
DistributedDataParallel(mixed_precision=...) reduces memory that was never written, in the first backward.

`Reducer::set_mixed_precision_param_dtype` replaces each bucket's buffer by a new one in the low dtype, and leaves the
bucket's views in the old one. The first backward copies gradients to these views, and reduces the new buffer. From the
second backward on, with new buckets, all is right.

Expected: the gradient of the loss, 10 for each element. Got: what was in the memory, often zeros.

Needs: an accelerator
Run: torchrun --nproc-per-node 2 ci/findings/torch-ddp/mixed_precision_first_step.py
Upstream: no report found (searched November 2026)
"""

import sys

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
from torch.nn.parallel.distributed import _MixedPrecision


def main() -> int:
    dist.init_process_group("nccl")
    rank = dist.get_rank()
    torch.cuda.set_device(rank)
    low = torch.bfloat16
    policy = _MixedPrecision(param_dtype=low, reduce_dtype=low, buffer_dtype=low)
    model = DistributedDataParallel(torch.nn.Linear(1, 5).cuda(), mixed_precision=policy)
    right = True
    for step in range(2):
        model(torch.ones(10, 1, device="cuda")).sum().backward()
        gradient = model.module.weight.grad.flatten().tolist()
        if rank == 0:
            print(f"step {step}: expected [10.0, 10.0, 10.0, 10.0, 10.0], got {gradient}")
        right = right and gradient == [10.0] * 5
        model.zero_grad()
    if rank == 0:
        print("right" if right else "WRONG")
    dist.destroy_process_group()
    return 0 if right else 1


if __name__ == "__main__":
    sys.exit(main())
