"""
FSDP1 with offloaded parameters: ShardedGradScaler takes an infinite gradient for a finite one.

Expected: after an infinite gradient, the optimizer's step is skipped and the scale is halved. Seen with torch 2.13.0
(simulated accelerator): neither, and the parameters are no longer finite. The flag is copied to pinned memory without
waiting, set there on the CPU, and overwritten when the copy arrives. On a GPU it depends on which comes first.
Needs: an accelerator
Run: torchrun --nproc-per-node 2 ci/findings/torch-fsdp1/grad_scaler_with_offload.py
Upstream: https://github.com/pytorch/pytorch/pull/176429 (closed, March 2026) describes it, as seen on a GPU.
"""

import os

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import CPUOffload, FullyShardedDataParallel
from torch.distributed.fsdp.sharded_grad_scaler import ShardedGradScaler

torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
dist.init_process_group("nccl")
torch.manual_seed(0)
model = FullyShardedDataParallel(
    nn.Linear(8, 8), cpu_offload=CPUOffload(offload_params=True), device_id=torch.cuda.current_device()
)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
scaler = ShardedGradScaler(init_scale=2.0)
scaler.scale(model(torch.full((2, 8), float("inf"), device="cuda")).sum()).backward()
scaler.step(optimizer)
scaler.update()
torch.cuda.synchronize()
scale = scaler.get_scale()
finite = all(bool(parameter.isfinite().all()) for parameter in model.parameters())
if dist.get_rank() == 0:
    print(f"scale: expected 1.0, got {scale}; parameters finite: expected True, got {finite}")
    print("right" if scale == 1.0 and finite else "WRONG")
dist.destroy_process_group()
raise SystemExit(int(scale != 1.0 or not finite))
