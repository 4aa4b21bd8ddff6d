"""
FSDP2 on the CPU: `reset_parameters` of a model from meta gives every rank's shard the same random numbers.

    torchrun --nproc-per-node 2 ci/findings/torch-fsdp2/random_init_repeats_itself.py
"""

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

dist.init_process_group("gloo")
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
dist.destroy_process_group()
