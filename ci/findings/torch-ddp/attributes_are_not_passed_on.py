"""
DistributedDataParallel: attributes of the user's module cannot be read, and a Sequential cannot be indexed.

Expected: as with FullyShardedDataParallel and fully_shard, the wrapped module has the attributes of the original. Seen
with torch 2.13.0 (one process, CPU): they are on `.module` alone; what is set on the wrapper does not reach it.
Run: python ci/findings/torch-ddp/attributes_are_not_passed_on.py
Upstream: https://github.com/pytorch/pytorch/issues/108484 (open) asks for it.
"""

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
model = torch.nn.Sequential(torch.nn.Linear(2, 2))
model.id = "mine"
wrapped = DistributedDataParallel(model)
got = getattr(wrapped, "id", None), hasattr(wrapped, "__getitem__")
print(f"wrapped.id, and whether it can be indexed: expected {('mine', True)}, got {got}")
dist.destroy_process_group()
print("right" if got == ("mine", True) else "WRONG")
raise SystemExit(got != ("mine", True))
