"""
megatron_fsdp.fully_shard_model: attributes of the user's module cannot be read, and a Sequential cannot be indexed.

Expected: what the module has can be reached through the wrapped model, as with FullyShardedDataParallel, whose name its
wrapper has in part, or with fully_shard. Got with megatron-fsdp 0.6.1: AttributeError and TypeError; both are in
`model.module`. CUDA's streams are replaced, so that it runs on the CPU.
Run: python ci/findings/megatron_fsdp/attributes_are_not_passed_on.py
Upstream: no report found (searched November 2026); for torch's DistributedDataParallel, which does the same, it is
https://github.com/pytorch/pytorch/issues/108484
"""

import sys
from unittest.mock import MagicMock

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

for name in ("Stream", "Event", "current_stream", "stream", "synchronize", "empty_cache", "device"):
    setattr(torch.cuda, name, MagicMock())
torch.cuda.current_device = lambda: 0
torch.Tensor.cuda = lambda tensor: tensor
torch.Tensor.record_stream = lambda tensor, stream: None
from megatron_fsdp import fully_shard_model  # noqa: E402

dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
mesh = init_device_mesh("cpu", (1, 1), mesh_dim_names=("dp", "tp"))
layers = torch.nn.Sequential(torch.nn.Linear(3, 2))
layers.scale = 3.0
options = {"dp_shard_dim": "dp", "tp_dim": "tp", "device": torch.device("cpu")}
model = fully_shard_model(layers, mesh, fsdp_unit_modules=[torch.nn.Linear], **options)
problems = []
for what, read in (("scale", lambda: model.scale), ("[0]", lambda: model[0])):
    try:
        read()
    except (AttributeError, TypeError) as error:
        problems.append(f"{what}: {type(error).__name__}: {error}")
print(f"expected no error, got {problems}")
dist.destroy_process_group()
print("WRONG" if problems else "right")
sys.exit(bool(problems))
