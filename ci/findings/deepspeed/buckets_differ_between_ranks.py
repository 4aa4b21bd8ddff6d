"""
ZeRO-1 and 2: if ranks use different parameters in a step, the gradients of these parameters are added up.

Expected: a rank that does not use a parameter counts as zero in the mean, or an error; ZeRO-3 raises. Seen with
DeepSpeed 0.19.8 (torch 2.13.0, gloo, CPU): each rank puts its gradients into a bucket in the order in which they
arrive. The buckets are not compared, so gradients of different parameters are averaged.
Run: torchrun --nproc-per-node 2 ci/findings/deepspeed/buckets_differ_between_ranks.py
Upstream: https://github.com/deepspeedai/DeepSpeed/issues/2343, closed: stage 2 assumes the same order on every rank.
"""

import os
import sys

import torch
import torch.distributed as dist

os.environ.setdefault("DS_ACCELERATOR", "cpu")
import deepspeed
from deepspeed.utils import safe_get_full_grad

dist.init_process_group("gloo")
deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False  # otherwise a C++ extension is compiled
rank = dist.get_rank()
expected, wrong = [0.5, 1.0], False
for stage in (1, 2):
    model = torch.nn.ModuleList(torch.nn.Linear(1, 1, bias=False) for _ in range(2))
    config = {"train_batch_size": 2, "zero_allow_untested_optimizer": True, "zero_optimization": {"stage": stage}}
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    engine, *_ = deepspeed.initialize(model=model, optimizer=optimizer, config=config, dist_init_required=False)
    # Rank 0 uses the first branch, rank 1 the second one: their gradients are 1 and 2.
    engine.backward(engine.module[rank](torch.full((1, 1), 1.0 + rank)).sum())
    got = [round(safe_get_full_grad(branch.weight).item(), 3) for branch in model]
    wrong |= got != expected
    if rank == 0:
        print(f"gradients of the two branches, stage {stage}: expected {expected}, got {got}")
dist.destroy_process_group()
if rank == 0:
    print("WRONG" if wrong else "right")
sys.exit(wrong)
