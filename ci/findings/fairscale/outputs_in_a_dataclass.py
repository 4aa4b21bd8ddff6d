"""
FairScale's FullyShardedDataParallel: a unit that returns a dataclass raises in backward.

Expected: as with a tuple or a dict, its parameters are trained. Seen with fairscale 0.4.13 (torch 2.13.0, gloo, CPU):
"expected to be in states [BACKWARD_PRE, BACKWARD_POST] but current state is IDLE". CUDA's streams are replaced.
Run: python ci/findings/fairscale/outputs_in_a_dataclass.py
Upstream: no report found (searched November 2026).
"""

import sys
from dataclasses import make_dataclass
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

Output = make_dataclass("Output", ["value"])
dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
linear = torch.nn.Linear(3, 3)
linear.register_forward_hook(lambda module, args, output: Output(output))
try:
    FullyShardedDataParallel(linear, compute_device=torch.device("cpu"))(torch.ones(2, 3)).value.sum().backward()
    got = "none"
except ValueError as error:
    got = str(error)
print(f"error in backward: expected none, got {got}")
dist.destroy_process_group()
print("right" if got == "none" else "WRONG")
sys.exit(got != "none")
