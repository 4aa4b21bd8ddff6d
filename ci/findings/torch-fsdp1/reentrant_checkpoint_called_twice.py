"""
FullyShardedDataParallel: a unit that is called twice under reentrant checkpoints is reduced twice in each backward.

Expected: one reduce-scatter for each unit in each backward. Seen with torch 2.13.0 (gloo, CPU): one for each call. The
sum is right, but the unit sends its gradients twice. With non-reentrant checkpoints it is reduced once.
Run: torchrun --nproc-per-node 2 ci/findings/torch-fsdp1/reentrant_checkpoint_called_twice.py
Upstream: no report of the traffic found (searched November 2026). https://github.com/pytorch/pytorch/pull/89781 says
that reentrant checkpoints run hooks twice; https://github.com/facebookresearch/fairscale/pull/621 counts the calls.
"""

import warnings
from datetime import timedelta
from unittest import mock

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import FullyShardedDataParallel
from torch.utils.checkpoint import checkpoint

warnings.simplefilter("ignore")


def wrap(module):
    return FullyShardedDataParallel(module, use_orig_params=True, device_id=torch.device("cpu"))


class Twice(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.shared = nn.Linear(4, 4), wrap(nn.Linear(4, 4))

    def forward(self, x):
        x = checkpoint(self.shared, self.first(x), use_reentrant=True)
        return checkpoint(self.shared, x, use_reentrant=True)


dist.init_process_group("gloo", timeout=timedelta(seconds=30))
model = wrap(Twice())
name = "reduce_scatter_single" if hasattr(dist, "reduce_scatter_single") else "reduce_scatter_tensor"  # the older name
with mock.patch.object(dist, name, wraps=getattr(dist, name)) as reductions:
    model(torch.ones(2, 4)).sum().backward()
count = reductions.call_count
print(f"rank {dist.get_rank()}: reduce-scatters of two units in one backward: expected 2, got {count}")
wrong = torch.tensor([float(count != 2)])
dist.all_reduce(wrong)
if dist.get_rank() == 0:
    print("WRONG" if wrong else "right")
dist.destroy_process_group()
raise SystemExit(int(wrong.item() > 0))
