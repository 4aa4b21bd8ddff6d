"""
replicate: after an exception in backward, `reset_iter_state` keeps gradients that were not reduced yet.

Expected: the gradients of the failed iteration are discarded, as its documentation says. Seen with torch 2.13.0 (gloo,
CPU): the next step adds to them, as with fully_shard, whose code replicate shares.
Run: torchrun --nproc-per-node 2 ci/findings/torch-replicate/recovery_keeps_gradients.py
Upstream: no report found (searched November 2026).
"""

from datetime import timedelta

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed._composable.replicate_with_fsdp import replicate
from torch.distributed.device_mesh import init_device_mesh

dist.init_process_group("gloo", timeout=timedelta(seconds=30))
model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("replicate",))
replicate(model[0], mesh=mesh)
replicate(model, mesh=mesh)  # owns the last layer
hidden = model[0].register_forward_hook(lambda module, args, output: output.register_hook(lambda grad: 1 / 0) and None)
try:
    model(torch.ones(2, 4)).sum().backward()
except ZeroDivisionError:
    hidden.remove()
    model.reset_iter_state()
    model.zero_grad()
model(torch.ones(2, 4)).sum().backward()
grad = model[1].bias.grad.full_tensor().tolist()
wrong = torch.tensor([float(grad != [2.0] * 4)])
dist.all_reduce(wrong)
if dist.get_rank() == 0:
    print(f"gradient of the last bias: expected {[2.0] * 4}, got {grad}")
    print("WRONG" if wrong else "right")
dist.destroy_process_group()
raise SystemExit(int(wrong.item() > 0))
