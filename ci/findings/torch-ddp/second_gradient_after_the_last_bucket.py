"""
DistributedDataParallel does not notice a second gradient of a parameter if all buckets were reduced when it arrives.

Expected for a layer in two reentrant checkpoints: the error "Expected to mark a variable ready only once", which a
model with another layer before it gets, or the mean over ranks. Seen with torch 2.13.0 (gloo, CPU) if there is no other
layer: no error, and a gradient of which one part is the mean, and the other is the rank's own.
Run: torchrun --nproc-per-node 2 ci/findings/torch-ddp/second_gradient_after_the_last_bucket.py
Upstream: no report found (searched November 2026). Nearest: https://github.com/pytorch/pytorch/issues/121594 (open), on
gradients that checkpoints leave different between ranks.
"""

from datetime import timedelta

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint


class Twice(nn.Module):
    """One layer, called in two checkpoints."""

    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(3, 3, bias=False)
        nn.init.eye_(self.layer.weight)

    def forward(self, x):
        once = checkpoint(self.layer, x, use_reentrant=True)
        return checkpoint(self.layer, once, use_reentrant=True)


dist.init_process_group("gloo", timeout=timedelta(seconds=30))
rank = dist.get_rank()
model = DistributedDataParallel(Twice())
problem = "none"
try:
    model(torch.full((2, 3), rank + 1.0).requires_grad_()).sum().backward()
except RuntimeError as error:
    problem = str(error)
got = model.module.layer.weight.grad[0, 0].item()
# On rank r both uses give a gradient of 2 (r + 1), so the mean of the sums is 6.
print(f"rank {rank}: expected an error or a gradient of 6.0, got error {problem}, gradient {got}", flush=True)
wrong = torch.tensor([float(problem == "none" and got != 6.0)])
dist.all_reduce(wrong)
if rank == 0:
    print("WRONG" if wrong else "right")
dist.destroy_process_group()
raise SystemExit(int(wrong.item() > 0))
