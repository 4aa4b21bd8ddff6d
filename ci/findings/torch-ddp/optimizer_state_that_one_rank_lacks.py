"""
get_optimizer_state_dict of a DistributedDataParallel returns something else on each rank if one lacks some state.

Expected: an error on every rank that says whose state is missing, since the state of replicas is to be the same.
Seen with torch 2.13.0 (gloo, CPU): no error; each rank returns what it has.
Run: torchrun --nproc-per-node 2 ci/findings/torch-ddp/optimizer_state_that_one_rank_lacks.py
Upstream: no report found (searched November 2026).
"""

from datetime import timedelta

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_optimizer_state_dict
from torch.nn.parallel import DistributedDataParallel

dist.init_process_group("gloo", timeout=timedelta(seconds=30))
rank = dist.get_rank()
model = DistributedDataParallel(nn.Linear(4, 6))
optimizer = torch.optim.Adam(model.parameters(), lr=0.1)
model(torch.ones(2, 4)).sum().backward()
optimizer.step()
if rank == 1:
    del optimizer.state[model.module.weight]
try:
    options = StateDictOptions(full_state_dict=True)
    got = sorted(get_optimizer_state_dict(model, optimizer, options=options)["state"])
except Exception as error:  # noqa: BLE001 - of any type
    got = f"{type(error).__name__}: {error}"
print(f"rank {rank}: expected an error about missing state, got {got}", flush=True)
wrong = torch.tensor([float(isinstance(got, list))])
dist.all_reduce(wrong)
if rank == 0:
    print("WRONG" if wrong else "right")
dist.destroy_process_group()
raise SystemExit(int(wrong.item() > 0))
