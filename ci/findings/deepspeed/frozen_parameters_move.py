"""
ZeRO-1, 2 and 3: a parameter that is frozen between steps goes on moving by its momentum.

Expected: with `requires_grad_(False)` it keeps its value, as with a stock optimizer, which skips it; or an error. Seen
with DeepSpeed 0.19.8 (torch 2.13.0, gloo, CPU): its part of the flat gradient is zero, and SGD with momentum moves it.
Run: python ci/findings/deepspeed/frozen_parameters_move.py
Upstream: no report found (searched November 2026).
"""

import os
import sys

import torch
import torch.distributed as dist

os.environ.setdefault("DS_ACCELERATOR", "cpu")
import deepspeed  # it reads the variable

os.environ.update(RANK="0", LOCAL_RANK="0", WORLD_SIZE="1", MASTER_ADDR="localhost", MASTER_PORT="29500")
dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
# Otherwise a C++ extension is compiled at first use.
deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False


def moved(stage: int) -> float:
    """How far the first layer's weight moves in the step after it was frozen."""
    model = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Linear(4, 2))
    zero = {"stage": stage, "stage3_param_persistence_threshold": 0}
    config = {"train_batch_size": 1, "zero_allow_untested_optimizer": True, "zero_optimization": zero}
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    engine, *_ = deepspeed.initialize(model=model, optimizer=optimizer, config=config, dist_init_required=False)
    weight, values = model[0].weight, []
    for frozen in (False, True):
        weight.requires_grad_(not frozen)
        engine.backward(engine(torch.ones(1, 4)).sum())
        engine.step()
        with deepspeed.zero.GatheredParameters([weight], enabled=stage == 3):
            values.append(weight.detach().clone())
    return (values[1] - values[0]).abs().max().item()


seen = {stage: round(moved(stage), 3) for stage in (1, 2, 3)}
print(f"the frozen weight moves by, at each stage: expected 0.0, got {seen}")
dist.destroy_process_group()
print("WRONG" if any(seen.values()) else "right")
sys.exit(any(seen.values()))
