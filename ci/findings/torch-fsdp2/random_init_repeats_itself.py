"""
fully_shard on the CPU: `reset_parameters` of a model from meta gives every rank's shard the same random numbers.

Expected: the values of a model that was built for real with that seed, or at least different ones on each rank.
Seen with torch 2.13.0 (gloo, CPU): the second shard repeats the first.
Run: torchrun --nproc-per-node 2 ci/findings/torch-fsdp2/random_init_repeats_itself.py
Upstream: https://github.com/pytorch/pytorch/issues/196562 (open) and https://github.com/pytorch/torchtitan/issues/3106
(open) report it for CPUOffloadPolicy.
"""

from datetime import timedelta

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

dist.init_process_group("gloo", timeout=timedelta(seconds=30))
torch.manual_seed(1)
real = nn.Linear(4, 6)
with torch.device("meta"):
    layer = nn.Linear(4, 6)
fully_shard(layer, mesh=init_device_mesh("cpu", (2,)))
layer.to_empty(device="cpu")
torch.manual_seed(1)
layer.reset_parameters()
weight = layer.weight.full_tensor()
if dist.get_rank() == 0:
    print(f"weight equal to that of a layer that was built for real: expected True, got {weight.equal(real.weight)}")
    print(f"the second shard repeats the first: expected False, got {weight[:3].equal(weight[3:])}")
wrong = torch.tensor([float(weight[:3].equal(weight[3:]))])
dist.all_reduce(wrong)
if dist.get_rank() == 0:
    print("WRONG" if wrong else "right")
dist.destroy_process_group()
raise SystemExit(int(wrong.item() > 0))
