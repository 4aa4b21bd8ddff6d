"""
FairScale's FullyShardedDataParallel: load_state_dict reports unexpected names with the prefix of its own wrapper.

Expected: the names of the state dict, as a module without sharding reports them. Seen with fairscale 0.4.13
(torch 2.13.0, gloo, CPU): `_fpw_module.` in front. CUDA's streams are replaced.
Run: python ci/findings/fairscale/unexpected_names_have_prefixes.py
Upstream: no report found (searched November 2026).
"""

import sys
from unittest.mock import MagicMock

import torch
import torch.distributed as dist

for name in ("Stream", "Event", "current_stream", "stream", "synchronize", "empty_cache", "device"):
    setattr(torch.cuda, name, MagicMock())
torch.cuda.is_available = lambda: True
torch.Tensor.cuda = lambda tensor: tensor
torch.Tensor.record_stream = lambda tensor, stream: None
from fairscale.nn.data_parallel import FullyShardedDataParallel  # noqa: E402

dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
plain = torch.nn.Linear(3, 2)
sharded = FullyShardedDataParallel(torch.nn.Linear(3, 2), compute_device=torch.device("cpu"))
state = {**plain.state_dict(), "other.weight": torch.zeros(2)}
expected, got = (model.load_state_dict(state, strict=False).unexpected_keys for model in (plain, sharded))
print(f"unexpected names: expected {expected}, got {got}")
dist.destroy_process_group()
print("right" if got == expected else "WRONG")
sys.exit(got != expected)
