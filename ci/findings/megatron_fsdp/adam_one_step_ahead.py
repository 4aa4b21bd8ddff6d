"""
megatron_fsdp.fully_shard_optimizer steps Adam once with gradients of zero: its counter is one ahead ever after.

The first update then has the bias correction of the second. Expected after one step: what torch.optim.Adam gives,
whose counter is 1. Got with megatron-fsdp 0.6.1: the counter is 2, and every first update is 26 % too small. In the
same step AdamW's weight decay changes the parameters before training begins.
CUDA's streams are replaced, so that it runs on the CPU.
Run: python ci/findings/megatron_fsdp/adam_one_step_ahead.py
Upstream: https://github.com/NVIDIA/Megatron-LM/issues/5974, fixed by pull request 5976 after 0.6.1
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
from megatron_fsdp import fully_shard_model, fully_shard_optimizer  # noqa: E402

dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
mesh = init_device_mesh("cpu", (1, 1), mesh_dim_names=("dp", "tp"))
layer, plain = torch.nn.Sequential(torch.nn.Linear(3, 2)), torch.nn.Linear(3, 2)
options = {"dp_shard_dim": "dp", "tp_dim": "tp", "device": torch.device("cpu")}
model = fully_shard_model(layer, mesh, fsdp_unit_modules=[torch.nn.Linear], **options)
model.ddp_config.gradient_reduce_div_fusion = False  # needs NCCL

sharded = fully_shard_optimizer(torch.optim.Adam(model.parameters(), lr=0.1))
stock = torch.optim.Adam(plain.parameters(), lr=0.1)
for module, optimizer in ((model, sharded), (plain, stock)):
    module(torch.ones(1, 3)).sum().backward()
    optimizer.step()
counters = [int(next(iter(optimizer.state.values()))["step"]) for optimizer in (sharded, stock)]
print(f"Adam's counter after one step: expected {counters[1]}, got {counters[0]}")
dist.destroy_process_group()
print("right" if counters[0] == counters[1] else "WRONG")
sys.exit(counters[0] != counters[1])
