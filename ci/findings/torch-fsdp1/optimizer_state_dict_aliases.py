"""
FullyShardedDataParallel.optim_state_dict: Adam's first moment is its second moment where the model is on the CPU.

Expected: each state has its own values. Seen with torch 2.13.0 (gloo, CPU, use_orig_params=True): the states of a flat
parameter are gathered into one buffer, and the tensors returned are views of it (`gathered_tensor` in
_allgather_orig_param_states), so each has the last one's values. Moving them to the CPU makes copies, but not where
they are on the CPU already.
Run: torchrun --nproc-per-node 2 ci/findings/torch-fsdp1/optimizer_state_dict_aliases.py
Upstream: no report found (searched November 2026).
"""

from datetime import timedelta

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import FullyShardedDataParallel

dist.init_process_group("gloo", timeout=timedelta(seconds=30))


def model():
    torch.manual_seed(0)
    return nn.Linear(4, 4)


plain = model()
sharded = FullyShardedDataParallel(model(), use_orig_params=True, device_id=torch.device("cpu"))
optimizers = [torch.optim.Adam(each.parameters(), lr=0.01) for each in (plain, sharded)]
for each, optimizer in zip((plain, sharded), optimizers, strict=True):
    each(torch.ones(2, 4)).sum().backward()
    optimizer.step()
expected = optimizers[0].state[plain.weight]
got = FullyShardedDataParallel.optim_state_dict(sharded, optimizers[1])["state"]["weight"]
if dist.get_rank() == 0:
    for key in ("exp_avg", "exp_avg_sq"):
        print(f"{key}: expected {expected[key][0, 0]:.6f}, got {got[key][0, 0]:.6f}")
    print("both in one memory: expected False, got", got["exp_avg"].data_ptr() == got["exp_avg_sq"].data_ptr())
wrong = torch.tensor([float(not got["exp_avg"].allclose(expected["exp_avg"]))])
dist.all_reduce(wrong)
if dist.get_rank() == 0:
    print("WRONG" if wrong else "right")
dist.destroy_process_group()
raise SystemExit(int(wrong.item() > 0))
