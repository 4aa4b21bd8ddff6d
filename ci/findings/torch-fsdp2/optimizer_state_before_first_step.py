"""
get_optimizer_state_dict before the first step makes Adam's state, and counts as a step: training then differs.

Expected: a look at the optimizer's state changes nothing. Seen with torch 2.13.0 (one process, CPU; also with
DistributedDataParallel and FullyShardedDataParallel): the state is made by a step with zero gradients, which counts.
Run: python ci/findings/torch-fsdp2/optimizer_state_before_first_step.py
Upstream: https://github.com/pytorch/pytorch/issues/164929 (open) is exact.
"""

import torch
import torch.distributed as dist
from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard


def after_one_step(look: bool) -> list[float]:
    """One step of Adam on a gradient of ones."""
    model = torch.nn.Linear(1, 3, bias=False)
    torch.nn.init.ones_(model.weight)
    fully_shard(model, mesh=init_device_mesh("cpu", (1,)))
    optimizer = torch.optim.Adam(model.parameters(), lr=0.1)
    if look:
        get_optimizer_state_dict(model, optimizer)
    model(torch.ones(1, 1)).sum().backward()
    optimizer.step()
    return model.weight.full_tensor().flatten().tolist()


dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
plain, looked = after_one_step(False), after_one_step(True)
print(f"parameter after one step, with a look at the state before it: expected {plain}, got {looked}")
print("WRONG" if plain != looked else "right")
dist.destroy_process_group()
raise SystemExit(int(plain != looked))
