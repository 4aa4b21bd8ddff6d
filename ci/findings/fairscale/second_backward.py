"""
FairScale's FullyShardedDataParallel: a second backward through one forward ends in an assertion without a message.

Expected: it works, or the error says that it is not possible. Seen with fairscale 0.4.13 (torch 2.13.0, gloo, CPU):
`assert self.has_full_params`. With one rank nothing is sharded, and it works. CUDA's streams are replaced.
Run: torchrun --nproc-per-node 2 ci/findings/fairscale/second_backward.py
Upstream: https://github.com/facebookresearch/fairscale/issues/1134 (open) has the same assertion, from checkpointing;
no report of two backwards found (searched November 2026).
"""

import os
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
os.environ["ENABLE_NCCL_BASE_COLLECTIVES"] = "0"  # gloo refuses the shapes of these
from fairscale.nn.data_parallel import FullyShardedDataParallel  # noqa: E402

dist.init_process_group("gloo")
model = FullyShardedDataParallel(torch.nn.Linear(4, 4), compute_device=torch.device("cpu"))
output = model(torch.ones(2, 4))
output.sum().backward(retain_graph=True)
got = "no error"
try:
    output.sum().backward()
except (AssertionError, RuntimeError) as error:
    got = f"{type(error).__name__}: {str(error) or 'without a message'}"
wrong = got.endswith("without a message")
print(f"a second backward: expected no error, or one that says why, got {got}")
dist.destroy_process_group()
print("WRONG" if wrong else "right")
sys.exit(wrong)
