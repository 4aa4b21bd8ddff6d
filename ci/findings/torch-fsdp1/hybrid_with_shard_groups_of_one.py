"""
FullyShardedDataParallel, HYBRID_SHARD with shard groups of one rank: gradients are never reduced, and replicas diverge.

Expected: the mean over the replicas, 2. Seen with torch 2.13.0 (gloo, CPU): half of each rank's own gradient, 0.5 and
1.5. The strategy becomes NO_SHARD, which reduces over the shard group only.
Run: torchrun --nproc-per-node 2 ci/findings/torch-fsdp1/hybrid_with_shard_groups_of_one.py
Upstream: https://github.com/pytorch/pytorch/issues/154888 is exact: called a bug there, and not planned to be fixed.
"""

from datetime import timedelta

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel, ShardingStrategy

dist.init_process_group("gloo", timeout=timedelta(seconds=30))
rank = dist.get_rank()
model = FullyShardedDataParallel(
    nn.Linear(1, 1, bias=False),
    device_mesh=init_device_mesh("cpu", (2, 1), mesh_dim_names=("replicate", "shard")),
    sharding_strategy=ShardingStrategy.HYBRID_SHARD,
    use_orig_params=True,
    device_id=torch.device("cpu"),
)
model(torch.tensor([[1.0 + 2 * rank]])).sum().backward()  # the gradient of rank r is 1 + 2 * r
(got,) = (parameter.grad.item() for parameter in model.parameters())
print(f"rank {rank}: gradient: expected 2.0, got {got}", flush=True)
wrong = torch.tensor([float(got != 2)])
dist.all_reduce(wrong)
if rank == 0:
    print("WRONG" if wrong else "right")
dist.destroy_process_group()
raise SystemExit(int(wrong.item() > 0))
