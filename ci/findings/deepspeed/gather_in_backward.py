"""
ZeRO-3: GatheredParameters can be entered in a backward; nothing checks it.

Expected: an error on entry, because a gather in the middle of a backward races with those of the engine. Seen with
DeepSpeed 0.19.8 (torch 2.13.0, gloo, CPU): no error.
Run: torchrun --nproc-per-node 2 ci/findings/deepspeed/gather_in_backward.py
Upstream: no report found (searched November 2026).
"""

import os
from datetime import timedelta

import torch
import torch.distributed as dist
from torch import nn

os.environ.setdefault("DS_ACCELERATOR", "cpu")
import deepspeed  # it reads the variable

CONFIG = {
    "train_micro_batch_size_per_gpu": 2,
    "zero_allow_untested_optimizer": True,
    "zero_optimization": {"stage": 3, "stage3_param_persistence_threshold": 0},
}

dist.init_process_group("gloo", timeout=timedelta(seconds=30))
# Otherwise a C++ extension is compiled at first use.
deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
torch.manual_seed(0)
model = nn.Sequential(*(nn.Linear(8, 8) for _ in range(4)))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
engine, *_ = deepspeed.initialize(model=model, optimizer=optimizer, config=CONFIG, dist_init_required=False)
entered = 0


def look(*_: object) -> None:
    """Enter the context where the gradient of the second layer's output is there."""
    global entered
    with deepspeed.zero.GatheredParameters(list(model.parameters())):
        entered += 1


model[1].register_full_backward_hook(look)
problem = ""
try:
    engine.backward(engine(torch.ones(2, 8)).sum())
except RuntimeError as error:
    problem = str(error)
if dist.get_rank() == 0:
    print(f"times that the context was entered in a backward: expected 0, got {entered}; {problem or 'no error'}")
    print("WRONG" if entered else "right", flush=True)
dist.destroy_process_group()
raise SystemExit(bool(entered))
