"""
megatron_fsdp.fully_shard_model: after a forward between backward and the step, the next has the root's old parameters.

Expected: the update is visible in the next forward, as without sharding. Got with megatron-fsdp 0.6.1 (ZeRO-3): what
belongs to no unit stays gathered, and has its values from before the step. CUDA's streams are replaced, so that it runs
on the CPU.
Run: torchrun --nproc-per-node 2 ci/findings/megatron_fsdp/forward_before_the_update.py
Upstream: no report found (searched November 2026); https://github.com/NVIDIA/Megatron-LM/pull/6336 fixes another cause
of outdated weights, in its successor
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

dist.init_process_group("gloo")
mesh = init_device_mesh("cpu", (2, 1), mesh_dim_names=("dp", "tp"))
options = {"dp_shard_dim": "dp", "tp_dim": "tp", "device": torch.device("cpu")}


class Unit(torch.nn.Sequential):
    pass


outputs = []
for shard in (False, True):
    torch.manual_seed(0)
    model = torch.nn.Sequential(Unit(torch.nn.Linear(4, 4)), torch.nn.Linear(4, 4))
    if shard:
        model = fully_shard_model(model, mesh, fsdp_unit_modules=[Unit], **options)
        model.ddp_config.gradient_reduce_div_fusion = False  # needs NCCL
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    optimizer = fully_shard_optimizer(optimizer) if shard else optimizer
    model(torch.ones(2, 4)).sum().backward()
    model(torch.ones(2, 4))
    optimizer.step()
    outputs.append(model(torch.ones(2, 4)).sum().item())
expected, got = outputs
print(f"output after the step: expected {expected:.4f}, got {got:.4f}")
wrong = abs(expected - got) > 1e-4
dist.destroy_process_group()
print("WRONG" if wrong else "right")
sys.exit(wrong)
