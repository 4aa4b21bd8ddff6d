"""
deepspeed.initialize, ZeRO stage 3: the stream that gathers parameters does not wait for the optimizer step.

Expected: between a step and the gathers of the next forward, the stream of the gathers waits for the one that updates
the shards. Seen with deepspeed 0.19.8 (torch 2.13.0, simulated accelerator): it waits for nothing, so that a gather may
send values from before the step; the simulated accelerator's checker reports "read after write". A loop that reads the
loss or the norm on the host after the step waits for the update, and hides it. `overlap_comm` is stage 3's default.
Needs: an accelerator
Run: torchrun --nproc-per-node 2 ci/findings/deepspeed/gathers_before_the_update.py
Upstream: no report found (searched November 2026). https://github.com/deepspeedai/DeepSpeed/pull/7898 (merged) fixed
the same kind of defect where gradients are reduced.
"""

import os

import deepspeed
import torch
import torch.distributed as dist
from torch import nn

torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
dist.init_process_group("nccl")
model = nn.Sequential(*(nn.Linear(64, 64) for _ in range(2))).cuda()
zero = {"stage": 3, "stage3_param_persistence_threshold": 0, "reduce_bucket_size": 4096}
config = {"train_micro_batch_size_per_gpu": 1, "zero_optimization": zero, "zero_allow_untested_optimizer": True}
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
engine, *_ = deepspeed.initialize(model=model, optimizer=optimizer, config=config, dist_init_required=False)
for _ in range(4):  # the first ones exchange the order of the layers, which waits for the device
    engine.backward(engine(torch.ones(1, 64, device="cuda")).sum())
    engine.step()
waits, default = [], torch.cuda.current_stream()
for name in ("wait_stream", "wait_event"):
    original = getattr(type(default), name)
    setattr(type(default), name, lambda self, it, act=original: (waits.append(self != default), act(self, it))[1])
engine(torch.ones(1, 64, device="cuda"))
if dist.get_rank() == 0:
    print(f"waits of other streams after the step: expected at least 1, got {sum(waits)} (of {len(waits)})")
    print("right" if any(waits) else "WRONG")
dist.destroy_process_group()
raise SystemExit(int(not any(waits)))
