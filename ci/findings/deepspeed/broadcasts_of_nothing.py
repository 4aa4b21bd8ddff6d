"""
ZeRO-3: the first forward broadcasts an empty tensor if a module has no parameters.

Expected: no communication for a module that has nothing to gather. Seen with DeepSpeed 0.19.8 (torch 2.13.0, gloo,
CPU): a broadcast of 0 bytes.
Run: python ci/findings/deepspeed/broadcasts_of_nothing.py
Upstream: no report found (searched November 2026).
"""

import os
import sys

import torch
import torch.distributed as dist

os.environ.setdefault("DS_ACCELERATOR", "cpu")
empty, broadcast = [], dist.broadcast


def noted(tensor, *args, **kwargs):
    """Count the broadcasts of empty tensors."""
    empty.extend([1] * (tensor.numel() == 0))
    return broadcast(tensor, *args, **kwargs)


dist.broadcast = noted
import deepspeed  # noqa: E402  it keeps the functions that it finds

os.environ.update(RANK="0", LOCAL_RANK="0", WORLD_SIZE="1", MASTER_ADDR="localhost", MASTER_PORT="29500")
dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
# Otherwise a C++ extension is compiled at first use.
deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
model = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Tanh(), torch.nn.Linear(4, 2), torch.nn.Tanh())
zero = {"stage": 3, "stage3_param_persistence_threshold": 0}
config = {"train_batch_size": 1, "zero_allow_untested_optimizer": True, "zero_optimization": zero}
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
engine, *_ = deepspeed.initialize(model=model, optimizer=optimizer, config=config, dist_init_required=False)
engine.backward(engine(torch.ones(1, 4)).sum())
engine.step()
print(f"broadcasts of empty tensors: expected 0, got {len(empty)}")
dist.destroy_process_group()
print("WRONG" if empty else "right")
sys.exit(bool(empty))
