"""
ZeRO-3: deepspeed.initialize raises an AssertionError without a message if parameters have two dtypes.

Expected: it trains them, as stages 1 and 2 do, or an error says that all parameters must have one dtype. Seen with
DeepSpeed 0.19.8 (torch 2.13.0, gloo, CPU).
Run: python ci/findings/deepspeed/parameters_of_two_dtypes.py
Upstream: https://github.com/axolotl-ai-cloud/axolotl/issues/954, closed, has the same assertion;
https://github.com/deepspeedai/DeepSpeed/issues/183, open, asks for the feature.
"""

import os
import sys

import torch
import torch.distributed as dist

os.environ.setdefault("DS_ACCELERATOR", "cpu")
import deepspeed  # it reads the variable

os.environ.update(RANK="0", LOCAL_RANK="0", WORLD_SIZE="1", MASTER_ADDR="localhost", MASTER_PORT="29500")
dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False  # otherwise a C++ extension is compiled
seen = {}
for stage in (1, 2, 3):
    model = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Linear(4, 4).bfloat16())
    config = {"train_batch_size": 1, "zero_allow_untested_optimizer": True, "zero_optimization": {"stage": stage}}
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    try:
        deepspeed.initialize(model=model, optimizer=optimizer, config=config, dist_init_required=False)
        seen[stage] = "a model"
    except AssertionError as error:
        seen[stage] = str(error) or "an AssertionError without a message"
wrong = any("without a message" in what for what in seen.values())
print(f"by stage: expected a model or an explanation, got {seen}")
dist.destroy_process_group()
print("WRONG" if wrong else "right")
sys.exit(wrong)
