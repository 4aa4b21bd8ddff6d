"""
FullyShardedDataParallel: a checkpoint does not load if a rank has an empty shard, with SHARDED_STATE_DICT.

Expected: what was saved loads, with as many ranks or others. Seen with torch 2.13.0 (gloo, CPU, use_orig_params=True):
`Missing key in checkpoint state_dict: optim.param_groups`. A ShardedTensor of which a rank has no shard is left out
there (`_flatten_sharded_tensors`); DefaultLoadPlanner misses its key, takes the checkpoint for one from before
torch 2.4, and looks for the names of that time.
Run: torchrun --nproc-per-node 2 ci/findings/torch-fsdp1/checkpoint_with_empty_shards.py
Upstream: https://github.com/pytorch/pytorch/pull/163480 (closed, not merged) describes and fixes exactly this.
"""

import tempfile
from datetime import timedelta

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.checkpoint import load, save
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict
from torch.distributed.fsdp import FullyShardedDataParallel

dist.init_process_group("gloo", timeout=timedelta(seconds=30))
# One element for two ranks: the second one has none.
model = FullyShardedDataParallel(nn.Linear(1, 1, bias=False), use_orig_params=True, device_id=torch.device("cpu"))
optimizer = torch.optim.SGD(model.parameters(), lr=0.5, momentum=0.5)
model(torch.ones(1, 1)).sum().backward()
optimizer.step()
with tempfile.TemporaryDirectory() as own:
    folder = [own]
    dist.broadcast_object_list(folder)
    save({"optim": get_optimizer_state_dict(model, optimizer)}, checkpoint_id=folder[0])
    try:
        load({"optim": get_optimizer_state_dict(model, optimizer)}, checkpoint_id=folder[0])
        error = "none"
    except CheckpointException as caught:
        error = str(caught).strip().splitlines()[-1]
    dist.barrier()
wrong = torch.tensor([float(error != "none")])
dist.all_reduce(wrong)
if dist.get_rank() == 0:
    print(f"error of the load: expected none, got {error}")
    print("WRONG" if wrong else "right")
dist.destroy_process_group()
raise SystemExit(int(wrong.item() > 0))
