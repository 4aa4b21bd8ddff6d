"""
FairScale's FullyShardedDataParallel: backward raises if a unit is called twice, each time in a checkpoint.

Expected: both gradients are added, as without sharding. Seen with fairscale 0.4.13 (torch 2.13.0, gloo, CPU), with
torch.utils.checkpoint without reentrance: ValueError "expected to be in states". CUDA's streams are replaced.
Run: torchrun --nproc-per-node 2 ci/findings/fairscale/unit_called_twice_in_checkpoints.py
Upstream: related, https://github.com/facebookresearch/fairscale/issues/918 (closed): several forwards, then backwards.
"""

import os
import sys
from datetime import timedelta
from unittest.mock import MagicMock

import torch
import torch.distributed as dist

for name in ("Stream", "Event", "current_stream", "stream", "synchronize", "empty_cache", "device"):
    setattr(torch.cuda, name, MagicMock())
torch.cuda.is_available = lambda: True
torch.Tensor.cuda = lambda tensor: tensor
torch.Tensor.record_stream = lambda tensor, stream: None
from fairscale.nn.data_parallel import FullyShardedDataParallel  # noqa: E402
from torch.utils.checkpoint import checkpoint  # noqa: E402

os.environ["ENABLE_NCCL_BASE_COLLECTIVES"] = "0"
dist.init_process_group("gloo", timeout=timedelta(seconds=30))
unit = FullyShardedDataParallel(torch.nn.Linear(4, 4), compute_device=torch.device("cpu"))
root = FullyShardedDataParallel(torch.nn.ModuleList([unit]), compute_device=torch.device("cpu"))


def forward(x):
    """The root's computation."""
    for _ in range(2):
        x = checkpoint(unit, x, use_reentrant=False)
    return x


root.module.forward = forward
problem = ""
try:
    root(torch.ones(1, 4)).sum().backward()
except (ValueError, AssertionError) as error:
    problem = str(error)
print(f"expected no error, got {problem!r}")
dist.destroy_process_group()
print("WRONG" if problem else "right")
sys.exit(bool(problem))
