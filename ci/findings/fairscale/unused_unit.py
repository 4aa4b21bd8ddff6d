"""
FairScale's FullyShardedDataParallel: a unit whose output does not reach the loss raises in backward.

Expected: it gets no gradient, as with torch's own FullyShardedDataParallel. Seen with fairscale 0.4.13 (torch 2.13.0,
gloo, CPU): "expected to be in states [BACKWARD_POST] but current state is IDLE". CUDA's streams are replaced.
Run: python ci/findings/fairscale/unused_unit.py
Upstream: https://github.com/facebookresearch/fairseq/issues/3353 (open) has the same error.
"""

import sys
from unittest.mock import MagicMock

import torch
import torch.distributed as dist

stub = MagicMock()
for name in ("Stream", "Event", "current_stream", "stream", "synchronize", "empty_cache", "device"):
    setattr(torch.cuda, name, stub)
torch.cuda.is_available = lambda: True
torch.Tensor.cuda = lambda tensor: tensor
torch.Tensor.record_stream = lambda tensor, stream: None
from fairscale.nn.data_parallel import FullyShardedDataParallel  # noqa: E402

dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
units = [FullyShardedDataParallel(torch.nn.Linear(3, 3), compute_device=torch.device("cpu")) for _ in range(2)]
model = FullyShardedDataParallel(torch.nn.Sequential(*units), compute_device=torch.device("cpu"))
units[1].register_forward_hook(lambda unit, args, output: args[0])  # its own output is dropped
try:
    model(torch.ones(2, 3)).sum().backward()
    got = "none"
except ValueError as error:
    got = str(error)
print(f"error in backward: expected none, got {got}")
dist.destroy_process_group()
print("right" if got == "none" else "WRONG")
sys.exit(got != "none")
