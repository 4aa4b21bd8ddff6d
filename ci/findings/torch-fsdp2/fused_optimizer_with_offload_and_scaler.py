"""
fully_shard with offloaded parameters: a fused optimizer steps with a loss scale that has not arrived on the CPU.

Expected: fused and plain AdamW give the same parameters. Seen with torch 2.13.0 (simulated accelerator): NaN. The fused
form copies the scale and the flag for an overflow to pinned memory, and does not wait (torch/optim/adamw.py). On a GPU
it depends on which comes first.
Needs: an accelerator
Run: torchrun --nproc-per-node 2 ci/findings/torch-fsdp2/fused_optimizer_with_offload_and_scaler.py
Upstream: no report found (searched November 2026); pytorch#176429 is about the same copies in FSDP1's scaler.
"""

import os

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import CPUOffloadPolicy, fully_shard

torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
dist.init_process_group("cpu:gloo,cuda:nccl")


def stepped(fused: bool) -> Tensor:
    torch.manual_seed(0)
    model = fully_shard(nn.Linear(8, 8, bias=False), offload_policy=CPUOffloadPolicy())
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1, fused=fused)
    scaler = torch.amp.GradScaler("cuda", init_scale=4.0)
    scaler.scale(model(torch.ones(2, 8, device="cuda")).sum()).backward()
    scaler.step(optimizer)
    scaler.update()
    torch.cuda.synchronize()
    (weight,) = model.parameters()
    return weight.to_local().detach().clone()


plain, fused = stepped(False), stepped(True)
right = torch.allclose(plain, fused)
if dist.get_rank() == 0:
    print(f"first row: expected {plain[0, :3].tolist()}, got {fused[0, :3].tolist()}")
    print("right" if right else "WRONG")
dist.destroy_process_group()
raise SystemExit(int(not right))
