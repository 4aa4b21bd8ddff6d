"""
FairScale's FullyShardedDataParallel: in forward, `named_parameters()` of the user's module is empty.

Expected: its parameters, as without sharding, and as with torch's own FullyShardedDataParallel and use_orig_params.
Seen with fairscale 0.4.13 (torch 2.13.0, gloo, CPU): they are attributes of the module, and views of a flat parameter.
CUDA's streams are replaced.
Run: python ci/findings/fairscale/no_parameters_in_forward.py
Upstream: https://github.com/facebookresearch/fairscale/issues/430 (open) is exact.
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
linear, seen = torch.nn.Linear(3, 2), []
linear.register_forward_pre_hook(lambda module, args: seen.extend(name for name, _ in module.named_parameters()))
FullyShardedDataParallel(linear, compute_device=torch.device("cpu"))(torch.ones(1, 3))
print(f"names in forward: expected {['weight', 'bias']}, got {seen}")
dist.destroy_process_group()
print("right" if seen == ["weight", "bias"] else "WRONG")
sys.exit(seen != ["weight", "bias"])
