"""
ZeRO: `deepspeed.initialize` raises for a model without parameters, whatever the stage.

Expected: it runs, as without sharding, with an optimizer whose only group is empty, or with none where ZeRO takes none.
Seen with DeepSpeed 0.19.8 (torch 2.13.0, gloo, CPU): stages 1 and 2 require an optimizer, and one with an empty group
ends in "IndexError: list index out of range"; so does stage 3, with an optimizer and without.
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
wrong = 0
for stage in (1, 2, 3):
    for optimizer in (None, torch.optim.SGD([{"params": []}], lr=0.1)):
        config = {"train_batch_size": 1, "zero_optimization": {"stage": stage}, "zero_allow_untested_optimizer": True}
        model = torch.nn.Sequential(torch.nn.Tanh())
        try:
            deepspeed.initialize(model=model, optimizer=optimizer, config=config, dist_init_required=False)
            got = "no error"
        except (AssertionError, IndexError) as error:
            got = f"{type(error).__name__}: {error}"
        kind = "no optimizer" if optimizer is None else "an optimizer with an empty group"
        print(f"stage {stage}, a model without parameters, {kind}: expected no error, got {got}")
        # That a stage requires an optimizer is said; that it cannot use the only possible one is not.
        wrong += got.startswith("IndexError")
dist.destroy_process_group()
print("WRONG" if wrong else "right")
sys.exit(wrong > 0)
