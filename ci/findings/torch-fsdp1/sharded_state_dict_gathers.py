"""
FullyShardedDataParallel: a sharded state dict gathers every unit, and copies this rank's shards out of the result.

Expected: what the name says: this rank's shards, without communication, in the memory that the model uses.
Seen with torch 2.13.0 (gloo, CPU, use_orig_params=True): one all-gather for each unit, and new memory. So saving a
sharded checkpoint needs a whole unit's memory, and time that grows with the model.
Run: torchrun --nproc-per-node 2 ci/findings/torch-fsdp1/sharded_state_dict_gathers.py
Upstream: by design, https://github.com/pytorch/pytorch/pull/77356 (its first step is to summon the full parameters); no
report of the cost found (searched November 2026).
"""

import warnings
from datetime import timedelta
from unittest import mock

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.checkpoint.state_dict import get_model_state_dict
from torch.distributed.fsdp import FullyShardedDataParallel

warnings.simplefilter("ignore")  # ShardedTensor is deprecated, but it is what a sharded state dict has


def wrap(module):
    return FullyShardedDataParallel(module, use_orig_params=True, device_id=torch.device("cpu"))


dist.init_process_group("gloo", timeout=timedelta(seconds=30))
model = wrap(nn.Sequential(wrap(nn.Linear(4, 4)), nn.Linear(4, 4)))
model(torch.ones(1, 4)).sum().backward()
# On the CPU FullyShardedDataParallel gathers with all_gather, elsewhere with all_gather_into_tensor.
with (
    mock.patch.object(dist, "all_gather", wraps=dist.all_gather) as lists,
    mock.patch.object(dist, "all_gather_into_tensor", wraps=dist.all_gather_into_tensor) as tensors,
):
    state = get_model_state_dict(model)
gathers = lists.call_count + tensors.call_count
held = {parameter.untyped_storage().data_ptr() for parameter in model.parameters()}
shards = [shard.tensor for value in state.values() for shard in value.local_shards()]
copies = sum(shard.untyped_storage().data_ptr() not in held for shard in shards)
print(f"rank {dist.get_rank()}: all-gathers during a sharded state dict: expected 0, got {gathers}")
print(f"rank {dist.get_rank()}: shards in other memory than the model's: expected 0, got {copies} of {len(shards)}")
wrong = torch.tensor([float(gathers > 0 or copies > 0)])
dist.all_reduce(wrong)
if dist.get_rank() == 0:
    print("WRONG" if wrong else "right")
dist.destroy_process_group()
raise SystemExit(int(wrong.item() > 0))
