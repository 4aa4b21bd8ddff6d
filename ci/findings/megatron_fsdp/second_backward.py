"""
megatron_fsdp.fully_shard_model: a second backward through one forward ends in a KeyError.

Expected: the gradients of both backwards, as without sharding, or an error that says what is not supported. Got with
megatron-fsdp 0.6.1 (ZeRO-3): a KeyError whose key is a whole parameter. CUDA's streams are replaced, so that it runs on
the CPU.
Run: python ci/findings/megatron_fsdp/second_backward.py
Upstream: no report found (searched November 2026)
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
layers = torch.nn.Sequential(torch.nn.Linear(4, 4, bias=False), torch.nn.Linear(4, 4, bias=False))
options = {"dp_shard_dim": "dp", "tp_dim": "tp", "device": torch.device("cpu")}
model = fully_shard_model(layers, mesh, fsdp_unit_modules=[torch.nn.Linear], **options)
model.ddp_config.gradient_reduce_div_fusion = False  # needs NCCL
output = model(torch.ones(2, 4))
problem = ""
try:
    output.sum().backward(retain_graph=True)
    output.square().sum().backward()
except KeyError as error:
    problem = f"{type(error).__name__}: {str(error).splitlines()[0]}"
print(f"two backwards through one forward: expected no error, got {problem or 'no error'}")
dist.destroy_process_group()
print("WRONG" if problem else "right")
sys.exit(bool(problem))
