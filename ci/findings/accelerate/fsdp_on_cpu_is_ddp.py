"""
Accelerator(cpu=True, fsdp_plugin=...) trains with DistributedDataParallel, and says nothing.

Expected: parameters sharded by FSDP2, or an exception. Got with accelerate 1.15.0: no parameter is a DTensor, and the
plugin is ignored.
Run: torchrun --nproc-per-node 2 ci/findings/accelerate/fsdp_on_cpu_is_ddp.py
Upstream: no report found (searched November 2026)
"""

import sys

import torch
import torch.distributed as dist
from accelerate import Accelerator, FullyShardedDataParallelPlugin
from torch.distributed.tensor import DTensor

accelerator = Accelerator(cpu=True, fsdp_plugin=FullyShardedDataParallelPlugin(fsdp_version=2))
model = torch.nn.Linear(8, 8)
model, optimizer = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
sharded = sum(isinstance(parameter, DTensor) for parameter in model.parameters())
if dist.get_rank() == 0:
    print(f"sharded parameters: expected 2, got {sharded}, of a {type(model).__name__}")
    print("right" if sharded else "WRONG")
dist.destroy_process_group()
sys.exit(not sharded)
