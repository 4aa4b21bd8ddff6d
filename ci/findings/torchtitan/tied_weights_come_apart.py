"""
torchtitan's SimpleFSDP silently makes a separate parameter for each name of a tied weight.

Expected after data_parallel(): one parameter with two names, as before, or an exception. Got with torchtitan 0.3.0: two
parameters, which get different values in training.
Run: python ci/findings/torchtitan/tied_weights_come_apart.py
Upstream: https://github.com/pytorch/torchtitan/issues/1524 says that tied weights are not supported; that nothing is
raised is not reported there
"""

import sys

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torchtitan.experiments.graph_trainer.simple_fsdp import data_parallel

dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
model = torch.nn.Sequential(torch.nn.Embedding(5, 3), torch.nn.Linear(3, 5, bias=False))
model[1].weight = model[0].weight
before = len(list(model.parameters()))
model = data_parallel(model, init_device_mesh("cpu", (1,)), mode="fully_shard")
after = len(list(model.parameters()))

optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
model(torch.tensor([1, 2])).logsumexp(-1).sum().backward()
optimizer.step()
values = [module._parameters["weight"].full_tensor() for module in model]
apart = (values[0] - values[1]).abs().max().item()
print(f"parameters: expected {before}, got {after}; the tied weights differ by {apart:.3f} after a step")
dist.destroy_process_group()
print("WRONG" if apart else "right")
sys.exit(apart > 0)
