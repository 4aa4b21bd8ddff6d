"""
fully_shard: a model without references keeps its memory until the garbage collector runs.

Expected: `del model` frees its parameters, as without sharding.
Seen with torch 2.13.0 (one process, CPU): modules, their FSDP state and their parameter groups refer to each other.
Run: python ci/findings/torch-fsdp2/memory_of_a_dropped_model.py
Upstream: https://github.com/pytorch/pytorch/pull/139650 (merged) took the global references away; its test calls
gc.collect(). No report found of the cycles that are left (searched November 2026).
"""

import gc
import weakref

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
mesh = init_device_mesh("cpu", (1,))
gc.disable()


def alive(shard, collect):
    model = nn.Sequential(nn.Linear(64, 64), nn.Linear(64, 64))
    if shard:
        fully_shard(model[0], mesh=mesh)
        fully_shard(model, mesh=mesh)
    model(torch.ones(1, 64)).sum().backward()
    parameters = [weakref.ref(parameter) for parameter in model.parameters()]
    del model
    if collect:
        gc.collect()
    return sum(parameter() is not None for parameter in parameters)


alive(True, True)  # what torch caches in the first run
counts = [alive(False, False), alive(True, False), alive(True, True)]
print(f"parameters alive after del, without sharding: expected 0, got {counts[0]}")
print(f"parameters alive after del, with fully_shard: expected 0, got {counts[1]}")
print(f"parameters alive after gc.collect():          expected 0, got {counts[2]}")
print("WRONG" if any(counts) else "right")
dist.destroy_process_group()
raise SystemExit(int(any(counts)))
