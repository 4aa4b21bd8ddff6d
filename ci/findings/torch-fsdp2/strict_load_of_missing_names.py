"""
set_model_state_dict with a full state dict accepts one that lacks a parameter, with strict=True, too.

Expected: an error with strict=True, and the name among missing_keys with strict=False. Seen with torch 2.13.0 (one
process, CPU; also with DistributedDataParallel and FullyShardedDataParallel): neither; the parameter keeps its value.
Run: python ci/findings/torch-fsdp2/strict_load_of_missing_names.py
Upstream: https://github.com/pytorch/pytorch/issues/126285 (closed) reports it for tensor-parallel models.
"""

import torch
import torch.distributed as dist
from torch.distributed.checkpoint.state_dict import StateDictOptions, set_model_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
model = torch.nn.Sequential(torch.nn.Linear(2, 3), torch.nn.Linear(3, 1))
state = {name: value.clone() for name, value in model.state_dict().items() if name != "1.weight"}
fully_shard(model, mesh=init_device_mesh("cpu", (1,)))
wrong = False
for strict, expected in ((True, "RuntimeError"), (False, "missing ['1.weight']")):
    try:
        options = StateDictOptions(full_state_dict=True, strict=strict)
        got = f"missing {set_model_state_dict(model, dict(state), options=options).missing_keys}"
    except RuntimeError:
        got = "RuntimeError"
    wrong |= got != expected
    print(f"strict={strict}: expected {expected}, got {got}")
print("WRONG" if wrong else "right")
dist.destroy_process_group()
raise SystemExit(int(wrong))
