"""
ZeRO-3: GatheredParameters after a forward without a backward, as in an evaluation, raises an AssertionError.

Expected: it shows the full parameters. Seen with DeepSpeed 0.19.8 (torch 2.13.0, gloo, CPU): from the second step on,
a forward prefetches what the backward will use first. If no backward follows, these parameters stay in flight, and
leaving the context partitions them. It takes a prefetch bucket that is smaller than the model, as for a large one.
Run: torchrun --nproc-per-node 2 ci/findings/deepspeed/gather_after_evaluation.py
Upstream: no report of this found (searched November 2026). https://github.com/deepspeedai/DeepSpeed/issues/3068
(closed) is about parameters that an evaluation leaves in flight, and the training step after it.
"""

import os
import sys

import torch
import torch.distributed as dist

os.environ.setdefault("DS_ACCELERATOR", "cpu")
import deepspeed  # it reads the variable

dist.init_process_group("gloo")
deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False  # otherwise a C++ extension is compiled
model = torch.nn.Sequential(*(torch.nn.Linear(8, 8) for _ in range(4)))
zero = {"stage": 3, "stage3_param_persistence_threshold": 0, "stage3_max_reuse_distance": 0}
zero["stage3_prefetch_bucket_size"] = 8
config = {"train_batch_size": 2, "zero_allow_untested_optimizer": True, "zero_optimization": zero}
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
engine, *_ = deepspeed.initialize(model=model, optimizer=optimizer, config=config, dist_init_required=False)
for _ in range(2):
    engine.backward(engine(torch.ones(1, 8)).sum())
    engine.step()
engine.eval()
with torch.no_grad():
    engine(torch.ones(1, 8))
seen = "64 elements"
try:
    with deepspeed.zero.GatheredParameters(list(model.parameters())):
        seen = f"{model[3].weight.numel()} elements"
except AssertionError:
    seen = "an AssertionError"
if dist.get_rank() == 0:
    print(f"the last weight after an evaluation: expected 64 elements, got {seen}")
    print("WRONG" if seen != "64 elements" else "right")
dist.destroy_process_group()
sys.exit(seen != "64 elements")
