"""
fully_shard: a forward between backward and the optimizer step makes the next forward use the root's old parameters.

    torchrun --nproc-per-node 2 forward_before_the_update.py

Seen with torch 2.13.0, gloo, CPU, with the default reshard_after_forward; with True it does not happen. The root stays
gathered after the forward, so its gradients are out of sight (`parameters()` gives the gathered ones), too.
"""

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

mesh = init_device_mesh("cpu", (2,))


def model():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))


plain, sharded = model(), model()
for unit in (sharded[0], sharded):
    fully_shard(unit, mesh=mesh)
x = torch.ones(2, 4)
results = []
for each in (plain, sharded):
    optimizer = torch.optim.SGD(each.parameters(), lr=0.1)
    each(x).sum().backward()
    visible = sum(parameter.grad is not None for parameter in each.parameters())
    each(x)
    hidden = visible - sum(parameter.grad is not None for parameter in each.parameters())
    optimizer.step()
    results.append((each(x).sum().item(), hidden))
if dist.get_rank() == 0:
    print(f"output after the step: expected {results[0][0]:.4f}, got {results[1][0]:.4f}")
    print(f"gradients out of sight after the forward: expected {results[0][1]}, got {results[1][1]}")
dist.destroy_process_group()
