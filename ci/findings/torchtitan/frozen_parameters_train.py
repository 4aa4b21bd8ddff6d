"""
torchtitan's SimpleFSDP forgets `requires_grad=False`: frozen parameters are trained.

Expected after data_parallel(): a frozen parameter is frozen. Got with torchtitan 0.3.0: it requires a gradient, gets
one, and the optimizer changes it.
Run: python ci/findings/torchtitan/frozen_parameters_train.py
Upstream: https://github.com/pytorch/torchtitan/issues/3885; pull request 4282 (open in August 2026) fixes it
"""

import sys

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torchtitan.experiments.graph_trainer.simple_fsdp import data_parallel

dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
model = torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.Linear(4, 2))
model[0].requires_grad_(False)
model = data_parallel(model, init_device_mesh("cpu", (1,)), mode="fully_shard")
frozen = model[0]._parameters["weight"]
before = frozen.full_tensor().detach().clone()

model(torch.ones(1, 3)).sum().backward()
torch.optim.SGD(model.parameters(), lr=1.0).step()
moved = (frozen.full_tensor() - before).abs().max().item()
print(f"requires_grad: expected False, got {frozen.requires_grad}; a step moved the frozen weight by {moved:.3f}")
dist.destroy_process_group()
print("WRONG" if moved else "right")
sys.exit(moved > 0)
