"""
ZeRO: a parameter whose `.grad` is set to None before the step is stepped all the same, and nothing raises.

Expected: as in torch, it does not change, or an error says how to drop a gradient. Seen with DeepSpeed 0.19.8 (torch
2.13.0, gloo, CPU), in stages 1, 2 and 3: the engine has its own copy of the gradient.
Run: python ci/findings/deepspeed/dropped_gradients_are_stepped.py
Upstream: documented, gradients are read and written with `deepspeed.utils.safe_get_full_grad` and `safe_set_full_grad`;
no report of the silence found (searched November 2026).
"""

import os
import sys

import torch
import torch.distributed as dist

os.environ.setdefault("DS_ACCELERATOR", "cpu")
import deepspeed
from deepspeed.utils import safe_get_full_fp32_param

os.environ.update(RANK="0", LOCAL_RANK="0", WORLD_SIZE="1", MASTER_ADDR="localhost", MASTER_PORT="29500")
dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False  # otherwise a C++ extension is compiled
changed = {}
for stage in (1, 2, 3):
    model = torch.nn.Linear(4, 4, bias=False)
    config = {"train_batch_size": 1, "zero_allow_untested_optimizer": True, "zero_optimization": {"stage": stage}}
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    engine, *_ = deepspeed.initialize(model=model, optimizer=optimizer, config=config, dist_init_required=False)
    before = safe_get_full_fp32_param(model.weight).clone()
    engine.backward(engine(torch.ones(1, 4)).sum())
    model.weight.grad = None
    engine.step()
    changed[stage] = not before.equal(safe_get_full_fp32_param(model.weight))
print(f"whether the weight has changed, by stage: expected {dict.fromkeys(changed, False)}, got {changed}")
dist.destroy_process_group()
print("WRONG" if any(changed.values()) else "right")
sys.exit(any(changed.values()))
