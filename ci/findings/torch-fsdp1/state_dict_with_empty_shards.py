"""
FullyShardedDataParallel: get_model_state_dict raises NotImplementedError if a rank has an empty shard, until 2.7.

Expected: a sharded state dict. Seen with torch 2.6.0 (gloo, CPU, use_orig_params=True): `Only single local shard is
supported.`, from asking a ShardedTensor of which the rank has no shard whether it is on the meta device. The same line
is in torch 2.7.
Torch: >=2.6,<2.8
Run: torchrun --nproc-per-node 2 ci/findings/torch-fsdp1/state_dict_with_empty_shards.py
Upstream: https://github.com/pytorch/pytorch/issues/141799 is exact.
"""

from datetime import timedelta

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.checkpoint.state_dict import get_model_state_dict
from torch.distributed.fsdp import FullyShardedDataParallel

dist.init_process_group("gloo", timeout=timedelta(seconds=30))
# One element for two ranks: the second one has none.
model = FullyShardedDataParallel(nn.Linear(1, 1, bias=False), use_orig_params=True, device_id=torch.device("cpu"))
model(torch.ones(1, 1)).sum().backward()
try:
    got = f"the names {sorted(get_model_state_dict(model))}"
except NotImplementedError as error:
    got = f"NotImplementedError: {error}"
print(f"rank {dist.get_rank()}: expected the names ['weight'], got {got}")
wrong = torch.tensor([float(got != "the names ['weight']")])
dist.all_reduce(wrong)
if dist.get_rank() == 0:
    print("WRONG" if wrong else "right")
dist.destroy_process_group()
raise SystemExit(int(wrong.item() > 0))
