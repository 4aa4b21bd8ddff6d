"""
FullyShardedDataParallel with NO_SHARD: of two backwards through one forward only the first is reduced, silently.

Expected: the mean over the ranks of both, or an error. Seen with torch 2.13.0 (gloo, CPU): rank 0 has 1.5, rank 1 has
2.5 instead of 2, so the ranks drift apart.
Run: torchrun --nproc-per-node 2 ci/findings/torch-fsdp1/second_backward_not_reduced.py
Upstream: no report for NO_SHARD found (searched November 2026). https://github.com/pytorch/pytorch/issues/106637
(closed) is on the error that sharded strategies raise, https://github.com/pytorch/pytorch/issues/47260 (open) on
DistributedDataParallel.
"""

import warnings
from datetime import timedelta

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import FullyShardedDataParallel, ShardingStrategy

warnings.simplefilter("ignore")
dist.init_process_group("gloo", timeout=timedelta(seconds=30))
model = FullyShardedDataParallel(
    nn.Linear(1, 1, bias=False),
    use_orig_params=True,
    device_id=torch.device("cpu"),
    sharding_strategy=ShardingStrategy.NO_SHARD,
)
# The gradient of rank r is 1 + 2 * r.
loss = model(torch.tensor([[1.0 + 2 * dist.get_rank()]])).sum()
(loss / 2).backward(retain_graph=True)
(loss / 2).backward()
(got,) = (parameter.grad.item() for parameter in model.parameters())
print(f"rank {dist.get_rank()}: gradient: expected {dist.get_world_size():.1f}, got {got}", flush=True)
wrong = torch.tensor([float(got != dist.get_world_size())])
dist.all_reduce(wrong)
if dist.get_rank() == 0:
    print("WRONG" if wrong else "right")
dist.destroy_process_group()
raise SystemExit(int(wrong.item() > 0))
