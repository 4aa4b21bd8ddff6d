"""
ZeRO-3: `deepspeed.initialize` raises an IndexError for a model without parameters.

Expected: it runs, as without sharding, or the error says what is wrong. Seen with DeepSpeed 0.19.8 (torch 2.13.0, gloo,
CPU): "list index out of range".
Run: python ci/findings/deepspeed/model_without_parameters.py
Upstream: no report found (searched November 2026).
"""

import os
import sys

import torch
import torch.distributed as dist

os.environ.setdefault("DS_ACCELERATOR", "cpu")
import deepspeed

os.environ.update(RANK="0", LOCAL_RANK="0", WORLD_SIZE="1", MASTER_ADDR="localhost", MASTER_PORT="29500")
dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False  # otherwise a C++ extension is compiled
config = {"train_batch_size": 1, "zero_optimization": {"stage": 3}}
try:
    deepspeed.initialize(model=torch.nn.Sequential(torch.nn.Tanh()), config=config, dist_init_required=False)
    got = "no error"
except IndexError as error:
    got = f"IndexError: {error}"
print(f"a model without parameters: expected no error, got {got}")
dist.destroy_process_group()
print("right" if got == "no error" else "WRONG")
sys.exit(got != "no error")
