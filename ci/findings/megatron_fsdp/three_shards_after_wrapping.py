"""
Megatron-FSDP's fully_shard_model: a rank of ZeRO-3 holds three shards of a float32 model before anything is trained.

Expected: one shard of the parameters. Seen with megatron-fsdp 0.6.1 (torch 2.13.0, simulated accelerator): three. The
weights are kept a second time as main weights, in the same dtype, and gradients are allocated before a backward. With
the argument 1 or 2, ZeRO-1 or ZeRO-2: on two ranks, five and four shards instead of two, for the same reasons.
Needs: an accelerator
Run: torchrun --nproc-per-node 2 ci/findings/megatron_fsdp/three_shards_after_wrapping.py
     torchrun --nproc-per-node 2 ci/findings/megatron_fsdp/three_shards_after_wrapping.py 1
Upstream: no report found (searched November 2026).
"""

import gc
import os
import sys

import torch
import torch.distributed as dist
from megatron_fsdp import fully_shard_model
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

stage = int(sys.argv[1]) if len(sys.argv) > 1 else 3
torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
dist.init_process_group("nccl")
size = dist.get_world_size()
model = nn.Sequential(*(nn.Linear(64, 64, bias=False) for _ in range(4))).cuda()
shard = sum(parameter.nbytes for parameter in model.parameters()) / size
before = torch.cuda.memory_allocated() - shard * size
mesh = init_device_mesh("cuda", (size, 1), mesh_dim_names=("dp", "tp"))
options = {"device_mesh": mesh, "dp_shard_dim": "dp", "tp_dim": "tp", "zero_dp_strategy": stage}
sharded = fully_shard_model(module=model, fsdp_unit_modules=[nn.Linear], **options)
gc.collect()
expected = 1 if stage == 3 else size
held = (torch.cuda.memory_allocated() - before) / shard
if dist.get_rank() == 0:
    print(f"shards of the parameters that a rank holds after wrapping: expected {expected}, got {held:.2f}")
    print("WRONG" if held > expected + 0.5 else "right")
dist.destroy_process_group()
raise SystemExit(int(held > expected + 0.5))
