"""
FairScale's FullyShardedDataParallel: a unit in a checkpoint that is not reentrant raises in backward.

Expected: as with torch's own FullyShardedDataParallel, it is computed again and trained. Seen with fairscale 0.4.13
(torch 2.13.0, gloo, CPU): "expected to be in states [BACKWARD_PRE, BACKWARD_POST] but current state is FORWARD". A
reentrant checkpoint works. CUDA's streams are replaced.
Run: python ci/findings/fairscale/checkpoint_around_a_unit.py
Upstream: no report found (searched November 2026); torch's own class had the same, now fixed:
https://github.com/pytorch/pytorch/issues/82203 (closed).
"""

import sys
from unittest.mock import MagicMock

import torch
import torch.distributed as dist
from torch.utils.checkpoint import checkpoint

stub = MagicMock()
for name in ("Stream", "Event", "current_stream", "stream", "synchronize", "empty_cache", "device"):
    setattr(torch.cuda, name, stub)
torch.cuda.is_available = lambda: True
torch.Tensor.cuda = lambda tensor: tensor
torch.Tensor.record_stream = lambda tensor, stream: None
from fairscale.nn.data_parallel import FullyShardedDataParallel  # noqa: E402

dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
unit = FullyShardedDataParallel(torch.nn.Linear(3, 3), compute_device=torch.device("cpu"))
try:
    checkpoint(unit, torch.ones(2, 3, requires_grad=True), use_reentrant=False).sum().backward()
    got = "none"
except ValueError as error:
    got = str(error)
print(f"error in backward: expected none, got {got}")
dist.destroy_process_group()
print("right" if got == "none" else "WRONG")
sys.exit(got != "none")
