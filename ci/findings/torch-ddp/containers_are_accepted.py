"""
DistributedDataParallel: a ModuleList, which has no forward, is wrapped without a word, and the first call raises.

Expected: an error or a warning, as from FullyShardedDataParallel and fully_shard. Seen with torch 2.13.0 (one process,
CPU): nothing until the wrapper is called, which raises NotImplementedError.
Run: python ci/findings/torch-ddp/containers_are_accepted.py
Upstream: no report found (searched November 2026); for FullyShardedDataParallel it was asked for:
https://github.com/pytorch/pytorch/issues/113794 (closed).
"""

import warnings

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
with warnings.catch_warnings(record=True) as caught:
    warnings.simplefilter("always")
    try:
        DistributedDataParallel(torch.nn.ModuleList([torch.nn.Linear(2, 2)]))
        refused = any("ModuleList" in str(warning.message) for warning in caught)
    except (NotImplementedError, ValueError, RuntimeError):
        refused = True
print(f"a ModuleList is refused or warned about: expected True, got {refused}")
dist.destroy_process_group()
print("right" if refused else "WRONG")
raise SystemExit(not refused)
