"""
torch.nn.utils.clip_grad_norm_ leaves out the root's gradients after a forward of a fully_shard model without backward.

Expected: the norm of all gradients, and all of them clipped, as without sharding. Seen with torch 2.13.0 (gloo, CPU):
the root stays gathered after the forward, here an evaluation, so model.parameters() gives parameters of it that have no
gradients, and nothing raises. With reshard_after_forward=True on the root it does not happen.
Run: torchrun --nproc-per-node 2 ci/findings/torch-fsdp2/clip_after_a_forward.py
Upstream: no report found (searched November 2026). That the root stays gathered after forward is by design:
https://github.com/pytorch/pytorch/issues/131965 (closed).
"""

from datetime import timedelta

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

dist.init_process_group("gloo", timeout=timedelta(seconds=30))
mesh = init_device_mesh("cpu", (2,))
x = torch.ones(2, 4)


def full(tensor):
    return tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor


def clip(shard):
    """The norm before clipping to 0.1, and that of what the optimizer steps with."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    if shard:
        fully_shard(model[0], mesh=mesh)
        fully_shard(model, mesh=mesh)  # owns the last layer
    parameters = list(model.parameters())  # as an optimizer holds them
    model(x).sum().backward()
    with torch.no_grad():
        model(x)
    norm = full(torch.nn.utils.clip_grad_norm_(model.parameters(), 0.1)).item()
    left = torch.linalg.vector_norm(torch.cat([full(parameter.grad).flatten() for parameter in parameters]))
    return round(norm, 4), round(left.item(), 4)


expected, got = clip(False), clip(True)
wrong = torch.tensor([float(expected != got)])
dist.all_reduce(wrong)
if dist.get_rank() == 0:
    print(f"norm of all gradients, and after clipping to 0.1: expected {expected}, got {got}")
    print("WRONG" if wrong else "right")
dist.destroy_process_group()
raise SystemExit(int(wrong.item() > 0))
