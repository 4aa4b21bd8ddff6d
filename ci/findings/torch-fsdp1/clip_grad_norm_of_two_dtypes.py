"""
FullyShardedDataParallel: clip_grad_norm_ raises ValueError if gradients have two dtypes, until 2.10.

Expected: the total norm. The method's documentation says that the norm has the larger dtype then. Seen with torch 2.6.0
and 2.8.0 (gloo, CPU, use_orig_params=True): `Requires uniform dtype across all gradients but got {torch.float32,
torch.bfloat16}`.
Torch: >=2.6,<2.11
Run: torchrun --nproc-per-node 2 ci/findings/torch-fsdp1/clip_grad_norm_of_two_dtypes.py
Upstream: https://github.com/pytorch/pytorch/issues/171517 is exact. pytorch/pytorch#173641 fixed it.
"""

from datetime import timedelta

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import FullyShardedDataParallel


class ToBfloat16(nn.Module):
    """A step between the layers."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x.bfloat16()


dist.init_process_group("gloo", timeout=timedelta(seconds=30))
on_the_cpu = torch.device("cpu")
layers = nn.Linear(2, 2, bias=False), nn.Linear(2, 2, bias=False, dtype=torch.bfloat16)
for layer in layers:
    nn.init.ones_(layer.weight)
first, second = (FullyShardedDataParallel(layer, use_orig_params=True, device_id=on_the_cpu) for layer in layers)
model = FullyShardedDataParallel(nn.Sequential(first, ToBfloat16(), second), use_orig_params=True, device_id=on_the_cpu)
model(torch.ones(1, 2)).sum().backward()
try:
    got = f"a norm of {model.clip_grad_norm_(1.0).item():.2f}"
except ValueError as error:
    got = f"ValueError: {error}"
print(f"rank {dist.get_rank()}: expected a norm of 5.66, got {got}")
wrong = torch.tensor([float(got != "a norm of 5.66")])
dist.all_reduce(wrong)
if dist.get_rank() == 0:
    print("WRONG" if wrong else "right")
dist.destroy_process_group()
raise SystemExit(int(wrong.item() > 0))
