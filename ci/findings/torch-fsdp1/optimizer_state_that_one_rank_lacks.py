"""
get_optimizer_state_dict of a FullyShardedDataParallel waits forever if one rank lacks the state of a parameter.

Expected: an error on every rank that says whose state is missing.
Seen with torch 2.13.0 (gloo, CPU, use_orig_params=True): the ranks issue different collectives, and wait for each other
until one times out.
Run: torchrun --nproc-per-node 2 ci/findings/torch-fsdp1/optimizer_state_that_one_rank_lacks.py
Upstream: no report found (searched November 2026).
"""

from datetime import timedelta

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_optimizer_state_dict
from torch.distributed.fsdp import FullyShardedDataParallel

dist.init_process_group("gloo", timeout=timedelta(seconds=10))
control = dist.new_group(timeout=timedelta(seconds=30))  # to agree after the other group is broken
rank = dist.get_rank()
model = FullyShardedDataParallel(nn.Linear(4, 6), use_orig_params=True, device_id=torch.device("cpu"))
optimizer = torch.optim.Adam(model.parameters(), lr=0.1)
model(torch.ones(2, 4)).sum().backward()
optimizer.step()
if rank == 1:
    del optimizer.state[next(iter(optimizer.state))]
try:
    options = StateDictOptions(full_state_dict=True)
    state = get_optimizer_state_dict(model, optimizer, options=options)["state"]
    got = f"no error, state of {sorted(state)}"
except Exception as error:  # noqa: BLE001 - of any type
    got = f"{type(error).__name__}: {str(error).splitlines()[0][:160]}"
print(f"rank {rank}: expected an error about missing state, got {got}", flush=True)
wrong = torch.tensor([float("imed out" in got or "Connection closed" in got or "no error" in got)])
dist.all_reduce(wrong, group=control)
if rank == 0:
    print("WRONG" if wrong else "right")
dist.destroy_process_group()
raise SystemExit(int(wrong.item() > 0))
