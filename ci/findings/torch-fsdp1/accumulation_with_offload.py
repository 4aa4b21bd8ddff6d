"""
FullyShardedDataParallel: with offloaded parameters, a second backward replaces the gradient, with CPUOffload.

Expected: gradients of 1 and 1 add up to 2, or an error. Seen with torch 2.13.0 (simulated accelerator): 1.
`_offload_grad` copies the new gradient over `_cpu_grad`. The documentation mentions it, but nothing raises. Without an
accelerator gradients add up, because an offloaded one is on the device that computes.
Needs: an accelerator
Run: torchrun --nproc-per-node 2 ci/findings/torch-fsdp1/accumulation_with_offload.py
Upstream: documented as a limitation, https://docs.pytorch.org/docs/stable/fsdp.html (CPUOffload); no report of the
missing error found (searched November 2026).
"""

import os

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import CPUOffload, FullyShardedDataParallel

device = torch.device(torch.accelerator.current_accelerator().type, int(os.environ["LOCAL_RANK"]))
torch.accelerator.set_device_index(device.index)
dist.init_process_group(dist.get_default_backend_for_device(device))
model = FullyShardedDataParallel(
    nn.Linear(2, 2, bias=False), cpu_offload=CPUOffload(offload_params=True), use_orig_params=True, device_id=device
)
for _ in range(2):  # synchronised each time: not inside no_sync
    model(torch.ones(1, 2, device=device)).sum().backward()
got = sorted({value for parameter in model.parameters() for value in parameter.grad.flatten().tolist()})
print(f"rank {dist.get_rank()}: gradient after 1 and 1: expected [2.0], got {got}", flush=True)
wrong = torch.tensor([float(got != [2.0])], device=device)
dist.all_reduce(wrong)
if dist.get_rank() == 0:
    print("WRONG" if wrong else "right")
dist.destroy_process_group()
raise SystemExit(int(wrong.item() > 0))
