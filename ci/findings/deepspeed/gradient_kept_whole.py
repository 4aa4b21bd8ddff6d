"""
deepspeed.initialize, ZeRO stage 2: after a backward both ranks hold the whole gradient of a parameter that they share.

Expected: a rank has gained its shard of the gradients. Seen with deepspeed 0.19.8 (torch 2.13.0, simulated
accelerator): its shard, and the rest of each gradient that crosses the boundary of its shard, because its part is a
view of the whole.
Needs: an accelerator
Run: torchrun --nproc-per-node 2 ci/findings/deepspeed/gradient_kept_whole.py
Upstream: no report found (searched November 2026).
"""

import gc
import os

import deepspeed
import torch
import torch.distributed as dist
from torch import nn

torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
dist.init_process_group("nccl")
model = nn.Sequential(*(nn.Linear(256, 256, bias=False) for _ in range(3))).cuda()
shard = sum(parameter.nbytes for parameter in model.parameters()) / dist.get_world_size()
zero = {"stage": 2, "reduce_bucket_size": 1024}
config = {"train_micro_batch_size_per_gpu": 1, "zero_optimization": zero, "zero_allow_untested_optimizer": True}
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
engine, *_ = deepspeed.initialize(model=model, optimizer=optimizer, config=config, dist_init_required=False)
for _ in range(3):
    gc.collect()
    before = torch.cuda.memory_allocated()
    engine.backward(engine(torch.ones(1, 256, device="cuda")).sum())
    gc.collect()
    grown = (torch.cuda.memory_allocated() - before) / shard
    engine.step()
if dist.get_rank() == 0:
    print(f"shards of the gradients that a backward leaves: expected 1, got {grown:.2f}")
    print("WRONG" if grown > 1.2 else "right")
dist.destroy_process_group()
raise SystemExit(int(grown > 1.2))
