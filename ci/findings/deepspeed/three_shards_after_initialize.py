"""
deepspeed.initialize, ZeRO stage 3: a rank holds three shards of a float32 model before anything is trained.

Expected: one shard of the parameters. Seen with deepspeed 0.19.8 (torch 2.13.0, simulated accelerator): three. The
optimizer's copy is made in the same dtype, and gradients are allocated before a backward. So is a bucket of 2 GB,
unless `reduce_bucket_size` makes it smaller.
Needs: an accelerator
Run: torchrun --nproc-per-node 2 ci/findings/deepspeed/three_shards_after_initialize.py
Upstream: https://github.com/deepspeedai/DeepSpeed/issues/109 (closed): a maintainer expects redundant
copies in float32.
"""

import gc
import os

import deepspeed
import torch
import torch.distributed as dist
from torch import nn

torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
dist.init_process_group("nccl")
size = dist.get_world_size()
model = nn.Sequential(*(nn.Linear(64, 64, bias=False) for _ in range(4))).cuda()
shard = sum(parameter.nbytes for parameter in model.parameters()) / size
before = torch.cuda.memory_allocated() - shard * size
zero = {"stage": 3, "stage3_param_persistence_threshold": 0, "reduce_bucket_size": 16}
config = {"train_micro_batch_size_per_gpu": 1, "zero_optimization": zero, "zero_allow_untested_optimizer": True}
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
engine, *_ = deepspeed.initialize(model=model, optimizer=optimizer, config=config, dist_init_required=False)
gc.collect()
held = (torch.cuda.memory_allocated() - before) / shard
if dist.get_rank() == 0:
    print(f"shards of the parameters that a rank holds after initialize: expected 1, got {held:.2f}")
    print("WRONG" if held > 1.5 else "right")
dist.destroy_process_group()
raise SystemExit(int(held > 1.5))
